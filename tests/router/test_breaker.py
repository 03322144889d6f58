"""Workers that fail are left alone for a while, and tried again with care."""

from dataclasses import dataclass

import pytest

from core.errors import InternalError, ResourceExhausted, Unreachable
from router.breaker import Breaker
from router.dispatch import AttemptFailed


@dataclass(frozen=True)
class Link:
    worker_id: str
    epoch: int = 1


A, B, C = Link("a"), Link("b"), Link("c")


class Bench:
    """A breaker with a clock of its own."""

    def __init__(self):
        self.now = 0.0
        self.breaker = Breaker(lambda: self.now)

    def fail(self, *links, times=1, error=None):
        for _ in range(times):
            with pytest.raises(AttemptFailed), self.breaker.attempt(links):
                names = frozenset(link.worker_id for link in links)
                raise AttemptFailed(error or InternalError("a bug"), names)

    def succeed(self, *links):
        with self.breaker.attempt(links):
            pass

    def allowed(self, *links):
        return [link.worker_id for link in self.breaker.allowed(links or (A, B, C))]


def test_a_worker_is_ejected_when_attempts_fail_in_a_row():
    bench = Bench()
    bench.fail(A, times=2)
    assert bench.allowed() == ["a", "b", "c"]
    bench.fail(A)
    assert bench.allowed() == ["b", "c"]


def test_a_success_between_failures_keeps_a_worker_in():
    bench = Bench()
    for _ in range(5):
        bench.fail(A, times=2)
        bench.succeed(A)
    assert bench.allowed() == ["a", "b", "c"]


def test_only_suspects_are_counted():
    bench = Bench()
    for _ in range(3):
        with pytest.raises(AttemptFailed), bench.breaker.attempt([A, B]):
            raise AttemptFailed(Unreachable("gone"), frozenset({"a"}))
    assert bench.allowed() == ["b", "c"]


def test_what_is_no_workers_fault_is_not_counted():
    bench = Bench()
    bench.fail(A, times=10, error=ResourceExhausted("no room"))
    assert bench.allowed() == ["a", "b", "c"]


def test_each_ejection_in_a_row_lasts_twice_as_long_up_to_a_minute():
    bench = Bench()
    bench.fail(A, times=3)
    lengths = []
    for _ in range(8):
        began_at = bench.now
        while bench.allowed() == ["b", "c"]:
            bench.now += 0.5
        lengths.append(bench.now - began_at)
        bench.fail(A)
    assert lengths == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_worker_that_is_tried_again_gets_one_request_until_its_first_output():
    bench = Bench()
    bench.fail(A, times=3)
    bench.now = 1.0
    assert bench.allowed() == ["a", "b", "c"]
    with bench.breaker.attempt([A, B]) as trial:
        assert bench.allowed() == ["b", "c"]
        trial.works(A)
        assert bench.allowed() == ["a", "b", "c"]
    bench.fail(A, times=2)
    assert bench.allowed() == ["a", "b", "c"], "a success closes the circuit"


def test_a_trial_that_is_cancelled_leaves_the_worker_open_to_the_next():
    bench = Bench()
    bench.fail(A, times=3)
    bench.now = 1.0
    with pytest.raises(KeyboardInterrupt), bench.breaker.attempt([A]):
        raise KeyboardInterrupt
    assert bench.allowed() == ["a", "b", "c"]


def test_what_began_before_an_ejection_says_nothing_new():
    bench = Bench()
    with bench.breaker.attempt([A]):
        bench.fail(A, times=3)
    assert bench.allowed() == ["b", "c"]
    with pytest.raises(AttemptFailed), bench.breaker.attempt([A]):
        bench.now = 1.0
        bench.fail(A)
        raise AttemptFailed(InternalError("late"), frozenset({"a"}))
    bench.now = 3.0
    assert bench.allowed() == ["a", "b", "c"]


def test_when_most_fail_alike_nobody_is_ejected():
    bench = Bench()
    bench.fail(A, B, times=3)
    assert bench.allowed() == ["a", "b", "c"]
    assert bench.allowed(A) == ["a"]
    assert bench.allowed(A, C) == ["c"], "half may be"


def test_a_new_life_of_a_worker_is_not_judged_by_the_former():
    bench = Bench()
    bench.fail(A, times=3)
    assert bench.allowed(Link("a", epoch=2), B, C) == ["a", "b", "c"]


def test_a_forgotten_worker_leaves_nothing():
    bench = Bench()
    bench.fail(A, times=3)
    bench.breaker.forget_all_but(["b"])
    assert bench.breaker._circuits == {}
