"""Who is let in at once, who may wait, and who is refused."""

import pytest

from baton.v1 import types_pb2
from core.errors import ResourceExhausted
from router.tenants import ServiceClass, Tenant
from tests.router.admission_bench import Bench, cancel, gold, silver


async def test_while_there_is_room_nobody_waits():
    bench = Bench()
    await bench.admit(num_prompt_tokens=100)
    coroutine = bench.admit(num_prompt_tokens=100)
    with pytest.raises(StopIteration):
        coroutine.send(None)


async def test_a_class_without_a_share_is_told_when_others_have_gone_first_for_too_long():
    bench = Bench()
    running = await bench.admit(num_prompt_tokens=1000)
    bronze = Tenant("b", "bronze", ServiceClass(share=0.0, ttft_limit_s=0.05))
    overtaken = await bench.begin(bronze)
    waiting = [await bench.begin(gold()), await bench.begin(silver(ttft_limit_s=0.05))]
    with pytest.raises(ResourceExhausted, match="others went first") as caught:
        await overtaken
    assert caught.value.retry_after_s >= 0.05
    assert bench.admission.counters.refused == {"ttft": 1}
    assert bench.admission.gate.queue.counts().keys() == {"gold", "silver"}
    assert not any(task.done() for task in waiting)
    await cancel(waiting)
    running.close(8)
    assert bench.admission.ledger.num_inflight == 0


async def test_who_would_wait_too_long_for_its_class_is_refused_at_once():
    bench, limited = Bench(), silver(ttft_limit_s=2.5)
    await bench.measure()
    await bench.admit(num_prompt_tokens=1000)
    task = await bench.begin(limited, num_prompt_tokens=500)
    assert not task.done()
    with pytest.raises(ResourceExhausted, match=r"is expected in 2\.00 s; class silver") as error:
        # 1.5 is the margin: (1000 in flight + 500 in line + 500) / 1000 * 1.5 > 2.5.
        await bench.admit(limited, num_prompt_tokens=500)
    assert 0.5 <= error.value.retry_after_s <= 0.75
    assert bench.admission.counters.refused == {"ttft": 1}
    task.cancel()


async def test_without_a_limit_everybody_waits():
    bench = Bench()
    await bench.measure()
    await bench.admit(num_prompt_tokens=1000)
    tasks = [await bench.begin(num_prompt_tokens=1000) for _ in range(20)]
    assert not any(task.done() for task in tasks)
    await cancel(tasks)


async def test_a_deadline_that_cannot_be_met_is_refused_at_once():
    bench = Bench()
    await bench.measure()
    await bench.admit(num_prompt_tokens=1000)
    with pytest.raises(ResourceExhausted, match=r"deadline is in 1\.20 s"):
        await bench.admit(num_prompt_tokens=400, time_left_s=1.2)
    assert bench.admission.counters.refused == {"deadline": 1}


async def test_nobody_is_refused_while_nothing_is_in_flight():
    bench = Bench()
    await bench.measure()
    ticket = await bench.admit(silver(ttft_limit_s=0.1), num_prompt_tokens=5000)
    ticket.close(0)


async def test_a_tenants_line_has_an_end():
    bench = Bench(max_queued=2)
    await bench.admit(num_prompt_tokens=1000)
    tasks = [await bench.begin() for _ in range(2)]
    with pytest.raises(ResourceExhausted, match="2 requests of tenant s wait already") as error:
        await bench.admit()
    assert error.value.retry_after_s >= 1.0
    tasks.append(await bench.begin(gold()))
    assert bench.admission.gate.queue.counts() == {"silver": (2, 816), "gold": (1, 408)}
    await cancel(tasks)


async def test_the_margin_is_learned_from_those_that_waited():
    bench = Bench()
    await bench.measure()
    first = await bench.admit(num_prompt_tokens=1000)
    second = await bench.begin(num_prompt_tokens=1000)
    bench.now += 3.0
    first.prefilled()
    ticket = await second
    bench.now += 3.0
    ticket.prefilled()
    # Two seconds were expected, and it took six.
    assert bench.admission.forecaster.margins["silver"].value == pytest.approx(
        1.5 * (1 + 0.1 * 0.95)
    )
    assert bench.admission.forecaster.margins["gold"].value == 1.5


async def test_without_workers_requests_pass_on_to_where_workers_are_waited_for():
    bench = Bench()
    bench.pool.workers = {types_pb2.ROLE_PREFILL: [], types_pb2.ROLE_DECODE: []}
    bench.admission.on_workers()
    for _ in range(3):
        await bench.admit(place=False)
