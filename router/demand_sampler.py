"""Looks at the demand every second, and at each question, and averages what it sees."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from core.errors import Unavailable
from core.tasks import TaskSet
from router.demand import DemandAverage, Deployment, Totals

_INTERVAL_S = 1.0

Sums = Callable[[], Awaitable[dict[Deployment, Totals]]]


class DemandSampler:
    """`sums` tells the demand now, or raises Unavailable; `clock` is in seconds."""

    def __init__(self, sums: Sums, clock: Callable[[], float]) -> None:
        self._sums = sums
        self._clock = clock
        self._averages: dict[Deployment, DemandAverage] = {}

    async def averages(self) -> dict[Deployment, Totals]:
        """Of every deployment there is now, with a look at it. Raises Unavailable."""
        sums = await self._sums()
        self._averages = {key: self._averages.get(key) or DemandAverage() for key in sums}
        now = self._clock()
        return {key: self._averages[key].add(totals, now) for key, totals in sums.items()}

    async def average(self, deployment: Deployment) -> Totals:
        """Of one of them. Raises Unavailable."""
        averages = await self.averages()
        if deployment not in averages:
            raise Unavailable(f"no router of {deployment[0]} has reported its demand")
        return averages[deployment]

    async def run(self) -> None:
        """Until cancelled. What cannot be seen is left out: who asks is told."""
        while True:
            with contextlib.suppress(Unavailable):
                await self.averages()
            await asyncio.sleep(_INTERVAL_S)


class DeploymentDemand:
    """The demand of one deployment, sampled from the first question on: most are never asked."""

    def __init__(self, sampler: DemandSampler, deployment: Deployment, tasks: TaskSet) -> None:
        self._sampler = sampler
        self._deployment = deployment
        self._tasks = tasks
        self._is_sampling = False

    async def average(self) -> Totals:
        """As it is now, averaged over the last seconds. Raises Unavailable."""
        if not self._is_sampling:
            self._is_sampling = True
            self._tasks.start(self._sampler.run())
        return await self._sampler.average(self._deployment)
