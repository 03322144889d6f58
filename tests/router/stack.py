"""A router with fake workers around it, all in one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from core.errors import from_exception
from core.redis_client import connect_redis
from core.registry import Registry
from core.rpc import open_channel
from router.app import Router
from router.settings import RouterSettings
from tests.model_folder import EOS_TOKEN_ID, byte_tokenizer, write_model_folder
from tests.router.fakes import FINGERPRINT, FakeWorker, Script

PATIENCE_S = 30.0
"""So long a test waits for what takes a moment, however busy the machine is."""
REPLY = [*byte_tokenizer().encode("Paris, of course.").ids, EOS_TOKEN_ID]


def prompt(text: str = "Where is the Louvre?", **sampling) -> inference_pb2.GenerateRequest:
    """A request for the fake workers; `sampling` sets sampling parameters."""
    return inference_pb2.GenerateRequest(prompt=text, sampling=types_pb2.SamplingParams(**sampling))


@dataclass
class Answer:
    """Everything that one call streamed."""

    text: str
    token_ids: list[int]
    last: inference_pb2.GenerateResponse


@dataclass
class Stack:
    """`prefills` and `decodes` in the order of their ids: prefill-0, decode-0, …"""

    stub: inference_pb2_grpc.InferenceAsyncStub
    router: Router
    registry: Registry
    script: Script
    prefills: list[FakeWorker]
    decodes: list[FakeWorker]
    http_url: str

    async def ask(self, request: inference_pb2.GenerateRequest, **call) -> Answer:
        """Generates to the end. Raises the error of core.errors that the router answered."""
        text, token_ids, last = "", [], None
        try:
            async for last in self.stub.Generate(request, **call):
                assert last.output_index == len(token_ids), "a token is missing or repeated"
                text += last.text
                token_ids += last.token_ids
        except grpc.RpcError as error:
            raise from_exception(error) from None
        assert last is not None
        return Answer(text, token_ids, last)


@asynccontextmanager
async def stack(
    folder: Path,
    redis_url: str,
    *,
    script: Script | None = None,
    num_prefill: int = 1,
    num_decode: int = 1,
    fingerprint: types_pb2.Fingerprint = FINGERPRINT,
    **settings: object,
) -> AsyncIterator[Stack]:
    """Starts everything and waits until the router is ready."""
    script = script or Script(reply=list(REPLY))
    redis = connect_redis(redis_url, PATIENCE_S)
    registry = Registry(redis, lease_s=600)
    prefills = [
        FakeWorker(f"prefill-{index}", types_pb2.ROLE_PREFILL, script)
        for index in range(num_prefill)
    ]
    decodes = [
        FakeWorker(f"decode-{index}", types_pb2.ROLE_DECODE, script) for index in range(num_decode)
    ]
    for worker in (*prefills, *decodes):
        worker.record.fingerprint.CopyFrom(fingerprint)
        await worker.start(registry)
    # Nothing here depends on how fast the machine is, unless a test says so.
    defaults = {"port": 0, "http_port": 0, "worker_poll_s": 0.05, "worker_silence_s": 60.0}
    defaults |= {"load_max_age_s": 60.0, "local_prefill_max_tokens": 0}
    router = Router(
        RouterSettings(
            model=str(write_model_folder(folder)),
            redis_url=f"{redis_url}?socket_timeout=30&socket_connect_timeout=30",
            **(defaults | settings),
        )
    )
    addresses = await router.start()
    try:
        await wait_for(lambda: all_attached(router, num_prefill, num_decode))
        async with open_channel(addresses.grpc) as channel:
            yield Stack(
                inference_pb2_grpc.InferenceStub(channel),
                router,
                registry,
                script,
                prefills,
                decodes,
                f"http://{addresses.http}",
            )
    finally:
        await router.stop()
        for worker in (*prefills, *decodes):
            await worker.stop()
        await redis.aclose()


def all_attached(router: Router, num_prefill: int, num_decode: int) -> bool:
    pool = router._pool
    return (
        len(pool.usable(types_pb2.ROLE_PREFILL)) == num_prefill
        and len(pool.usable(types_pb2.ROLE_DECODE)) == num_decode
    )


async def wait_for(condition) -> None:
    """Returns when `condition()` holds; to wait for long is an error."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.01)
