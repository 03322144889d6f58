"""A home of a busy prefix gives a part of its work away."""

import random

from router.policies import make_policy
from router.prefill_shares import NUM_REMEMBERED, PrefillShares
from router.routing import Prompt, RoutingCosts, Work, WorkerView

BOTH = ["p0", "p1"]


def shares(times=100, **num_blocks):
    """So many prompts of so many blocks for each worker."""
    made = PrefillShares()
    made.exceeding(list(num_blocks))
    for _ in range(times):
        for name, num in num_blocks.items():
            made.add(name, num)
    return made


def test_who_has_more_than_its_share_exceeds_it():
    # Of 12 on average, a hundred times: the limit is 1.15 of that and 8 prompts more.
    assert shares(p0=14, p1=10).exceeding(BOTH) == set()
    assert shares(p0=16, p1=8).exceeding(BOTH) == {"p0"}


def test_a_few_prompts_tell_nothing():
    assert shares(times=10, p0=16, p1=8).exceeding(BOTH) == set()
    assert shares(times=8, p0=16, p1=0).exceeding(BOTH) == set()
    assert shares(times=30, p0=16, p1=0).exceeding(BOTH) == {"p0"}


def test_a_new_worker_makes_nobody_exceed_its_share():
    made = shares(p0=10)
    assert made.exceeding(["p0", "new"]) == set()
    made.add("new", 900)
    assert made.exceeding(["p0", "new"]) == {"new"}


def test_what_was_long_ago_is_forgotten():
    made = shares(p0=30, p1=10)
    assert made.exceeding(BOTH) == {"p0"}
    for _ in range(4 * NUM_REMEMBERED):
        made.add("p0", 1)
        made.add("p1", 1)
    assert made.exceeding(BOTH) == set()


def test_a_prefix_that_all_share_gets_more_homes_though_nothing_waits():
    policy = make_policy("kv_aware", RoutingCosts(), random.Random(0))
    held = {"p0": 50, "p1": 0, "p2": 0}
    taken = dict.fromkeys(held, 0)
    for _ in range(300):
        views = [WorkerView(name, blocks, Work(), Work()) for name, blocks in held.items()]
        decode = [WorkerView("d0", 0, Work(), Work())]
        chosen = policy.choose(Prompt(num_blocks=60), views, decode).prefill
        held[chosen] = 50
        taken[chosen] += 1
    assert set(held.values()) == {50}
    assert max(taken.values()) < 1.3 * 100
