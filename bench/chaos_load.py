"""Clients of every kind: patient ones, ones that cancel, vanish, hurry, or ask twice.

Each user asks one request after the other. Whatever comes back is judged: right or wrong
tokens, a typed error or something else, in time or not.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grpc

from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from bench.chaos_cases import Answer, Case, Checker, Variant, WrongOutput, draw_variant, tie_probes
from bench.wire import wire
from core.errors import ERROR_METADATA_KEY
from core.rpc import open_channel

REQUEST_TIMEOUT_S = 30.0
"""The router's own limit; patient clients set none, so that a hang would show."""
GRACE_S = 5.0
"""A request without an end so long after its deadline hangs."""
_MAX_THINK_S = 0.1
_NUM_LEARNERS = 8

COMPLETED, CANCELLED, DISCONNECTED = "completed", "cancelled by client", "client vanished"
EXPIRED, OUT_OF_TIME = "client's deadline", "router's time limit"
ROUTER_AWAY, TIE = "router away", "near tie of two tokens"
WRONG, UNTYPED, HUNG = "WRONG", "UNTYPED", "HUNG"


@dataclass(frozen=True)
class Result:
    """How one request ended."""

    outcome: str
    started_at: float
    workers: tuple[str, ...] = ()
    """That served a completed one."""
    attempts: int = 1
    detail: str = ""
    """What is wrong, when something is."""
    request_id: str = ""
    other: tuple[Case, list[int]] | None = None
    """Whose tokens are wrong: those up to the first wrong one."""


Call = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]
Note = Callable[[Result], None]


class Users:
    """`count` users of the router at `address`, until told to stop."""

    def __init__(
        self, address: str, cases: Sequence[tuple[Case, Answer]], count: int, note: Note
    ) -> None:
        self._address = address
        self._cases = cases
        self._count = count
        self._note = note
        self._stub: inference_pb2_grpc.InferenceAsyncStub | None = None

    async def run(self, stop: asyncio.Event, rng: random.Random) -> None:
        """Returns when every request has ended after `stop`."""
        seeds = [rng.getrandbits(64) for _ in range(self._count)]
        async with open_channel(self._address) as channel:
            self._stub = inference_pb2_grpc.InferenceStub(channel)
            await asyncio.gather(*(self._use(stop, random.Random(seed)) for seed in seeds))

    async def _use(self, stop: asyncio.Event, rng: random.Random) -> None:
        kinds: tuple[Callable[[Variant, random.Random], Awaitable[None]], ...] = (
            self._wait_for_it,
            self._cancel,
            self._vanish,
            self._hurry,
            self._ask_twice,
        )
        while not stop.is_set():
            case, known = rng.choice(self._cases)
            (kind,) = rng.choices(kinds, weights=(60, 12, 10, 10, 8))
            await kind(draw_variant(case, known, rng), rng)
            await asyncio.sleep(rng.uniform(0, _MAX_THINK_S))

    async def ask(self, variant: Variant, timeout_s: float | None = None) -> Result:
        """One request to its end."""
        assert self._stub is not None
        return await follow(self._stub.Generate(variant.request, timeout=timeout_s), variant)

    async def _wait_for_it(self, variant: Variant, rng: random.Random) -> None:
        self._note(await self.ask(variant))

    async def _hurry(self, variant: Variant, rng: random.Random) -> None:
        timeout_s = rng.choice((0.02, 0.1, 0.3, 1.0)) * rng.uniform(0.5, 1.5)
        self._note(await self.ask(variant, timeout_s))

    async def _cancel(self, variant: Variant, rng: random.Random) -> None:
        self._note(await self._ask_and_leave(variant, _patience_s(rng)))

    async def _ask_and_leave(self, variant: Variant, patience_s: float) -> Result:
        started_at = time.monotonic()
        try:
            async with asyncio.timeout(patience_s):
                # Cancelling the reader cancels the call.
                return await self.ask(variant)
        except TimeoutError:
            return Result(CANCELLED, started_at)

    async def _vanish(self, variant: Variant, rng: random.Random) -> None:
        started_at = time.monotonic()
        async with wire(self._address) as between, open_channel(between.address) as channel:
            stub = inference_pb2_grpc.InferenceStub(channel)
            asking = asyncio.create_task(follow(stub.Generate(variant.request), variant))
            await asyncio.wait({asking}, timeout=_patience_s(rng))
            is_cut = not asking.done()
            await between.cut(reset=rng.random() < 0.5)
            result = await asking
        if is_cut and result.outcome == UNTYPED:
            result = Result(DISCONNECTED, started_at)
        self._note(result)

    async def _ask_twice(self, variant: Variant, rng: random.Random) -> None:
        """Two calls with one id; the first may leave early, which must not harm the second."""
        patience_s = _patience_s(rng) if rng.random() < 0.5 else REQUEST_TIMEOUT_S + 2 * GRACE_S
        first = asyncio.create_task(self._ask_and_leave(variant, patience_s))
        await asyncio.sleep(_patience_s(rng))
        self._note(await self.ask(variant))
        self._note(await first)


