"""A prefill and a decode worker in one process, and a stand-in for the router between them."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baton.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from core.rpc import RpcServer, open_channel
from decode_svc.service import DecodeService
from engine.engine import load_engine
from kvtransfer.base import MemoryRegion
from kvtransfer.digests import BlockDigests
from kvtransfer.peers import Identity
from kvtransfer.select import make_transport
from prefill_svc.service import PrefillService
from tests.worker.results import Result
from worker.host import Parts, WorkerHost
from worker.main import ServiceFactory
from worker.settings import WorkerSettings
from worker.worker_service import install

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
            layout=engine.kv_cache.shape.layout_name,
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
        install(host, service, server.grpc_server)
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


class Pair:
    """Both workers, attached to, with a way to send them requests."""

    def __init__(self, prefill: Worker, decode: Worker) -> None:
        self.prefill = prefill
        self.decode = decode
        self._channels = [open_channel(w.address.address) for w in (prefill, decode)]
        self.decode_imports = kv_transfer_pb2_grpc.KvImportStub(self._channels[1])
        self.workers = [worker_pb2_grpc.WorkerStub(channel) for channel in self._channels]
        self._outgoing: dict[str, asyncio.Queue[worker_pb2.RouterMessage]] = {}
        self._results: dict[tuple[str, int], list[Result]] = {}
        """By request and attempt, for each choice."""
        self._streams: dict[int, Result] = {}
        self._next_stream_id = 1
        self._readers: list[asyncio.Task[None]] = []

    async def attach(self) -> None:
        ready = [asyncio.Event() for _ in self.workers]
        self._readers = [
            asyncio.ensure_future(self._read(stub, subject.address, event))
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
        self,
        stub: worker_pb2_grpc.WorkerAsyncStub,
        address: worker_pb2.WorkerAddress,
        ready: asyncio.Event,
    ) -> None:
        outgoing = self._outgoing[address.worker_id] = asyncio.Queue()
        attach = worker_pb2.AttachRequest(router_id=ROUTER, epoch=address.epoch)
        outgoing.put_nowait(worker_pb2.RouterMessage(attach=attach))
        async for message in stub.Attach(_items_of(outgoing)):
            ready.set()
            tokens = message.tokens
            for stream_id, index, token_id in zip(
                tokens.stream_ids, tokens.output_indexes, tokens.token_ids, strict=True
            ):
                self._streams[stream_id].note_token(index, token_id)
            is_prefill = address.worker_id == self.prefill.address.worker_id
            for stream_id in message.accepted:
                if not is_prefill:
                    self._streams[stream_id].note_accepted()
            for output in message.outputs:
                self._note(output, is_prefill)

    def _note(self, output: worker_pb2.SequenceOutput, is_prefill: bool) -> None:
        results = self._results.setdefault((output.request_id, output.attempt), [Result()])
        if output.HasField("error"):
            for result in results:
                result.note_error(output.error)
        else:
            results[output.choice].note_output(output, is_prefill)

    def dispatch(
        self,
        prompt: list[int],
        name: str,
        max_tokens: int = 8,
        sampling: dict[str, object] | None = None,
        **fields: object,
    ) -> worker_pb2.Dispatch:
        """`sampling` and `fields` override the defaults: greedy, the first attempt."""
        defaults = {"max_tokens": max_tokens, "top_p": 1.0, "repetition_penalty": 1.0}
        params = types_pb2.SamplingParams(**{**defaults, **(sampling or {})})  # type: ignore[arg-type]
        dispatch = worker_pb2.Dispatch(
            request_id=name,
            router_id=ROUTER,
            prompt_token_ids=prompt,
            sampling=params,
            stream_id=self._next_stream_id,
            **{"attempt": 1, **fields},  # type: ignore[arg-type]
        )
        self._next_stream_id += max(1, dispatch.n)
        return dispatch

    def assign(
        self,
        to: Worker,
        dispatch: worker_pb2.Dispatch,
        is_local: bool = False,
        source: worker_pb2.PrefixSource | None = None,
    ) -> None:
        """Tells one worker of its part; without a partner when decode is to compute it all."""
        partner = self.prefill if to is self.decode else self.decode
        assignment = worker_pb2.Assignment(
            dispatch=dispatch, partner=None if is_local else partner.address, source=source
        )
        message = worker_pb2.RouterMessage(assignments=[assignment])
        self._outgoing[to.address.worker_id].put_nowait(message)

    async def send(
        self, dispatch: worker_pb2.Dispatch, source: worker_pb2.PrefixSource | None = None
    ) -> Result:
        """Dispatches to both workers, decode first. Raises what decode refuses with."""
        return (await self.send_choices(dispatch, source))[0]

    async def send_choices(
        self, dispatch: worker_pb2.Dispatch, source: worker_pb2.PrefixSource | None = None
    ) -> list[Result]:
        """The same, with a result for each choice."""
        results = await self.send_to_decode(dispatch)
        self.assign(self.prefill, dispatch, source=source)
        return results

    async def send_to_decode(
        self, dispatch: worker_pb2.Dispatch, is_local: bool = False
    ) -> list[Result]:
        """Returns when decode has taken it. Raises what it refuses with."""
        key = (dispatch.request_id, dispatch.attempt)
        results = [Result(is_handed_off=not is_local) for _ in range(max(1, dispatch.n))]
        self._results[key] = results
        self._streams |= dict(enumerate(results, dispatch.stream_id))
        self.assign(self.decode, dispatch, is_local)
        async with asyncio.timeout(60):
            await results[0].answered.wait()
        if not results[0].is_accepted:
            assert results[0].error is not None
            raise results[0].error
        return results

    def result(self, name: str, attempt: int = 1) -> Result:
        return self._results[(name, attempt)][0]

    async def send_local(self, dispatch: worker_pb2.Dispatch) -> Result:
        """Dispatches to decode alone. Raises what it refuses with."""
        return (await self.send_to_decode(dispatch, is_local=True))[0]

    async def ask_for_grant(self, name: str) -> None:
        """Asks decode for room as prefill would."""
        request = kv_transfer_pb2.GrantRequest(
            request_id=name,
            attempt=1,
            prefill_worker=self.prefill.address.worker_id,
            prefill_epoch=self.prefill.address.epoch,
            decode_epoch=self.decode.address.epoch,
        )
        await self.decode_imports.Grant(request, timeout=30)

    async def generate(self, prompt: list[int], name: str, **fields: Any) -> Result:
        """Sends and waits for the end."""
        return (await self.generate_choices(prompt, name, **fields))[0]

    async def generate_choices(
        self,
        prompt: list[int],
        name: str,
        source: worker_pb2.PrefixSource | None = None,
        **fields: object,
    ) -> list[Result]:
        """Sends and waits for the end of every choice."""
        dispatch = self.dispatch(prompt, name, **fields)  # type: ignore[arg-type]
        results = await self.send_choices(dispatch, source)
        async with asyncio.timeout(60):
            for result in results:
                await result.ended.wait()
        return results

    def abort(self, name: str, attempt: int = 1) -> None:
        """Tells both workers to drop an attempt."""
        request = worker_pb2.AbortRequest(request_id=name, attempt=attempt)
        message = worker_pb2.RouterMessage(aborts=[request])
        for outgoing in self._outgoing.values():
            outgoing.put_nowait(message)

    def abort_choice(self, name: str, choice: int, attempt: int = 1) -> None:
        """Tells decode alone, as a router does."""
        request = worker_pb2.AbortRequest(request_id=name, attempt=attempt, choice=choice)
        message = worker_pb2.RouterMessage(aborts=[request])
        self._outgoing[self.decode.address.worker_id].put_nowait(message)

    async def until_idle(self, timeout_s: float = 30.0) -> None:
        """Waits until both workers hold nothing for anybody; fails after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not all(is_idle(w) for w in (self.prefill, self.decode)):
            assert time.monotonic() < deadline, f"not idle: {self.prefill.load} {self.decode.load}"
            await asyncio.sleep(0.01)
        assert self.prefill.audit() == []
        assert self.decode.audit() == []

    async def until_decoding(self, timeout_s: float = 30.0) -> None:
        """Waits until decode runs something; fails after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self.decode.load.running == 0:
            assert time.monotonic() < deadline, f"nothing runs: {self.decode.load}"
            await asyncio.sleep(0.001)


async def _items_of(
    outgoing: asyncio.Queue[worker_pb2.RouterMessage],
) -> AsyncIterator[worker_pb2.RouterMessage]:
    while True:
        yield await outgoing.get()


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
    number: int = 0,
) -> AsyncIterator[Pair]:
    """Both workers and an attached stand-in router; checks on leaving that all is idle."""
    names = (f"p{number}", f"d{number}")
    async with (
        worker(folder, PrefillService, names[0], kv_transport=transport, **(prefill or {})) as p,
        worker(folder, DecodeService, names[1], kv_transport=transport, **(decode or {})) as d,
    ):
        both = Pair(p, d)
        try:
            await both.attach()
            yield both
            await both.until_idle()
        finally:
            await both.close()


def flip_a_byte_of(both: Pair, monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    """Damages the `index`-th block of decode's every read, after it has landed."""
    flip_a_byte_at(both.decode, monkeypatch, index)


def flip_a_byte_at(reader: Worker, monkeypatch: pytest.MonkeyPatch, index: int) -> None:
    """The same of one worker."""
    host = reader.host
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
