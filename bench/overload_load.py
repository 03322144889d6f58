"""Requests that come at random times whatever becomes of those before, and how each fared."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import grpc

from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from core.errors import ResourceExhausted, from_exception

PROMPT_TOKENS = 256
OUTPUT_TOKENS = 16
_TIMEOUT_S = 120.0
_FIRST_TEXT_ID, _LAST_TEXT_ID = 32, 250


@dataclass(frozen=True)
class Shot:
    """One request. Times in seconds from its start, as its client sees them."""

    class_name: str
    at: float
    """Start, from the begin of the load."""
    ttft_s: float | None = None
    total_s: float | None = None
    """Until the end, or the refusal."""
    error: Exception | None = None

    @property
    def is_refused(self) -> bool:
        return isinstance(self.error, ResourceExhausted)


class Load:
    """Clients of one router; the `key` of a class is its own name."""

    def __init__(self, channel: grpc.aio.Channel, rng: random.Random) -> None:
        self._stub = inference_pb2_grpc.InferenceStub(channel)
        self._rng = rng

    async def offer(self, rates: dict[str, float], seconds: float) -> list[Shot]:
        """Requests of each class at its rate a second (Poisson); returns when all have ended."""
        arrivals = sorted(
            (at, name) for name, rate in rates.items() for at in self._arrivals(rate, seconds)
        )
        began_at = time.perf_counter()
        tasks = []
        for at, name in arrivals:
            await asyncio.sleep(began_at + at - time.perf_counter())
            tasks.append(asyncio.create_task(self.shoot(name, at)))
        return await asyncio.gather(*tasks)

    async def saturate(self, num_clients: int, seconds: float) -> list[Shot]:
        """Clients that ask one request after the other."""
        began_at = time.perf_counter()

        async def use() -> list[Shot]:
            shots = []
            while (at := time.perf_counter() - began_at) < seconds:
                shots.append(await self.shoot("silver", at))
            return shots

        used = await asyncio.gather(*(use() for _ in range(num_clients)))
        return [shot for shots in used for shot in shots]

    async def bare_calls(self) -> list[float]:
        """What the least call takes, in seconds, ten times a second until cancelled."""
        taken: list[float] = []
        try:
            while True:
                began_at = time.perf_counter()
                await self._stub.GetModel(inference_pb2.GetModelRequest())
                taken.append(time.perf_counter() - began_at)
                await asyncio.sleep(0.1)
        except asyncio.CancelledError:
            return taken

    async def shoot(self, class_name: str, at: float = 0.0) -> Shot:
        """One request with a prompt of its own."""
        ids = [self._rng.randint(_FIRST_TEXT_ID, _LAST_TEXT_ID) for _ in range(PROMPT_TOKENS)]
        request = inference_pb2.GenerateRequest(
            token_ids=inference_pb2.TokenIds(ids=ids),
            sampling=types_pb2.SamplingParams(
                max_tokens=OUTPUT_TOKENS, temperature=0.0, ignore_eos=True
            ),
        )
        began_at = time.perf_counter()
        ttft_s = None
        metadata = (("authorization", f"Bearer {class_name}"),)
        try:
            call = self._stub.Generate(request, metadata=metadata, timeout=_TIMEOUT_S)
            async for message in call:
                if ttft_s is None and message.token_ids:
                    ttft_s = time.perf_counter() - began_at
        except grpc.RpcError as error:
            total_s = time.perf_counter() - began_at
            return Shot(class_name, at, ttft_s, total_s, from_exception(error))
        return Shot(class_name, at, ttft_s, time.perf_counter() - began_at)

    def _arrivals(self, rate: float, seconds: float) -> Iterable[float]:
        at = self._rng.expovariate(rate)
        while at < seconds:
            yield at
            at += self._rng.expovariate(rate)


def quantile(values: Sequence[float], q: float) -> float:
    """The least value that `q` of all do not exceed; NaN of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else float("nan")


def median(values: Iterable[float]) -> float:
    return statistics.median(values)
