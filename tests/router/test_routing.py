"""Which way the policies choose."""

import random

import pytest

from router.policies import make_policy
from router.routing import Prompt, RoutingCosts, RoutingCounters, Work, WorkerView

PLAIN = RoutingCosts(work=1, transfer_block=1, handoff=0, sequence=8, context_block=0)


def prefill(worker_id="p", held=0, queued=0.0, predicted=0.0):
    """`queued`: None for a worker whose report is too old."""
    reported = None if queued is None else Work(queued_blocks=queued)
    return WorkerView(worker_id, held, reported, Work(queued_blocks=predicted))


def decode(worker_id="d", held=0, sequences=0.0, predicted=0.0, free=1000, **work):
    reported = None if sequences is None else Work(sequences=sequences, **work)
    return WorkerView(worker_id, held, reported, Work(sequences=predicted), free)


def choose(prefills, decodes, policy="kv_aware", costs=PLAIN, seed=0, **prompt):
    chosen = make_policy(policy, costs, random.Random(seed))
    return chosen.choose(Prompt(**{"num_blocks": 10, **prompt}), prefills, decodes)


def prefill_choices(*views, **options):
    """Every worker that chance may choose."""
    return {choose(views, [decode()], seed=seed, **options).prefill for seed in range(40)}


def decode_choices(*views, **options):
    return {choose([prefill()], views, seed=seed, **options).decode for seed in range(40)}


def test_the_prefill_worker_with_the_longest_prefix_is_chosen():
    views = prefill("a", held=2), prefill("b", held=5), prefill("c")
    assert prefill_choices(*views) == {"b"}


def test_equal_prefixes_go_to_the_less_loaded_worker():
    assert prefill_choices(prefill("a", held=5, queued=3), prefill("b", held=5)) == {"b"}


def test_what_the_router_has_sent_since_the_report_counts_as_load():
    assert prefill_choices(prefill("a", held=5, predicted=3), prefill("b", held=5)) == {"b"}


def test_near_ties_are_decided_by_chance():
    views = prefill("a"), prefill("b", queued=0.1), prefill("c", queued=1)
    assert prefill_choices(*views) == {"a", "b"}


def test_a_long_queue_on_prefill_makes_no_ties_of_decode_workers():
    busy = prefill(queued=1e6)
    choices = {
        choose([busy], [decode("a", sequences=3), decode("b")], seed=seed).decode
        for seed in range(40)
    }
    assert choices == {"b"}


def test_a_prefix_is_not_worth_waiting_longer_than_it_saves():
    assert prefill_choices(prefill("a", held=5, queued=6), prefill("b")) == {"b"}
    assert prefill_choices(prefill("a", held=5, queued=4), prefill("b")) == {"a"}


def test_work_saved_may_weigh_more_than_waiting():
    costs = RoutingCosts(work=4)
    assert prefill_choices(prefill("a", held=5, queued=19), prefill("b"), costs=costs) == {"a"}
    assert prefill_choices(prefill("a", held=5, queued=22), prefill("b"), costs=costs) == {"b"}


def test_a_worker_of_unknown_load_is_neither_idle_nor_full():
    unknown, busy = prefill("b", queued=None), prefill("c", queued=8)
    assert prefill_choices(prefill("a"), unknown, busy) == {"a"}
    assert prefill_choices(unknown, busy, prefill("d", queued=4)) == {"d"}
    assert prefill_choices(unknown, busy, prefill("d", queued=10)) == {"c"}


def test_a_worker_that_failed_comes_last_but_is_not_excluded():
    assert prefill_choices(prefill("a", held=9), prefill("b"), avoid={"a"}) == {"b"}
    assert prefill_choices(prefill("a", held=9), avoid={"a"}) == {"a"}
    assert decode_choices(decode("a", held=9), decode("b"), avoid={"a"}) == {"b"}


def test_the_decode_worker_that_holds_more_is_chosen_when_load_is_equal():
    assert decode_choices(decode("a", held=3), decode("b", held=8)) == {"b"}


def test_the_decode_worker_with_fewer_sequences_is_chosen():
    assert decode_choices(decode("a", sequences=3), decode("b", sequences=2)) == {"b"}
    assert decode_choices(decode("a", predicted=1), decode("b")) == {"b"}


def test_the_decode_worker_that_reads_less_context_is_chosen():
    costs = RoutingCosts(context_block=0.1)
    views = decode("a", sequences=2, context_blocks=900), decode("b", sequences=3)
    assert decode_choices(*views, costs=costs) == {"b"}


def test_a_decode_worker_without_room_comes_last():
    assert decode_choices(decode("a", held=2, free=7), decode("b", sequences=9)) == {"b"}
    assert decode_choices(decode("a", held=2, free=8), decode("b", sequences=9)) == {"a"}


def test_blocks_of_what_was_sent_since_the_report_are_no_room():
    crowded = WorkerView("a", 0, Work(), Work(context_blocks=15), free_blocks=20)
    assert decode_choices(crowded, decode("b", sequences=9)) == {"b"}