def _patience_s(rng: random.Random) -> float:
    """Mostly short, so that requests are left in every phase."""
    return rng.uniform(0, rng.choice((0.01, 0.05, 0.2, 1.0)))


async def follow(call: Call, variant: Variant) -> Result:
    """Reads a stream to its end and judges it."""
    timeout_s = call.time_remaining()
    limit_s = (REQUEST_TIMEOUT_S if timeout_s is None else timeout_s) + GRACE_S
    result = Result(COMPLETED, time.monotonic(), request_id=variant.request.request_id)
    try:
        async with asyncio.timeout(limit_s):
            last = await _read(call, variant)
    except TimeoutError:
        return replace(result, outcome=HUNG, detail=f"no end after {limit_s:.1f} s")
    except WrongOutput as error:
        call.cancel()
        other = None if error.other is None else (variant.case, error.other)
        return replace(result, outcome=WRONG, detail=str(error), other=other)
    except grpc.aio.AioRpcError as error:
        outcome = _outcome(error, has_deadline=timeout_s is not None)
        return replace(result, outcome=outcome, detail=f"{error.code().name}: {error.details()}")
    if last is None:
        return replace(result, outcome=UNTYPED, detail="it ended before its last message")
    workers = (last.route.prefill_worker, last.route.decode_worker)
    return replace(result, workers=workers, attempts=last.route.attempts)


async def _read(call: Call, variant: Variant) -> inference_pb2.GenerateResponse | None:
    checker = Checker(variant)
    last = None
    async for message in call:
        checker.add(message)
        last = message
    return last if checker.is_finished else None


def _outcome(error: grpc.aio.AioRpcError, *, has_deadline: bool) -> str:
    code = error.code()
    is_late = code is grpc.StatusCode.DEADLINE_EXCEEDED
    if is_late and has_deadline:
        return EXPIRED
    # grpc-stubs type a pair as an object that cannot be unpacked.
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == ERROR_METADATA_KEY:
            detail = types_pb2.ErrorDetail.FromString(value)
            if detail.code == code.name:
                return OUT_OF_TIME if is_late else f"error {code.name}"
    return UNTYPED


async def learn(
    address: str, cases: Sequence[Case], max_tokens: int
) -> tuple[list[tuple[Case, Answer]], int]:
    """Answers of an undisturbed stack, and how many of them differ when it is asked again."""
    channel = open_channel(address)
    stub = inference_pb2_grpc.InferenceStub(channel)
    limit = asyncio.Semaphore(_NUM_LEARNERS)

    async def ask(case: Case) -> Answer:
        answer = Answer()
        async with limit:
            async for message in stub.Generate(case.request(max_tokens)):
                answer.add(message)
        return answer

    try:
        answers = await asyncio.gather(*map(ask, cases))
        # In another order, so in other company and with other blocks cached.
        again = await asyncio.gather(*map(ask, reversed(cases)))
    finally:
        await channel.close(None)
    num_unsteady = sum(
        one.token_ids != other.token_ids
        for one, other in zip(answers, reversed(again), strict=True)
    )
    return list(zip(cases, answers, strict=True)), num_unsteady


async def ask_all(address: str, variants: Sequence[Variant]) -> list[Result]:
    """All of them at once."""
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        return await asyncio.gather(
            *(follow(stub.Generate(variant.request), variant) for variant in variants)
        )


async def is_tie(address: str, case: Case, token_ids: Sequence[int]) -> bool:
    """Whether an undisturbed stack gives these tokens too, if rounding falls another way."""
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        for probe in tie_probes(case, len(token_ids)):
            answer = Answer()
            async for message in stub.Generate(probe):
                answer.add(message)
            if answer.token_ids == list(token_ids):
                return True
    return False
