"""A prefill and a decode worker in one process, and a stand-in for the router between them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from baton.v1 import kv_transfer_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from core.errors import BatonError, from_detail
from core.rpc import RpcServer, open_channel
from decode_svc.service import DecodeService
from engine.engine import load_engine
from engine.kv_cache import LAYOUT_NAME
from kvtransfer.base import MemoryRegion
from kvtransfer.digests import BlockDigests
from kvtransfer.peers import Identity
from kvtransfer.select import make_transport
from prefill_svc.service import PrefillService
from worker.host import Parts, WorkerHost
from worker.main import ServiceFactory
from worker.settings import WorkerSettings

ROUTER = "router-1"
NO_REDIS = "redis://127.0.0.1:1/0"
_epochs = itertools.count(1)


@dataclass
class Worker:
    """One worker in this process."""

    host: WorkerHost
    server: RpcServer
    address: worker_pb2.WorkerAddress

    @property
    def load(self) -> types_pb2.Load:
        return self.host.load()

    def audit(self) -> list[str]:
        return self.host.engine.scheduler.audit()


@asynccontextmanager
async def worker(
    folder: Path, make_service: ServiceFactory, worker_id: str, **settings: object
) -> AsyncIterator[Worker]:
    """Starts one worker; `settings` are WorkerSettings."""
    config = WorkerSettings(
        model=str(folder),
        worker_id=worker_id,
        redis_url=NO_REDIS,
        **{"kv_transport": "tcp", "num_gpu_blocks_override": 64, **settings},  # type: ignore[arg-type]
    )
    with ThreadPoolExecutor(1) as device:
        engine = load_engine(config.engine_config(folder), lambda _: None)
        fingerprint = types_pb2.Fingerprint(
            model=folder.name,
            dtype=engine.dtype,
            layout=LAYOUT_NAME,
            block_size=engine.pool.block_size,
            block_bytes=engine.kv_cache.block_bytes,
            hash_seed="test",
            kv_transport=config.kv_transport,
        )
        identity = Identity(worker_id, next(_epochs), fingerprint)
        cache = engine.kv_cache
        region = MemoryRegion(cache.data_ptr(), engine.pool.num_blocks, cache.block_bytes)
        agent = f"{worker_id}@{identity.epoch}"
        transport = make_transport(config.kv_transport, agent, region, "127.0.0.1")
        await transport.start()
        parts = Parts(engine, device, transport, BlockDigests(region), identity)
        server = RpcServer("127.0.0.1", 0)
        host = WorkerHost(config, parts, server.set_serving)
        service = make_service(host)
        host.install(service, server.grpc_server)
        address = await server.start(["baton.v1.Worker", *service.grpc_services])
        host.start(address)
        try:
            yield Worker(
                host,
                server,
                worker_pb2.WorkerAddress(
                    worker_id=worker_id, address=address, epoch=identity.epoch
                ),
            )
        finally:
            await host.stop()
            await server.stop(0.1)


@dataclass
class Result:
    """What a router learns of one attempt."""

    tokens: dict[int, int] = field(default_factory=dict)
    finish_reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED
    error: BatonError | None = None
    cached_tokens: int = 0
    transferred_blocks: int = 0
    was_preempted: bool = False
    first_token: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def output(self) -> list[int]:
        assert sorted(self.tokens) == list(range(min(self.tokens), max(self.tokens) + 1))
        return [self.tokens[index] for index in sorted(self.tokens)]


class Pair:
    """Both workers, attached to, with a way to send them requests."""

    def __init__(self, prefill: Worker, decode: Worker) -> None:
        self.prefill = prefill
        self.decode = decode
        self._channels = [open_channel(w.address.address) for w in (prefill, decode)]
        self.prefill_stub = worker_pb2_grpc.PrefillStub(self._channels[0])
        self.decode_stub = worker_pb2_grpc.DecodeStub(self._channels[1])
        self.decode_imports = kv_transfer_pb2_grpc.KvImportStub(self._channels[1])
        self.workers = [worker_pb2_grpc.WorkerStub(channel) for channel in self._channels]
        self._results: dict[tuple[str, int], Result] = {}
        self._readers: list[asyncio.Task[None]] = []

    async def attach(self) -> None:
        ready = [asyncio.Event() for _ in self.workers]
        self._readers = [
            asyncio.ensure_future(self._read(stub, subject.address.epoch, event))
            for stub, subject, event in zip(
                self.workers, (self.prefill, self.decode), ready, strict=True
            )
        ]
        for event in ready:
            await event.wait()

    async def detach(self, *workers: int) -> None:
        """Leaves some of the workers (0: prefill, 1: decode), or both."""
        readers = [self._readers[index] for index in workers] or self._readers
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)

    async def close(self) -> None:
        await self.detach()
        for channel in self._channels:
            await channel.close(None)

    async def _read(
        self, stub: worker_pb2_grpc.WorkerAsyncStub, epoch: int, ready: asyncio.Event
    ) -> None:
        async for message in stub.Attach(worker_pb2.AttachRequest(router_id=ROUTER, epoch=epoch)):
            ready.set()
            for output in message.outputs:
                self._note(output)

    def _note(self, output: worker_pb2.SequenceOutput) -> None:
        result = self._results.setdefault((output.request_id, output.attempt), Result())
        for offset, token in enumerate(output.token_ids):
            index = output.output_index + offset
            assert result.tokens.setdefault(index, token) == token
            result.first_token.set()
        result.cached_tokens = max(result.cached_tokens, output.cached_tokens)
        result.transferred_blocks = max(result.transferred_blocks, output.transferred_blocks)
        if output.HasField("error"):
            result.error = from_detail(output.error)
        result.finish_reason = output.finish_reason or result.finish_reason
        result.was_preempted |= output.preempted
        if result.error is not None or result.finish_reason or result.was_preempted:
            result.ended.set()

    def dispatch(
        self, prompt: list[int], name: str, max_tokens: int = 8, **fields: object
    ) -> worker_pb2.Dispatch:
        sampling = types_pb2.SamplingParams(
            max_tokens=max_tokens, top_p=1.0, repetition_penalty=1.0, temperature=0.0
        )
        return worker_pb2.Dispatch(
            request_id=name,
            router_id=ROUTER,
            prompt_token_ids=prompt,
            sampling=sampling,
            **{"attempt": 1, **fields},  # type: ignore[arg-type]
        )

    async def send(self, dispatch: worker_pb2.Dispatch) -> Result:
        """Dispatches to both workers, decode first."""
        key = (dispatch.request_id, dispatch.attempt)
        result = self._results[key] = Result()
        await self.decode_stub.Decode(
            worker_pb2.DecodeRequest(dispatch=dispatch, prefill=self.prefill.address)
        )
        await self.prefill_stub.Prefill(
            worker_pb2.PrefillRequest(dispatch=dispatch, decode=self.decode.address)
        )
        return result

    def result(self, name: str, attempt: int = 1) -> Result:
        return self._results[(name, attempt)]

    async def generate(self, prompt: list[int], name: str, **fields: object) -> Result:
        """Sends and waits for the end."""
        result = await self.send(self.dispatch(prompt, name, **fields))  # type: ignore[arg-type]
        async with asyncio.timeout(60):
            await result.ended.wait()
        return result

    async def abort(self, name: str, attempt: int = 1) -> None:
        request = worker_pb2.AbortRequest(request_id=name, attempt=attempt)
        await asyncio.gather(*(stub.Abort(request) for stub in self.workers))

    async def until_idle(self, timeout_s: float = 10.0) -> None:
        """Waits until both workers hold nothing for anybody; fails after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not all(is_idle(w) for w in (self.prefill, self.decode)):
            assert time.monotonic() < deadline, f"not idle: {self.prefill.load} {self.decode.load}"
            await asyncio.sleep(0.01)
        assert self.prefill.audit() == []
        assert self.decode.audit() == []

    async def until_decoding(self, timeout_s: float = 10.0) -> None:
        """Waits until decode runs something; fails after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.decode.load.running == 0:
            assert time.monotonic() < deadline, f"nothing runs: {self.decode.load}"
            await asyncio.sleep(0.001)


def is_idle(subject: Worker) -> bool:
    load = subject.load
    blocks = load.blocks
    return not (
        len(subject.host.service._requests)  # type: ignore[attr-defined]
        or load.queue_depth
        or load.running
        or load.exports
        or load.imports
        or blocks.referenced
        or blocks.quarantined
    )


@asynccontextmanager
async def pair(
    folder: Path,
    transport: str = "tcp",
    prefill: dict[str, object] | None = None,
    decode: dict[str, object] | None = None,
) -> AsyncIterator[Pair]:
    """Both workers and an attached stand-in router; checks on leaving that all is idle."""
    async with (
        worker(folder, PrefillService, "p0", kv_transport=transport, **(prefill or {})) as p,
        worker(folder, DecodeService, "d0", kv_transport=transport, **(decode or {})) as d,
    ):
        both = Pair(p, d)
        try:
            await both.attach()
            yield both
            await both.until_idle()
        finally:
            await both.close()


def flip_a_byte_of(both: Pair, monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    """Damages the `index`-th block of every read, after it has landed."""
    host = both.decode.host
    memory = host.engine.kv_cache.data.view(host.engine.pool.num_blocks, -1)
    real_pull = host.transport.pull

    def damaged_pull(agent, copies, part):  # type: ignore[no-untyped-def]
        pull = real_pull(agent, copies, part)
        real_done = pull.done

        async def done() -> None:
            await real_done()
            if index < len(copies):
                memory[copies[index].destination, 3] += 1.0

        pull.done = done  # type: ignore[method-assign]
        return pull

    monkeypatch.setattr(host.transport, "pull", damaged_pull)
