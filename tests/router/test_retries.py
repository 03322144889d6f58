"""Which failed attempts are repeated, how soon, and what a client is told of the last."""

import random

import pytest

from core.errors import FailedPrecondition, InternalError, InvalidArgument, Unavailable
from router.retries import backoff_s, is_final, without_addresses


class Longest(random.Random):
    """Chance always gives the most."""

    def uniform(self, a, b):
        return b


def test_the_third_failure_is_the_last():
    lost = Unavailable("the worker has left")
    assert [is_final(lost, count) for count in (1, 2, 3)] == [False, False, True]


def test_what_would_fail_everywhere_is_not_repeated():
    assert is_final(InvalidArgument("too long"), 1)


def test_the_wait_doubles_up_to_a_second():
    waits = [backoff_s(Unavailable("lost"), count, Longest()) for count in (1, 2, 3, 9)]
    assert waits == [0.05, 0.1, 0.2, 1.0]


def test_a_worker_may_ask_for_a_longer_wait():
    assert backoff_s(Unavailable("full", retry_after_s=0.7), 1, Longest()) == 0.7


def test_those_that_failed_together_do_not_come_back_together():
    waits = {backoff_s(Unavailable("lost"), 3, random.Random(seed)) for seed in range(20)}
    assert len(waits) == 20
    assert min(waits) >= 0.1
    assert max(waits) <= 0.2


@pytest.mark.parametrize("kind", [Unavailable, FailedPrecondition])
def test_a_client_is_told_no_addresses(kind):
    assert "10.0.0.7" not in without_addresses(kind("10.0.0.7:8000 is gone")).message


def test_a_client_comes_back_when_dead_workers_are_out_or_as_late_as_they_asked():
    assert without_addresses(Unavailable("lost")).retry_after_s == 1.0
    assert without_addresses(Unavailable("full", retry_after_s=4.0)).retry_after_s == 4.0


def test_other_errors_are_told_as_they_are():
    error = InternalError("tokens are missing")
    assert without_addresses(error) is error
