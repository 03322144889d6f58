"""Who is let in at once, who waits, and who is refused, without any worker or network."""

import asyncio
import random

import pytest

from baton.v1 import types_pb2
from core.errors import ResourceExhausted
from router.admission import Admission, AdmissionConfig
from router.admission_refusals import Demand
from router.tenants import ServiceClass, Tenant
from tests.router.fakes import FINGERPRINT


class Worker:
    def __init__(self, worker_id):
        self.worker_id = worker_id


class Pool:
    """One prefill and one decode worker, with blocks of four tokens."""

    fingerprint = FINGERPRINT

    def __init__(self):
        self.workers = {types_pb2.ROLE_PREFILL: ["p"], types_pb2.ROLE_DECODE: ["d"]}

    def usable(self, role):
        return [Worker(name) for name in self.workers[role]]


class Bench:
    """An admission with a clock of its own. Prefill works at 1000 tokens a second."""

    def __init__(self, max_queued=100):
        self.now = 0.0
        self.pool = Pool()
        config = AdmissionConfig(max_queued, prefill_ahead_s=0.25, load_max_age_s=3.0)
        self.admission = Admission(
            config, self.pool, quotas=None, rng=random.Random(0), clock=lambda: self.now
        )
        self.admission.on_workers()

    async def admit(self, tenant=None, num_prompt_tokens=400, place=True, **demand):
        ticket = await self.admission.admit(
            Demand(
                request_id="r",
                tenant=tenant or silver(),
                num_prompt_tokens=num_prompt_tokens,
                max_tokens=demand.get("max_tokens", 8),
                num_choices=demand.get("num_choices", 1),
                priority=demand.get("priority", 0),
                time_left_s=demand.get("time_left_s", 600.0),
            )
        )
        if place:
            ticket.placed("p", "d", num_prompt_tokens)
        return ticket

    async def begin(self, *args, **demand):
        """A task that admits; it waits, or has its ticket."""
        task = asyncio.create_task(self.admit(*args, **demand))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task

    async def measure(self):
        """Lets the router learn the speed."""
        ticket = await self.admit(num_prompt_tokens=1000)
        self.now += 1.0
        ticket.prefilled()
        ticket.close(8)

    def report_decode(self, free, running=1):
        blocks = types_pb2.BlockStats(total=1000, free=free)
        self.admission.on_load("d", types_pb2.Load(blocks=blocks, running=running))


async def cancel(tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def silver(**limits):
    return Tenant("s", "silver", ServiceClass(share=0.25, **limits))


def gold():
    return Tenant("g", "gold", ServiceClass(share=0.75))


async def test_while_there_is_room_nobody_waits():
    bench = Bench()
    await bench.admit(num_prompt_tokens=100)
    coroutine = bench.admit(num_prompt_tokens=100)
    with pytest.raises(StopIteration):
        coroutine.send(None)


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
