"""What is in flight at workers, and what is left there."""

import math

import pytest

from baton.v1 import types_pb2
from router.admission_ledger import Ledger, Workers
from router.admission_workers import InFlight


def ledger(num_prefill=1, num_decode=1, prefill_ahead_s=0.25):
    made = Ledger(prefill_ahead_s, load_max_age_s=3.0)
    made.set_workers([f"p{i}" for i in range(num_prefill)], [f"d{i}" for i in range(num_decode)])
    return made


def item(num_tokens=1000):
    return InFlight(num_tokens, need_blocks=14, growth_blocks=4)


def send(made, one=None, prefill="p0", decode="d0", now=0.0):
    one = one or item()
    made.released(one)
    made.placed(one, Workers(prefill, decode), one.num_tokens, now)
    return one


def load(free=0, cached=0, running=0, queue_depth=0, queued_tokens=0, total=100):
    blocks = types_pb2.BlockStats(total=total, free=free, cached=cached)
    return types_pb2.Load(
        blocks=blocks, running=running, queue_depth=queue_depth, queued_tokens=queued_tokens
    )


def test_prefill_has_a_turn_when_it_is_near_the_end_of_its_work():
    made = ledger()
    assert made.has_prefill_turn()
    long, short = send(made, item(num_tokens=600)), send(made, item(num_tokens=400))
    assert not made.has_prefill_turn()
    made.prefilled(long, now=0.2)
    # 400 tokens at the measured 3000 a second.
    assert made.has_prefill_turn()
    made.prefilled(short, now=0.4)
    decay = math.exp(-0.2 / 2.0)
    assert made.tokens_per_s == pytest.approx((decay * 600 + 400) / (decay * 0.2 + 0.2))


def test_one_prefill_worker_with_a_turn_is_enough():
    made = ledger(num_prefill=2)
    send(made, prefill="p0")
    assert made.has_prefill_turn()
    send(made, prefill="p1")
    assert not made.has_prefill_turn()


def test_requests_on_their_way_count_before_they_are_placed():
    made = ledger(num_prefill=2)
    for _ in range(2):
        made.released(item())
    assert not made.has_prefill_turn()


def test_a_report_tells_what_other_routers_have_sent():
    made = ledger()
    send(made)
    made.reported("p0", load(queued_tokens=5000), now=0.0)
    assert made.prefill_tokens == 5000
    made.reported("p0", load(queued_tokens=300), now=0.0)
    assert made.prefill_tokens == 1000


def test_speed_is_that_of_the_worker_not_of_this_routers_share():
    made = ledger()
    one = send(made)
    made.reported("p0", load(queued_tokens=4000), now=0.0)
    made.prefilled(one, now=2.0)
    assert made.tokens_per_s == pytest.approx(2000)


def test_a_worker_that_was_not_measured_counts_as_the_mean_of_others():
    made = ledger(num_prefill=2)
    assert not made.is_measured
    made.prefilled(send(made), now=1.0)
    assert made.is_measured
    assert made.tokens_per_s == 2000


def test_an_attempt_that_failed_leaves_its_workers():
    made = ledger(num_prefill=2)
    one = send(made, prefill="p0")
    made.placed(one, Workers("p1", "d0"), one.num_tokens, now=1.0)
    assert made.prefill_tokens == 1000
    made.prefilled(one, now=2.0)
    made.ended(one, now=3.0)
    assert (made.prefill_tokens, made.num_inflight) == (0, 0)


def test_a_worker_that_goes_and_comes_back_starts_from_nothing():
    made = ledger()
    one = send(made)
    made.set_workers([], [])
    assert made.has_prefill_turn() and made.has_room(1000, now=0.0)
    made.set_workers(["p0"], ["d0"])
    made.ended(one, now=1.0)
    assert (made.prefill_tokens, made.num_inflight) == (0, 0)


def test_decodes_room_is_what_is_free_less_what_is_on_its_way():
    made = ledger()
    made.reported("d0", load(free=20, cached=20, running=3), now=0.0)
    assert made.has_room(36, now=0.0)
    assert not made.has_room(37, now=0.0)
    send(made)
    assert made.has_room(22, now=0.0)
    assert not made.has_room(23, now=0.0)


def test_a_report_after_the_hand_off_knows_the_blocks_but_not_their_growth():
    made = ledger()
    one = send(made)
    made.reported("d0", load(free=50, running=1), now=0.0)
    assert not made.has_room(35, now=0.0)
    made.prefilled(one, now=1.0)
    made.reported("d0", load(free=50, running=1), now=1.0)
    assert made.has_room(46, now=1.0)
    assert not made.has_room(47, now=1.0)
    made.ended(one, now=2.0)
    assert made.has_room(48, now=2.0)


def test_who_waits_on_decode_is_taken_to_need_as_much():
    made = ledger()
    made.reported("d0", load(free=40, running=1, queue_depth=2), now=0.0)
    assert made.has_room(12, now=0.0)
    assert not made.has_room(13, now=0.0)


def test_who_was_just_sent_does_not_count_twice_when_it_waits_there():
    made = ledger()
    send(made)
    made.reported("d0", load(free=40, running=1, queue_depth=1), now=0.0)
    assert made.has_room(24, now=0.0)


def test_an_idle_decode_worker_takes_what_is_larger_than_it_looks():
    made = ledger()
    made.reported("d0", load(free=3), now=0.0)
    assert made.has_room(50, now=0.0)


def test_an_old_report_means_unknown_and_not_full():
    made = ledger()
    made.reported("d0", load(running=9), now=0.0)
    assert not made.has_room(1, now=2.9)
    assert made.has_room(1, now=3.1)
    assert made.blocks_short(10, now=3.1) == 0.0


def test_a_request_must_fit_on_one_decode_worker():
    made = ledger(num_decode=2)
    for name in ("d0", "d1"):
        made.reported(name, load(free=20, running=1), now=0.0)
    assert not made.has_room(30, now=0.0)
    assert made.has_room(18, now=0.0)


def test_blocks_become_free_as_fast_as_requests_leave():
    made = ledger()
    assert made.blocks_per_s() is None
    one = send(made)
    made.reported("d0", load(total=100, running=9), now=0.0)
    made.prefilled(one, now=1.0)
    made.ended(one, now=6.0)
    assert made.blocks_per_s() == 20
    assert made.blocks_short(39, now=0.0) == 49


def test_what_others_have_there_is_counted_above_what_is_to_be_computed_of_ones_own():
    made = ledger(prefill_ahead_s=0.1)
    one = item(num_tokens=1000)
    made.released(one)
    made.placed(one, Workers("p0", "d0"), num_uncached=100, now=0.0)
    made.reported("p0", load(queued_tokens=600), now=0.1)
    assert made.prefill_tokens == 1000 + 500
    made.prefilled(one, now=0.2)
    assert made.prefill_tokens == 500
