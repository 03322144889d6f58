"""Tasks that belong together end together."""

import asyncio

import pytest

from core.tasks import together


class Child:
    """Runs until it is cancelled; then it cleans up until it is let go or cancelled again, and
    needs some turns of the loop to end."""

    def __init__(self) -> None:
        self.is_running = asyncio.Event()
        self.cleans_up = asyncio.Event()
        self.may_end = asyncio.Event()
        self.has_ended = False

    async def run(self) -> None:
        try:
            self.is_running.set()
            await asyncio.Event().wait()
        finally:
            self.cleans_up.set()
            try:
                await self.may_end.wait()
            finally:
                for _ in range(5):
                    await asyncio.sleep(0)
                self.has_ended = True


async def fail_after(event: asyncio.Event) -> None:
    await event.wait()
    raise ValueError("a child's own")


async def answer(number: int) -> int:
    return number


async def test_results_come_in_the_order_of_what_was_asked():
    assert await together([answer(2), answer(1)]) == [2, 1]
    assert await together([answer(3)]) == [3]


async def test_a_failure_is_raised_when_the_others_have_ended():
    child = Child()
    group = asyncio.ensure_future(together([child.run(), fail_after(child.is_running)]))
    await child.cleans_up.wait()
    assert not group.done()
    child.may_end.set()
    with pytest.raises(ValueError, match="a child's own"):
        await group
    assert child.has_ended


async def test_a_child_that_ends_as_cancelled_ends_the_others():
    async def loses_what_it_depends_on() -> None:
        raise asyncio.CancelledError

    child = Child()
    child.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await together([child.run(), answer(1), loses_what_it_depends_on()])
    assert child.has_ended


async def test_a_cancellation_reaches_each_once():
    child = Child()
    group = asyncio.ensure_future(together([child.run(), answer(1), asyncio.sleep(600)]))
    await child.is_running.wait()
    group.cancel()
    await child.cleans_up.wait()
    for _ in range(10):
        await asyncio.sleep(0)
    assert not child.has_ended
    child.may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await group
    assert child.has_ended


@pytest.mark.parametrize("fails", [False, True])
async def test_a_cancellation_of_who_waits_for_the_others_leaves_nobody_behind(fails):
    child, never = Child(), asyncio.Event()
    failing = fail_after(child.is_running if fails else never)
    group = asyncio.ensure_future(together([child.run(), failing]))
    await child.is_running.wait()
    if not fails:
        group.cancel()
    await child.cleans_up.wait()
    # The group waits for the child by now, whatever was first.
    for _ in range(3):
        await asyncio.sleep(0)
    group.cancel()
    with pytest.raises(asyncio.CancelledError):
        await group
    assert child.has_ended
