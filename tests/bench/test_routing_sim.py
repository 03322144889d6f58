"""The simulated deployment of bench.routing."""

from __future__ import annotations

import pytest

from bench.routing import COSTS, prepare
from bench.routing_pods import Clock, Holdings
from bench.routing_sim import Cluster, Outcome, Simulation
from bench.routing_trace import (
    LruBlocks,
    Request,
    hot_trace,
    ideal_hit_tokens,
    read_trace,
    synthetic_trace,
)
from router.policies import PolicyName

SMALL = Cluster(COSTS, num_prefill=2, num_decode=2, cache_blocks=200)


def simulate(policy: PolicyName, seed: int = 0, cluster: Cluster = SMALL) -> Outcome:
    workload = prepare(synthetic_trace(200, seed=1), cluster, utilization=0.6)
    return Simulation(cluster, policy, seed).run(workload.requests)


def alone(cluster: Cluster, *requests: Request) -> Outcome:
    return Simulation(cluster, "kv_aware", 0).run(requests)


def test_a_run_is_determined_by_its_seed() -> None:
    first, again, other = simulate("kv_aware"), simulate("kv_aware"), simulate("kv_aware", seed=2)
    assert first.ttft_s == again.ttft_s
    assert first.ttft_s != other.ttft_s


@pytest.mark.parametrize("policy", ["kv_aware", "least_loaded", "round_robin"])
def test_every_request_gets_its_first_token_and_ends(policy: PolicyName) -> None:
    outcome = simulate(policy)
    assert len(outcome.ttft_s) == 200
    assert min(outcome.ttft_s) > 0
    assert 0 < outcome.num_computed <= outcome.num_prompt


def test_looking_at_prefixes_saves_computing() -> None:
    assert simulate("kv_aware").hit_rate > 1.2 * simulate("least_loaded").hit_rate


def test_a_prompt_alone_takes_as_long_as_the_cost_model_says() -> None:
    outcome = alone(SMALL, Request(5.0, 1000, 10, (1,)))
    assert outcome.ttft_s == [pytest.approx(COSTS.prefill_s(1000, 0))]


def test_the_second_of_two_equal_prompts_computes_what_is_no_full_block() -> None:
    ids = tuple(range(4))
    outcome = alone(SMALL, Request(0.0, 2100, 10, ids), Request(100.0, 2100, 10, ids))
    assert outcome.num_computed == 2100 + 52
    # Few enough tokens for decode, which holds the others.
    assert outcome.num_stayed == 1
    assert len(outcome.prefill_busy_s) == 2


def test_a_prompt_stays_out_when_decode_is_full_until_there_is_room() -> None:
    cluster = Cluster(COSTS, num_prefill=1, num_decode=1, cache_blocks=4)
    requests = [Request(0.0, 1500, 100, (1, 2)), Request(1.0, 1500, 100, (3, 4))]
    outcome = alone(cluster, *requests)
    decoding_s = 99 * COSTS.decode_s(1, 1500)
    assert outcome.ttft_s[1] > outcome.ttft_s[0] + decoding_s


def test_blocks_that_were_used_longest_ago_leave_a_cache_from_the_end_of_their_chain() -> None:
    cache = LruBlocks(4)
    cache.store((1, 2, 3))
    assert cache.store((1, 7, 8)) == ([7, 8], [3])
    assert [cache.num_held(ids) for ids in ((1, 2, 3), (1, 7, 8), (9,))] == [2, 3, 0]


def test_few_prefixes_that_all_begin_with_do_not_keep_their_homes_busy_beside_idle_pods() -> None:
    cluster = Cluster(COSTS)
    workload = prepare(hot_trace(2000, 4, seed=0), cluster, utilization=0.3)
    outcome = Simulation(cluster, "kv_aware", seed=0).run(workload.requests)
    assert outcome.prefill_imbalance < 1.3
    assert outcome.hit_rate > 0.98 * workload.ideal_hit_rate


def test_the_ideal_is_one_cache_of_the_whole_size() -> None:
    requests = [Request(0.0, 1100, 1, (1, 2))] * 2 + [Request(0.0, 512, 1, (3,))]
    assert ideal_hit_tokens(requests, 10) == [0, 1024, 0]


def test_the_index_knows_of_a_cache_a_little_later() -> None:
    clock = Clock()
    holdings = Holdings(LruBlocks(8), clock, lag_s=0.1)
    holdings.store((1, 2))
    assert (holdings.num_known((1, 2)), holdings.cache.num_held((1, 2))) == (0, 2)
    clock.now = 0.1
    assert holdings.num_known((1, 2, 3)) == 2


def test_a_trace_counts_full_blocks_only(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 1500, "input_length": 1030, "output_length": 7, "hash_ids": [4, 5, 6]}\n'
    )
    assert read_trace(path) == [Request(1.5, 1030, 7, (4, 5))]
