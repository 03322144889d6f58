"""The numbers that autoscaling goes by: who counts for which role, and each only once."""

import asyncio
import math

import pytest

from baton.v1 import types_pb2
from core.errors import ResourceExhausted, Unavailable
from core.registry import Registry
from router.demand import DemandAverage, Pace, RefusedWork, Totals, Work, sum_up, worker_totals
from router.demand_board import DemandBoard
from tests.router.admission_bench import Bench, cancel, silver

PREFILL, DECODE = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE


def router(router_id="r0", model="m", **fields):
    fields = {"num_prefill": 1, "num_decode": 1, "model_digest": "digest"} | fields
    return types_pb2.RouterDemand(router_id=router_id, release="baton", model=model, **fields)


def worker(worker_id, role, digest="digest", **load):
    return types_pb2.WorkerRecord(
        worker_id=worker_id,
        role=role,
        fingerprint=types_pb2.Fingerprint(model=digest),
        load=types_pb2.Load(**load),
    )


def workers(**prefill_load):
    return [worker("p", PREFILL, **prefill_load), worker("d", DECODE)]


def test_prompts_that_wait_or_are_computed_are_prefills_demand():
    load = types_pb2.Load(queue_depth=3, running=2, queued_tokens=900, exports=4)
    assert worker_totals(PREFILL, load) == Totals(5, 900, 0, 0)


def test_a_prompt_that_decode_holds_up_is_decodes_demand():
    held = {"held_requests": 2, "held_tokens": 700, "held_blocks": 30}
    load = types_pb2.Load(queue_depth=3, running=1, queued_tokens=900, **held)
    assert worker_totals(PREFILL, load) == Totals(2, 200, 2, 30)


def test_decode_counts_what_runs_is_read_and_waits_for_room():
    blocks = types_pb2.BlockStats(total=100, free=20, cached=30, referenced=50)
    load = types_pb2.Load(running=8, imports=2, queue_depth=3, blocks=blocks, held_blocks=12)
    assert worker_totals(DECODE, load) == Totals(0, 0, 13, 62)


def test_workers_count_once_however_many_routers_there_are():
    routers = [router("r0", prefill_prompts=1.5), router("r1", prefill_prompts=2)]
    sums = sum_up(routers, workers(queue_depth=4))
    assert sums == {("baton", "m"): Totals(prefill_prompts=7.5)}


def test_each_model_has_the_demand_of_its_own_workers():
    routers = [router("r0"), router("r1", model="n", model_digest="other")]
    theirs = [worker("p1", PREFILL, "other", running=9), worker("d1", DECODE, "other")]
    sums = sum_up(routers, [*workers(running=1), *theirs])
    assert sums[("baton", "m")].prefill_prompts == 1
    assert sums[("baton", "n")].prefill_prompts == 9


def test_a_sum_without_the_workers_that_routers_use_is_refused():
    with pytest.raises(Unavailable, match="decode workers of baton have not reported"):
        sum_up([router()], [worker("p", PREFILL)])


def test_a_deployment_whose_role_has_no_workers_has_a_demand():
    sums = sum_up([router(num_decode=0, decode_sequences=3)], [worker("p", PREFILL)])
    assert sums[("baton", "m")].decode_sequences == 3


def test_refused_work_counts_as_its_rate_times_the_time_it_would_take():
    refused = RefusedWork(window_s=10.0)
    for second in range(10):
        refused.note(Work(1, 1000, 80), patience_s=1.5, now=float(second))
    totals = refused.totals(Pace(prefill_s_per_token=0.0005, decode_s=6.0), now=9.5)
    # One a second; 2 s each at prefill, 6 s at decode.
    assert totals == Totals(2.0, 2000.0, 6.0, 480.0)


def test_refused_work_is_forgotten_after_the_window():
    refused = RefusedWork(window_s=10.0)
    refused.note(Work(1, 1000, 80), patience_s=1.0, now=0.0)
    assert refused.totals(Pace(0.001, 5.0), now=10.0) == Totals()


def test_an_average_begins_with_what_it_sees_first():
    assert DemandAverage(memory_s=30.0).add(Totals(4, 400), 5.0) == Totals(4, 400)


def test_an_average_forgets_by_time():
    average = DemandAverage(memory_s=30.0)
    average.add(Totals(10), 0.0)
    later = average.add(Totals(0), 30.0)
    assert later.prefill_prompts == pytest.approx(10 / math.e)


async def test_who_waits_in_the_router_counts_for_the_role_without_room():
    bench = Bench()
    await bench.admit(num_prompt_tokens=1000)
    task = await bench.begin(num_prompt_tokens=400)
    assert bench.admission.demand(has_decode=True) == Totals(1, 400, 0, 0)
    await cancel([task])


async def test_who_waits_in_the_router_for_decode_is_decodes_demand():
    bench = Bench()
    bench.report_decode(free=30)
    await bench.admit(num_prompt_tokens=16)
    task = await bench.begin(num_prompt_tokens=400)
    assert bench.admission.demand(has_decode=True) == Totals(0, 0, 1, 102)
    await cancel([task])


async def test_a_request_without_a_decode_worker_is_decodes_demand():
    bench = Bench()
    await bench.admit(num_prompt_tokens=16, place=False)
    assert bench.admission.demand(has_decode=False) == Totals(0, 0, 1, 6)


async def test_refused_requests_are_demand_of_both_roles():
    bench = Bench()
    await bench.measure()
    await bench.admit(num_prompt_tokens=3000)
    with pytest.raises(ResourceExhausted):
        await bench.admit(silver(ttft_limit_s=1.0), num_prompt_tokens=600)
    demand = bench.admission.demand(has_decode=True)
    # 1 s of patience and 0.6 s to compute it, of 15 s.
    assert demand.prefill_prompts == pytest.approx(1.6 / 15)
    assert demand.decode_sequences > 0


async def test_the_board_adds_routers_and_workers_up(redis):
    board, registry = DemandBoard(redis, lease_s=600), Registry(redis, lease_s=600)
    await board.publish(router("r0", decode_blocks=2))
    await board.publish(router("r1", decode_blocks=3))
    for record in workers(queue_depth=2):
        await registry.publish(record)
    assert await board.sums() == {("baton", "m"): Totals(2, 0, 0, 5)}


async def test_a_router_that_is_gone_is_not_counted(redis):
    board = DemandBoard(redis, lease_s=0.05)
    await board.publish(router("r0"))
    await asyncio.sleep(0.1)
    with pytest.raises(Unavailable, match="no router"):
        await board.sums()


async def test_a_router_that_leaves_takes_its_record_away(redis):
    board = DemandBoard(redis)
    await board.publish(router("r0"))
    await board.remove("r0")
    with pytest.raises(Unavailable, match="no router"):
        await board.sums()


async def test_without_redis_there_is_no_demand_to_tell(redis, redis_server):
    board = DemandBoard(redis)
    await board.publish(router("r0"))
    redis_server.kill()
    with pytest.raises(Unavailable):
        await board.sums()
