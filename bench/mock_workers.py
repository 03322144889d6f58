"""A prefill and a decode worker that compute nothing: `python -m bench.mock_workers`.

They speak the real worker protocol, so that a router cannot tell. Prefill answers at once;
decode makes one token a step for each of its sequences, all of a step in one message for
each router. Tokens come from a text, so that detokenizing them costs what it costs in life.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from baton.v1 import types_pb2, worker_pb2, worker_pb2_grpc
from core.model_folder import ModelFolder, model_digest
from core.redis_client import connect_redis
from core.registry import Registry
from core.rpc import RpcServer, run_service, wait_for_stop_signal
from core.tasks import TaskSet
from core.tokenizer import Tokenizer

BLOCK_SIZE = 16
NUM_BLOCKS = 1 << 20
_REPORT_S = 1.0
_CHANGES_PER_REPORT = 10
_TEXT = (
    "The quick brown fox jumps over the lazy dog while 12 engineers, naïve but cheerful, measure "
    "how many microseconds each word takes on its way to the reader.\n"
)


@dataclass(eq=False)
class _Running:
    """One sequence in decode's batch."""

    dispatch: worker_pb2.Dispatch
    first_index: int
    next_index: int

    @property
    def is_at_end(self) -> bool:
        """Whether its next token is the last."""
        return self.next_index + 1 >= self.dispatch.sampling.max_tokens


class _Outbox:
    """What waits for one router's stream."""

    def __init__(self) -> None:
        self.outputs: list[worker_pb2.SequenceOutput] = []
        self.tokens = worker_pb2.StepTokens()
        self.accepted: list[int] = []
        self.changed = asyncio.Event()


class MockWorker(worker_pb2_grpc.WorkerServicer):
    """One worker of either role. Prefill adds to `batch`, which decode steps."""

    def __init__(
        self, record: types_pb2.WorkerRecord, token_ids: list[int], batch: dict[Any, _Running]
    ) -> None:
        self.record = record
        self._token_ids = token_ids
        self._batch = batch
        self._outboxes: dict[str, _Outbox] = {}
        self._tasks = TaskSet()

    async def start(self) -> RpcServer:
        """Listens on a free port."""
        server = RpcServer("127.0.0.1", 0)
        worker_pb2_grpc.add_WorkerServicer_to_server(self, server.grpc_server)
        self.record.address = await server.start([])
        return server

    async def Attach(
        self, requests: AsyncIterator[worker_pb2.RouterMessage], context: Any
    ) -> AsyncIterator[worker_pb2.WorkerMessage]:
        router_id = (await anext(requests)).attach.router_id
        outbox = self._outboxes[router_id] = _Outbox()
        self._tasks.start(self._read(requests))
        while True:
            outputs, outbox.outputs = outbox.outputs, []
            tokens, outbox.tokens = outbox.tokens, worker_pb2.StepTokens()
            accepted, outbox.accepted = outbox.accepted, []
            outbox.changed.clear()
            yield worker_pb2.WorkerMessage(
                tokens=tokens,
                outputs=outputs,
                load=self._load(),
                state=types_pb2.WORKER_STATE_READY,
                accepted=accepted,
            )
            # What is accepted without an output is told this soon, as in life.
            for _ in range(_CHANGES_PER_REPORT):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_REPORT_S / _CHANGES_PER_REPORT):
                        await outbox.changed.wait()
                if outbox.changed.is_set() or outbox.accepted:
                    break

    def _load(self) -> types_pb2.Load:
        stats = types_pb2.BlockStats(total=NUM_BLOCKS, free=NUM_BLOCKS)
        return types_pb2.Load(running=len(self._batch), blocks=stats)

    async def _read(self, requests: AsyncIterator[worker_pb2.RouterMessage]) -> None:
        async for message in requests:
            for assignment in message.assignments:
                self._accept(assignment)
            for abort in message.aborts:
                self._batch.pop((abort.request_id, abort.attempt), None)

    async def GetWorkerStatus(
        self, request: worker_pb2.WorkerStatusRequest, context: Any
    ) -> worker_pb2.WorkerStatus:
        return worker_pb2.WorkerStatus(id=self.record.worker_id, load=self._load())

    def _accept(self, assignment: worker_pb2.Assignment) -> None:
        dispatch = assignment.dispatch
        self._outboxes[dispatch.router_id].accepted.append(dispatch.stream_id)
        has_partner = assignment.HasField("partner")
        if self.record.role == types_pb2.ROLE_PREFILL or not has_partner:
            self._begin(dispatch)

    def _begin(self, dispatch: worker_pb2.Dispatch) -> None:
        """The first token goes out at once; the steps begin by repeating it, as decode does."""
        first = len(dispatch.output_token_ids)
        if not self.send(_Running(dispatch, first, first)):
            self._batch[(dispatch.request_id, dispatch.attempt)] = _Running(dispatch, first, first)

    def step(self) -> None:
        """One token for every sequence; as in life, the last ones of sequences come at the end."""
        order = sorted(self._batch.items(), key=lambda item: item[1].is_at_end)
        for key, running in order:
            if self.send(running):
                del self._batch[key]

    def send(self, running: _Running) -> bool:
        """Sends the next token. Whether it was the last."""
        dispatch, index = running.dispatch, running.next_index
        token_id = self._token_ids[index % len(self._token_ids)]
        is_last = running.is_at_end
        running.next_index += 1
        outbox = self._outboxes[dispatch.router_id]
        if index > running.first_index and not is_last and not outbox.outputs:
            outbox.tokens.stream_ids.append(dispatch.stream_id)
            outbox.tokens.output_indexes.append(index)
            outbox.tokens.token_ids.append(token_id)
            outbox.changed.set()
            return False
        output = worker_pb2.SequenceOutput(
            request_id=dispatch.request_id,
            attempt=dispatch.attempt,
            output_index=index,
            token_ids=[token_id],
        )
        if is_last:
            output.finish_reason = types_pb2.FINISH_REASON_LENGTH
        self._publish(dispatch.router_id, output)
        return is_last

    def _publish(self, router_id: str, output: worker_pb2.SequenceOutput) -> None:
        outbox = self._outboxes[router_id]
        outbox.outputs.append(output)
        outbox.changed.set()


