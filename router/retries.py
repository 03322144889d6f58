"""Which failed attempts are repeated, how soon, and what a client is told of the last. Pure."""

from __future__ import annotations

import random

from core.errors import BatonError, FailedPrecondition, Unavailable, status_of

MAX_FAILURES = 3
"""Attempts that may fail; those that decode preempts do not count."""
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
_FAILED_RETRY_S = 1.0
"""For clients whose request has failed so often: workers that have died are ejected by then."""


def is_final(error: BatonError, num_failures: int) -> bool:
    """Whether no attempt follows the one that failed last, with `error`."""
    return num_failures == MAX_FAILURES or not status_of(error).retryable


def backoff_s(error: BatonError, num_failures: int, rng: random.Random) -> float:
    """Doubles with every failure, at least what the worker asked for, spread by chance."""
    wait_s = max(_FIRST_BACKOFF_S * 2.0 ** (num_failures - 1), error.retry_after_s)
    return min(wait_s, _MAX_BACKOFF_S) * rng.uniform(0.5, 1.0)


def without_addresses(error: BatonError) -> BatonError:
    """What a client is told when attempts have failed: the log has where, and of what."""
    if isinstance(error, FailedPrecondition):
        return FailedPrecondition("the workers do not fit together; the router's log says why")
    if not isinstance(error, Unavailable):
        return error
    message = "the workers that served the request have failed; send it again"
    return Unavailable(message, retry_after_s=max(_FAILED_RETRY_S, error.retry_after_s))