def test_a_decode_worker_of_unknown_load_has_its_share_of_equal_choices():
    frozen = decode("frozen", sequences=None, free=None)
    assert decode_choices(frozen, decode("known")) == {"frozen", "known"}


def test_a_prompt_that_decode_nearly_holds_stays_there():
    decision = choose([prefill(held=10)], [decode(held=8)], local_blocks=2)
    assert (decision.prefill, decision.computed_blocks, decision.held_blocks) == (None, 2, 8)
    assert choose([prefill()], [decode(held=7)], local_blocks=2).prefill == "p"


def test_a_prompt_does_not_stay_behind_others_that_decode_has_to_compute():
    behind = decode(held=8, queued_blocks=1)
    assert choose([prefill()], [behind], local_blocks=2).prefill == "p"
    assert choose([prefill()], [behind], local_blocks=3).prefill is None


def test_nothing_stays_on_decode_when_that_is_off():
    assert choose([prefill()], [decode(held=10)], local_blocks=0).prefill == "p"


def test_prefill_and_decode_are_chosen_together():
    """The way over a busy prefill costs so much that a fuller decode worker is the better one."""
    views = decode("holds", held=9, sequences=3), decode("idle")
    idle = choose([prefill(held=10)], views, local_blocks=1)
    busy = choose([prefill(held=10, queued=50)], views, local_blocks=1)
    assert (idle.prefill, idle.decode) == ("p", "idle")
    assert (busy.prefill, busy.decode) == (None, "holds")


def test_a_suspect_on_prefill_is_avoided_by_staying_on_decode():
    views = decode("holds", held=9, sequences=9), decode("idle")
    decision = choose([prefill()], views, local_blocks=1, avoid={"p"})
    assert (decision.prefill, decision.decode, decision.num_suspects) == (None, "holds", 0)


def test_a_prefix_that_another_worker_holds_is_pulled_where_that_is_cheaper():
    costs = RoutingCosts(work=1, pull_block=0.1)
    decision = choose([prefill("a", queued=9, held=8), prefill("b")], [decode()], costs=costs)
    assert (decision.prefill, decision.pull_from) == ("b", "a")
    assert (decision.pulled_blocks, decision.computed_blocks) == (8, 2)
    assert choose([prefill("a", held=8), prefill("b")], [decode()], costs=costs).pull_from is None


def test_a_prefix_is_pulled_from_either_role_but_not_for_a_few_blocks_or_from_a_suspect():
    costs = RoutingCosts(work=1, pull_block=1)

    def source(held, **prompt):
        return choose([prefill(held=held)], [decode(held=8)], costs=costs, **prompt).pull_from

    assert (source(held=4), source(held=5), source(held=8)) == ("d", None, None)
    assert source(held=0, avoid={"d"}) is None


def test_workers_that_hold_the_same_prefix_are_pulled_from_by_turns():
    costs = RoutingCosts(work=1, pull_block=1)
    views = decode("x", held=8), decode("y", held=8)
    sources = {choose([prefill()], views, costs=costs, seed=seed).pull_from for seed in range(20)}
    assert sources == {"x", "y"}


def test_a_prefix_that_can_be_pulled_at_the_price_of_computing_attracts_no_more_requests():
    views = [prefill("a", held=8), prefill("b", queued=1)], [decode(held=8)]
    plain, pulling = (RoutingCosts(work=6, pull_block=pull) for pull in (None, 6))
    assert choose(*views, costs=plain).prefill == choose(*views, costs=pulling).prefill == "a"


def test_least_loaded_does_not_look_at_prefixes():
    views = prefill("a", held=9, queued=1), prefill("b")
    assert prefill_choices(*views, policy="least_loaded") == {"b"}
    assert choose(views, [decode(held=10)], "least_loaded", local_blocks=9).prefill == "b"


def test_round_robin_takes_turns_and_leaves_suspects_out():
    policy = make_policy("round_robin", PLAIN, random.Random(0))
    views = [prefill(name) for name in "abc"], [decode(name) for name in "xy"]
    ways = [policy.choose(Prompt(10, avoid={"b"}), *views) for _ in range(4)]
    assert [way.prefill + way.decode for way in ways] == ["ax", "cy", "ax", "cy"]


@pytest.mark.parametrize("policy", ["kv_aware", "least_loaded", "round_robin"])
def test_a_decision_says_what_it_is_made_of(policy):
    decision = choose([prefill(held=4, queued=3)], [decode(held=2, sequences=5)], policy)
    formula = "3 queued + 1*6 computed + 0 handoff + 1*8 moved + 8*5 sequences + 0*0 context"
    assert decision.formula(PLAIN) == formula


def test_counters_add_decisions_up():
    counters = RoutingCounters()
    counters.count(choose([prefill(held=4)], [decode()], avoid={"p"}))
    counters.count(choose([prefill()], [decode(held=9)], local_blocks=1))
    assert (counters.decisions, counters.stayed, counters.with_suspects) == (2, 1, 1)
    assert (counters.computed_blocks, counters.held_blocks) == (7, 13)
