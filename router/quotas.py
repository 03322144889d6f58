"""Quotas of tenants over all routers: counters in Redis, local shares while it is away.

Requests a second and tokens a minute are token buckets; what is in flight is counted by
leases that their router renews, so that a router's death gives its share back. Tokens are
charged as expected, and corrected when the request has ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import resources

from core.errors import BatonError, ResourceExhausted, Unavailable
from core.logs import event
from core.redis_client import RedisClient, redis_errors
from core.tasks import TaskSet
from router.buckets import Bucket, LocalShare, request_bucket, token_bucket
from router.tenants import Tenant

logger = logging.getLogger(__name__)

LEASE_S = 15.0
RENEW_S = 5.0
_TIMEOUT_S = 0.2
_PAUSE_S = 1.0
_CONCURRENT_RETRY_S = 1.0
_ROUTERS_KEY = "baton:routers"
_FIELDS = ("requests_per_s", "tokens_per_min", "max_concurrent")


@dataclass(eq=False)
class Charge:
    """What one request has taken, and what it has used. `bucket` is set when its tokens were
    taken from the local share."""

    tenant: Tenant
    member: str
    num_tokens: int
    num_used: int = 0
    bucket: Bucket | None = None
    is_in_doubt: bool = False
    """Redis was asked and did not answer: it may have been charged there, too."""


@dataclass
class _InFlight:
    """Requests of one tenant on this router."""

    tenant: Tenant
    charges: dict[str, Charge] = field(default_factory=dict)
    """By member."""


class Quotas:
    """One router's view. `run` keeps the leases; `hold` is `take` and `settle` in one."""

    def __init__(self, redis: RedisClient, router_id: str, tasks: TaskSet) -> None:
        self._redis = redis
        self._router_id = router_id
        self._tasks = tasks
        self._take_script = redis.register_script(_read("quota_take.lua"))
        self._settle_script = redis.register_script(_read("quota_settle.lua"))
        self._renew_script = redis.register_script(_read("lease_renew.lua"))
        self._in_flight: dict[str, _InFlight] = {}
        self._local: dict[str, LocalShare] = {}
        self._owed: list[Charge] = []
        """Over, but Redis was away, and may have been charged for them."""
        self._num_routers = 1
        self._resume_at = 0.0
        self._is_away = False

    @asynccontextmanager
    async def hold(self, tenant: Tenant, member: str, num_tokens: int) -> AsyncIterator[Charge]:
        """Counts one request as in flight, and charges its `num_used` in the end.

        Raises as `take` does.
        """
        charge = await self.take(tenant, member, num_tokens)
        try:
            yield charge
        finally:
            self.settle(charge, charge.num_used)

    async def take(self, tenant: Tenant, member: str, num_tokens: int) -> Charge:
        """Charges one request of `num_tokens`. Raises ResourceExhausted, whose field names
        the quota. `member` is unique among all routers."""
        charge = Charge(tenant, member, num_tokens)
        if time.monotonic() < self._resume_at:
            self._take_locally(charge)
        else:
            try:
                await self._take_from_redis(charge)
            except (Unavailable, TimeoutError) as error:
                self._note_away(error)
                self._take_locally(charge)
                charge.is_in_doubt = True
            except asyncio.CancelledError:
                # It may have been charged all the same.
                self._tasks.start(self._settle(charge, num_tokens))
                raise
        holding = self._in_flight.setdefault(tenant.name, _InFlight(tenant))
        holding.charges[member] = charge
        return charge

    def settle(self, charge: Charge, num_tokens: int) -> None:
        """The request is over and has used `num_tokens`."""
        holding = self._in_flight[charge.tenant.name]
        del holding.charges[charge.member]
        if not holding.charges:
            del self._in_flight[charge.tenant.name]
        correction = charge.num_tokens - num_tokens
        if charge.bucket is not None:
            charge.bucket.level += correction
            correction = charge.num_tokens if charge.is_in_doubt else 0
        self._tasks.start(self._settle(charge, correction))

    async def run(self) -> None:
        """Renews leases and counts routers until cancelled."""
        while True:
            try:
                await self._renew()
            except (Unavailable, TimeoutError) as error:
                self._note_away(error)
            await asyncio.sleep(RENEW_S)

    async def _take_from_redis(self, charge: Charge) -> None:
        quota = charge.tenant.quota
        requests, tokens = request_bucket(quota, 1, 0), token_bucket(quota, 1, 0)
        args: list[str | float] = [charge.member, LEASE_S, charge.num_tokens]
        for bucket in (requests, tokens):
            args += [bucket.per_s, bucket.burst] if bucket is not None else [0, 0]
        args.append(quota.max_concurrent or 0)
        async with asyncio.timeout(_TIMEOUT_S):
            with redis_errors():
                over, wait_ms = await self._take_script(keys=_keys(charge.tenant), args=args)
        if self._is_away:
            event(logger, logging.INFO, "quotas_back")
        self._is_away = False
        self._local.clear()
        if over:
            raise _over(charge.tenant, _FIELDS[over - 1], wait_ms / 1000)

    def _take_locally(self, charge: Charge) -> None:
        tenant, now = charge.tenant, time.monotonic()
        local = self._local.get(tenant.name)
        if local is None or local.quota != tenant.quota:
            local = LocalShare.of(tenant.quota, 1 / self._num_routers, now)
            self._local[tenant.name] = local
        holding = self._in_flight.get(tenant.name)
        num_held = len(holding.charges) if holding is not None else 0
        waits = (
            local.requests.wait_s(1, now) if local.requests else 0.0,
            local.tokens.wait_s(charge.num_tokens, now) if local.tokens else 0.0,
            _CONCURRENT_RETRY_S if num_held >= (local.max_concurrent or num_held + 1) else 0.0,
        )
        for name, wait_s in zip(_FIELDS, waits, strict=True):
            if wait_s > 0:
                raise _over(tenant, name, wait_s)
        if local.requests is not None:
            local.requests.level -= 1
        if local.tokens is not None:
            local.tokens.level -= charge.num_tokens
            charge.bucket = local.tokens

    async def _settle(self, charge: Charge, correction: int) -> None:
        if time.monotonic() < self._resume_at:
            if charge.is_in_doubt:
                self._owed.append(charge)
            return
        try:
            args: list[str | float] = [charge.member, correction]
            with redis_errors():
                await self._settle_script(keys=_keys(charge.tenant), args=args)
        except Unavailable as error:
            # The lease ends by itself, and a bucket heals within a minute.
            if charge.is_in_doubt:
                self._owed.append(charge)
            self._note_away(error)

    async def _renew(self) -> None:
        with redis_errors():
            args: list[str | float] = [LEASE_S, self._router_id]
            self._num_routers = await self._renew_script(keys=[_ROUTERS_KEY], args=args)
            while self._owed:
                # Owed until it has been given back; others may come behind it meanwhile.
                await self._give_back(self._owed[0])
                del self._owed[0]
            for name, holding in list(self._in_flight.items()):
                keys = _keys(holding.tenant)
                for charge in [item for item in holding.charges.values() if item.is_in_doubt]:
                    await self._give_back(charge)
                    charge.is_in_doubt = False
                sent = sorted(holding.charges)
                await self._renew_script(keys=keys[1:], args=[LEASE_S, *sent])
                current = self._in_flight.get(name)
                gone = set(sent).difference(current.charges if current is not None else ())
                for member in gone:
                    # It was settled meanwhile, and that may have come before.
                    await self._settle_script(keys=keys, args=[member, 0])

    async def _give_back(self, charge: Charge) -> None:
        """It counts in the local share, so not in Redis, if it was ever taken there."""
        args: list[str | float] = [charge.member, charge.num_tokens]
        await self._settle_script(keys=_keys(charge.tenant), args=args)

    def _note_away(self, error: Exception) -> None:
        self._resume_at = time.monotonic() + _PAUSE_S
        if not self._is_away:
            event(logger, logging.WARNING, "quotas_away", error=error)
        self._is_away = True


def is_over_quota(error: BatonError) -> bool:
    """Whether `error` is a tenant's own limit, not a lack of room."""
    return isinstance(error, ResourceExhausted) and error.field in _FIELDS


def _keys(tenant: Tenant) -> list[str]:
    # The braces put both on one node of a Redis Cluster.
    return [f"baton:quota:{{{tenant.name}}}", f"baton:quota-leases:{{{tenant.name}}}"]


def _over(tenant: Tenant, quota: str, retry_after_s: float) -> ResourceExhausted:
    limit = getattr(tenant.quota, quota)
    return ResourceExhausted(
        f"tenant {tenant.name} is over its quota: {quota} is {limit:g}",
        field=quota,
        retry_after_s=retry_after_s,
    )


def _read(name: str) -> str:
    return resources.files("router").joinpath(name).read_text(encoding="utf-8")
