"""Who waits at the gate, and who goes next, when, and when it is given up."""

import asyncio

from tests.router.admission_bench import Bench, cancel, gold, silver


async def test_the_next_goes_when_prefill_comes_near_the_end_of_its_work():
    bench = Bench()
    first = await bench.admit(num_prompt_tokens=1000)
    second = await bench.begin()
    assert bench.admission.gate.num_waiting_for_prefill == 1
    assert bench.admission.gate.queue.counts() == {"silver": (1, 408)}
    first.prefilled()
    (await second).close(8)
    first.close(8)
    assert bench.admission.gate.queue.counts() == {}
    assert bench.admission.ledger.num_inflight == 0


async def test_without_room_on_decode_requests_wait_here_and_count_as_decodes_demand():
    bench = Bench()
    first = await bench.admit(num_prompt_tokens=40)
    bench.report_decode(free=10)
    second = await bench.begin(num_prompt_tokens=40)
    assert not second.done()
    assert bench.admission.gate.num_waiting_for_decode == 1
    assert bench.admission.gate.num_waiting_for_prefill == 0
    first.prefilled()
    bench.report_decode(free=40)
    await second


async def test_the_next_goes_when_nothing_is_in_flight_whatever_reports_say():
    bench = Bench()
    first = await bench.admit()
    bench.report_decode(free=0)
    second = await bench.begin()
    assert not second.done()
    first.close(0)
    await second


async def test_a_report_that_grows_old_holds_nobody_up():
    bench = Bench()
    (await bench.admit()).prefilled()
    bench.report_decode(free=0)
    second = await bench.begin()
    assert not second.done()
    bench.now += 4.0
    bench.admission.gate.pump()
    await second


async def test_choices_that_may_outgrow_the_pool_wait_for_a_part_of_it_only():
    bench = Bench()
    await bench.admit(num_prompt_tokens=100)
    bench.report_decode(free=270)
    # 50 blocks of prompt, and output for 1500: it counts for a quarter of the pool's 1000.
    many = await bench.begin(num_prompt_tokens=200, max_tokens=60, num_choices=100)
    # The first needs 27, and there is one for each of the two to grow.
    bench.report_decode(free=328)
    assert bench.admission.gate.num_waiting_for_decode == 1
    bench.report_decode(free=329)
    assert bench.admission.gate.num_waiting_for_decode == 0
    await many


async def test_a_waiting_request_that_is_cancelled_leaves_the_line():
    bench = Bench()
    first = await bench.admit(num_prompt_tokens=1000)
    waiting = [await bench.begin(gold()) for _ in range(3)]
    await cancel(waiting[:2])
    assert bench.admission.gate.queue.counts() == {"gold": (1, 408)}
    first.close(0)
    (await waiting[2]).close(0)
    assert bench.admission.ledger.num_inflight == 0


async def test_a_request_cancelled_at_the_moment_of_its_turn_holds_nothing():
    bench = Bench()
    first = await bench.admit(num_prompt_tokens=1000)
    waiting, last = await bench.begin(), await bench.begin()
    first.close(0)
    await cancel([waiting])
    assert waiting.cancelled()
    (await last).close(0)
    assert bench.admission.ledger.num_inflight == 0


async def test_classes_share_what_there_is():
    bench = Bench()
    running = await bench.admit(num_prompt_tokens=1000)
    waiting = {}
    for tenant in [silver()] * 8 + [gold()] * 8:
        waiting[await bench.begin(tenant, num_prompt_tokens=1000)] = tenant.name
    order = []
    for _ in range(8):
        running.close(8)
        (done,), _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        order.append(waiting.pop(done))
        running = done.result()
    assert sorted(order) == ["g"] * 6 + ["s"] * 2
    await cancel(waiting)


async def test_who_was_cancelled_at_the_head_of_the_queue_disturbs_nobody():
    bench = Bench()
    await bench.measure()
    running = await bench.admit(num_prompt_tokens=1000)
    first, second = [await bench.begin(num_prompt_tokens=1000) for _ in range(2)]
    first.cancel()
    # Before the task of the cancelled one has run.
    running.close(0)
    assert (await second) is not None
    assert first.cancelled()
    assert bench.admission.gate.queue.counts().get("silver", (0, 0))[0] == 0