def _record(
    folder: ModelFolder, name: str, role: types_pb2.Role.ValueType
) -> types_pb2.WorkerRecord:
    return types_pb2.WorkerRecord(
        worker_id=f"mock-{name}",
        role=role,
        epoch=time.time_ns(),
        state=types_pb2.WORKER_STATE_READY,
        fingerprint=types_pb2.Fingerprint(
            model=model_digest(folder.path),
            dtype="float32",
            layout="mock",
            block_size=BLOCK_SIZE,
            block_bytes=64,
            hash_seed="mock",
            kv_transport="mock",
        ),
        max_model_len=folder.context_length,
    )


async def serve(model: Path, redis_url: str, step_s: float) -> None:
    """Runs both workers until SIGTERM or SIGINT."""
    folder = ModelFolder.load(model)
    token_ids = Tokenizer(folder).encode(_TEXT)
    batch: dict[Any, _Running] = {}
    roles = {"prefill": types_pb2.ROLE_PREFILL, "decode": types_pb2.ROLE_DECODE}
    workers = [
        MockWorker(_record(folder, name, role), token_ids, batch) for name, role in roles.items()
    ]
    servers = [await worker.start() for worker in workers]
    redis = connect_redis(redis_url)
    registry = Registry(redis)
    stepping = asyncio.create_task(_step(workers[1], step_s))
    publishing = asyncio.create_task(_publish(registry, workers))
    sys.stdout.write("ready workers=2\n")
    sys.stdout.flush()
    await wait_for_stop_signal()
    for task in (stepping, publishing):
        task.cancel()
    for server in servers:
        await server.stop(0)
    await redis.aclose()


async def _publish(registry: Registry, workers: list[MockWorker]) -> None:
    while True:
        for worker in workers:
            await registry.publish(worker.record)
        await asyncio.sleep(_REPORT_S)


async def _step(decode: MockWorker, step_s: float) -> None:
    """Steps at fixed times, so that a slow step does not make the next one late."""
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        due = max(due + step_s, loop.time())
        await asyncio.sleep(due - loop.time())
        decode.step()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder with the tokenizer")
    parser.add_argument("--redis-url", required=True)
    parser.add_argument("--step-ms", type=float, default=20.0, help="time of a decode step [20]")
    arguments = parser.parse_args()
    return run_service(lambda: serve(arguments.model, arguments.redis_url, arguments.step_ms / 1e3))


if __name__ == "__main__":
    sys.exit(main())
