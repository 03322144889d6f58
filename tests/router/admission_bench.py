"""An admission without any worker or network, and a clock that tests move."""

import asyncio
import random

from baton.v1 import types_pb2
from router.admission import Admission, AdmissionConfig
from router.admission_refusals import Demand
from router.tenants import ServiceClass, Tenant
from tests.router.fakes import FINGERPRINT


class Worker:
    def __init__(self, worker_id):
        self.worker_id = worker_id


class Pool:
    """One prefill and one decode worker, with blocks of four tokens."""

    fingerprint = FINGERPRINT

    def __init__(self):
        self.workers = {types_pb2.ROLE_PREFILL: ["p"], types_pb2.ROLE_DECODE: ["d"]}

    def usable(self, role):
        return [Worker(name) for name in self.workers[role]]


class Bench:
    """An admission with a clock of its own. Prefill works at 1000 tokens a second."""

    def __init__(self, max_queued=100):
        self.now = 0.0
        self.pool = Pool()
        config = AdmissionConfig(max_queued, prefill_ahead_s=0.25, load_max_age_s=3.0)
        self.admission = Admission(
            config, self.pool, quotas=None, rng=random.Random(0), clock=lambda: self.now
        )
        self.admission.on_workers()

    async def admit(self, tenant=None, num_prompt_tokens=400, place=True, **demand):
        ticket = await self.admission.admit(
            Demand(
                request_id="r",
                tenant=tenant or silver(),
                num_prompt_tokens=num_prompt_tokens,
                max_tokens=demand.get("max_tokens", 8),
                num_choices=demand.get("num_choices", 1),
                priority=demand.get("priority", 0),
                time_left_s=demand.get("time_left_s", 600.0),
            )
        )
        if place:
            ticket.placed("p", "d", num_prompt_tokens)
        return ticket

    async def begin(self, *args, **demand):
        """A task that admits; it waits, or has its ticket."""
        task = asyncio.create_task(self.admit(*args, **demand))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return task

    async def measure(self):
        """Lets the router learn the speed."""
        ticket = await self.admit(num_prompt_tokens=1000)
        self.now += 1.0
        ticket.prefilled()
        ticket.close(8)

    def report_decode(self, free, running=1):
        blocks = types_pb2.BlockStats(total=1000, free=free)
        self.admission.on_load("d", types_pb2.Load(blocks=blocks, running=running))


async def cancel(tasks):
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def silver(**limits):
    return Tenant("s", "silver", ServiceClass(share=0.25, **limits))


def gold():
    return Tenant("g", "gold", ServiceClass(share=0.75))
