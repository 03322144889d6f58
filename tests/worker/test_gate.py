"""Who may ask decode for room."""

from __future__ import annotations

import asyncio

from prefill_svc.gate import Gate, Ticket


async def _enter(gate: Gate, *tickets: Ticket) -> list[asyncio.Task[None]]:
    tasks = [asyncio.ensure_future(gate.enter(ticket)) for ticket in tickets]
    await asyncio.sleep(0)
    return tasks


async def _cancel(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_requests_enter_in_order_while_their_tokens_fit() -> None:
    gate = Gate(max_tokens_ahead=100, max_pinned_blocks=1000, num_pinned=lambda: 0)
    first, second, third = (Ticket("d0", 60, 4), Ticket("d0", 40, 3), Ticket("d0", 1, 1))
    tasks = await _enter(gate, first, second, third)
    assert [t.entered.is_set() for t in (first, second, third)] == [True, True, False]
    gate.leave(first)
    assert third.entered.is_set()
    await _cancel(tasks)


async def test_a_prompt_over_the_limit_enters_when_it_is_alone() -> None:
    gate = Gate(max_tokens_ahead=100, max_pinned_blocks=1000, num_pinned=lambda: 0)
    huge = Ticket("d0", 5000, 400)
    tasks = await _enter(gate, huge)
    assert huge.entered.is_set()
    await _cancel(tasks)


async def test_a_full_decode_worker_holds_up_only_its_own_requests() -> None:
    gate = Gate(max_tokens_ahead=10, max_pinned_blocks=1000, num_pinned=lambda: 0)
    stuck, behind, other = Ticket("d0", 10, 1), Ticket("d0", 10, 1), Ticket("d1", 10, 1)
    tasks = await _enter(gate, stuck, behind, other)
    assert not behind.entered.is_set()
    assert other.entered.is_set()
    await _cancel(tasks)


async def test_exports_bound_what_is_let_in_but_one_may_exceed_the_bound() -> None:
    pinned = 8
    gate = Gate(max_tokens_ahead=1000, max_pinned_blocks=10, num_pinned=lambda: pinned)
    large = Ticket("d0", 100, 12)
    tasks = await _enter(gate, large)
    assert not large.entered.is_set()
    pinned = 0
    gate.update()
    assert large.entered.is_set()
    await _cancel(tasks)


async def test_a_request_that_leaves_the_line_lets_the_next_one_in() -> None:
    gate = Gate(max_tokens_ahead=10, max_pinned_blocks=1000, num_pinned=lambda: 0)
    first, second, third = (Ticket("d0", n, 1) for n in (6, 9, 4))
    tasks = await _enter(gate, first, second, third)
    gate.leave(second)
    assert third.entered.is_set()
    assert gate.num_waiting == 0
    await _cancel(tasks)


async def test_small_prompts_for_others_do_not_starve_a_large_one() -> None:
    pinned = 8
    gate = Gate(max_tokens_ahead=1000, max_pinned_blocks=10, num_pinned=lambda: pinned)
    large, small = Ticket("d0", 100, 9), Ticket("d1", 10, 1)
    tasks = await _enter(gate, large, small)
    assert not small.entered.is_set()
    pinned = 0
    gate.update()
    assert [large.entered.is_set(), small.entered.is_set()] == [True, True]
    await _cancel(tasks)


async def test_the_only_one_in_a_line_may_leave_it() -> None:
    gate = Gate(max_tokens_ahead=10, max_pinned_blocks=1000, num_pinned=lambda: 0)
    stuck, behind, other = Ticket("d0", 10, 1), Ticket("d0", 10, 1), Ticket("d1", 10, 1)
    tasks = await _enter(gate, stuck, behind)
    gate.leave(behind)
    tasks += await _enter(gate, other)
    assert other.entered.is_set()
    assert gate.num_waiting == 0
    await _cancel(tasks)
