"""Token buckets, and a router's share of a tenant's quotas while Redis is away."""

from __future__ import annotations

from dataclasses import dataclass

from router.tenants import Quota


@dataclass
class Bucket:
    """A token bucket: `level` rises by `per_s` up to `burst`. It may be charged below zero."""

    per_s: float
    burst: float
    level: float
    at: float

    def wait_s(self, amount: float, now: float) -> float:
        """How long until `amount`, or a full bucket, is there; 0: now."""
        self.level = min(self.burst, self.level + (now - self.at) * self.per_s)
        self.at = now
        return max(0.0, (min(amount, self.burst) - self.level) / self.per_s)


def request_bucket(quota: Quota, share: float, now: float) -> Bucket | None:
    """One second's worth, and at least one request."""
    if quota.requests_per_s is None:
        return None
    per_s = quota.requests_per_s * share
    burst = max(1.0, per_s)
    return Bucket(per_s, burst, burst, now)


def token_bucket(quota: Quota, share: float, now: float) -> Bucket | None:
    """One minute's worth."""
    if quota.tokens_per_min is None:
        return None
    burst = quota.tokens_per_min * share
    return Bucket(burst / 60, burst, burst, now)


@dataclass
class LocalShare:
    """A tenant's part of its quota on this router."""

    quota: Quota
    requests: Bucket | None
    tokens: Bucket | None
    max_concurrent: float | None

    @classmethod
    def of(cls, quota: Quota, share: float, now: float) -> LocalShare:
        concurrent = quota.max_concurrent
        return cls(
            quota,
            request_bucket(quota, share, now),
            token_bucket(quota, share, now),
            None if concurrent is None else max(1.0, concurrent * share),
        )
