"""What goes wrong with the pods, and when: drawn from a seed, carried out, put right again.

One worker of each role stays alive at any time, but for moments; with `is_hard` none need to,
and the router dies too.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from dataclasses import dataclass

import grpc

from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from bench.chaos_faults import KILL_ROUTER, Fault, Faults
from bench.pods import START_TIMEOUT_S, Pod, PodStack
from core.rpc import open_channel

MEAN_GAP_S = 0.5
_POLL_S = 0.1
_LONGEST_MOMENT_S = 0.5
_TAIL_CHARS = 600
_ROLES = ("prefill", "decode")


@dataclass(frozen=True)
class ChaosLimits:
    """What a suspended worker can miss."""

    lease_s: float
    """Life of an export without renewal."""
    silence_s: float
    """After so long the router counts it as lost."""
    is_hard: bool = False


@dataclass(frozen=True)
class Plan:
    """One drawn fault."""

    kind: str
    hold_s: float
    """From the fault until it is undone."""


Act = Callable[[Fault, Plan], Awaitable[None]]


class Chaos:
    """Breaks pods of `stack`. Processes are started on the event loop's thread, with which
    they would die."""

    def __init__(
        self,
        stack: PodStack,
        faults: Faults,
        limits: ChaosLimits,
        say: Callable[[str], None],
    ) -> None:
        self._stack = stack
        self._faults = faults
        self._limits = limits
        self._say = say
        self._busy: set[Pod] = set()
        """Pods in a fault, or not yet usable after one."""
        self._acts: dict[str, tuple[float, Act]] = {
            "kill": (4, self._kill),
            "terminate": (1, self._terminate),
            "suspend": (10, self._suspend),
            "suspend and kill": (2, self._suspend_and_kill),
            "suspend role": (1, self._suspend),
            "kill redis": (0.7, self._kill_redis),
            "suspend redis": (0.7, self._suspend),
            "nothing": (0.5, self._nothing),
        }
        if limits.is_hard:
            self._acts[KILL_ROUTER] = (1, self._kill)

    async def run(self, stop: asyncio.Event, rng: random.Random) -> None:
        """Until `stop`; then everything that it broke is put right before it returns."""
        running: set[asyncio.Task[None]] = set()
        watching = asyncio.create_task(self._watch())
        try:
            while not await _is_set_within(stop, rng.expovariate(1 / MEAN_GAP_S)):
                plan = self._draw(rng)
                pods = self._choose(plan.kind, rng)
                if pods is not None:
                    running.add(asyncio.create_task(self._apply(plan, pods)))
            await asyncio.gather(*running)
        finally:
            watching.cancel()
            for task in running:
                task.cancel()

    def _draw(self, rng: random.Random) -> Plan:
        kinds = list(self._acts)
        (kind,) = rng.choices(kinds, weights=[weight for weight, _ in self._acts.values()])
        lease_s, silence_s = self._limits.lease_s, self._limits.silence_s
        ranges = ((0.0, _LONGEST_MOMENT_S), (lease_s, silence_s), (silence_s, 2 * silence_s))
        return Plan(
            kind, rng.uniform(*(ranges[0] if kind == "suspend role" else rng.choice(ranges)))
        )

    def _choose(self, kind: str, rng: random.Random) -> tuple[Pod, ...] | None:
        """Whom it hits; None when that would hit too many at once."""
        if kind == "nothing":
            return ()
        if kind.endswith("redis"):
            return self._unless_busy(self._stack.redis)
        if kind.endswith("router"):
            return self._unless_busy(self._stack.router)
        role = rng.choice(_ROLES)
        pods = [pod for name, pod in self._stack.workers.items() if name.startswith(role)]
        if kind == "suspend role":
            return self._unless_busy(*pods)
        pod = rng.choice(pods)
        return self._unless_busy(pod, spared=() if self._limits.is_hard else pods)

    def _unless_busy(self, *pods: Pod, spared: Iterable[Pod] = ()) -> tuple[Pod, ...] | None:
        return None if self._busy & {*pods, *spared} else pods

    async def _apply(self, plan: Plan, pods: tuple[Pod, ...]) -> None:
        fault = Fault(plan.kind, pods, time.monotonic())
        names = ", ".join(pod.name for pod in pods)
        self._say(f"{plan.kind} {names} for {plan.hold_s:.1f} s")
        self._faults.add(fault)
        self._busy.update(pods)
        try:
            _, act = self._acts[plan.kind]
            await act(fault, plan)
            await self._wait_usable(pods)
        except RuntimeError as error:
            self._note_problem(str(error))
        finally:
            fault.over_at = time.monotonic()
            self._busy.difference_update(pods)

    async def _nothing(self, fault: Fault, plan: Plan) -> None:
        """For comparison: how long it takes until the next good answer."""

    async def _kill(self, fault: Fault, plan: Plan) -> None:
        (pod,) = fault.pods
        pod.kill()
        await self._start_later(fault, plan)

    async def _terminate(self, fault: Fault, plan: Plan) -> None:
        (pod,) = fault.pods
        try:
            exit_code = await asyncio.to_thread(pod.terminate)
        except subprocess.TimeoutExpired:
            pod.kill()
            exit_code = None
        log = pod.log()[-_TAIL_CHARS:]
        await self._start_later(fault, plan)
        if exit_code != 0:
            raise RuntimeError(f"{pod.name} was told to stop: exit code {exit_code}\n{log}")

    async def _start_later(self, fault: Fault, plan: Plan) -> None:
        await asyncio.sleep(plan.hold_s)
        fault.undone_at = time.monotonic()
        for pod in fault.pods:
            pod.start()

    async def _suspend(self, fault: Fault, plan: Plan) -> None:
        for pod in fault.pods:
            pod.suspend()
        await asyncio.sleep(plan.hold_s)
        fault.undone_at = time.monotonic()
        for pod in fault.pods:
            pod.resume()

    async def _suspend_and_kill(self, fault: Fault, plan: Plan) -> None:
        (pod,) = fault.pods
        pod.suspend()
        await asyncio.sleep(plan.hold_s)
        pod.kill()
        fault.undone_at = time.monotonic()
        pod.start()

    async def _kill_redis(self, fault: Fault, plan: Plan) -> None:
        """It comes back empty, or with what it held some time ago."""
        redis = self._stack.redis
        if plan.hold_s < self._limits.silence_s:
            redis.save_snapshot()
        else:
            redis.forget_snapshot()
        redis.kill()
        await self._start_later(fault, plan)

    async def _wait_usable(self, pods: Collection[Pod]) -> None:
        """Until the router uses their present lives, and Redis answers. Raises RuntimeError."""
        if self._stack.redis in pods:
            await asyncio.to_thread(self._stack.redis.wait_ready)
        wanted = {pod for pod in pods if pod is not self._stack.redis}
        deadline = time.monotonic() + START_TIMEOUT_S
        while wanted:
            usable = await self._usable()
            wanted = {pod for pod in wanted if (pod.name, pod.pid) not in usable}
            for pod in wanted:
                if not pod.is_running or time.monotonic() > deadline:
                    raise RuntimeError(f"{pod.name} is not usable: {pod.log()[-_TAIL_CHARS:]}")
            await asyncio.sleep(_POLL_S)

    async def _usable(self) -> set[tuple[str, int]]:
        """Names and process ids of the router, when it answers, and of workers that are ready."""
        async with open_channel(self._stack.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            try:
                status = await stub.GetStatus(inference_pb2.GetStatusRequest(), timeout=5.0)
            except grpc.RpcError:
                return set()
        ready = types_pb2.WORKER_STATE_READY
        workers = {(worker.id, worker.pid) for worker in status.workers if worker.state == ready}
        return {(self._stack.router.name, status.router.pid), *workers}

    async def _watch(self) -> None:
        """Starts again whoever ended by itself, and notes it."""
        while True:
            for pod in self._stack.pods:
                if pod not in self._busy and not pod.is_running:
                    await self._start_again(pod)
            await asyncio.sleep(_POLL_S)

    async def _start_again(self, pod: Pod) -> None:
        self._note_problem(f"{pod.name} ended by itself: {pod.log()[-_TAIL_CHARS:]}")
        self._busy.add(pod)
        try:
            pod.start()
            await self._wait_usable([pod])
        except RuntimeError as error:
            self._note_problem(str(error))
        finally:
            self._busy.discard(pod)

    def _note_problem(self, problem: str) -> None:
        self._faults.problems.append(problem)
        self._say(f"PROBLEM {problem}")


async def _is_set_within(event: asyncio.Event, timeout_s: float) -> bool:
    try:
        async with asyncio.timeout(timeout_s):
            return await event.wait()
    except TimeoutError:
        return False
