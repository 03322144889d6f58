"""The public gRPC API: thin servicers over the request table and the worker pool."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2, worker_pb2
from core.errors import BatonError, DeadlineExceeded
from core.model_folder import ModelFolder
from core.rpc import pod_errors
from core.tracing import TraceContext
from router.attach import WorkerLink
from router.follower import MAX_TOKENS_PER_CHUNK, READ_GRACE_S, Follower, WriteTokens
from router.generation import Generation
from router.grpc_server.call import Call
from router.requests import RequestTable
from router.validate import check_request_id

_STATUS_TIMEOUT_S = 2.0


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Errors leave as core.errors; the server puts them on the wire."""

    def __init__(
        self,
        table: RequestTable,
        shared: Generation,
        folder: ModelFolder,
        request_timeout_s: float,
    ) -> None:
        self._table = table
        self._shared = shared
        self._folder = folder
        self._request_timeout_s = request_timeout_s

    async def Generate(  # type: ignore[override]
        self, request: inference_pb2.GenerateRequest, context: Call
    ) -> None:
        """Writes to `context`: a generator between would cost more than the message."""
        metadata = _metadata(context)
        tenant = self._tenant(metadata)
        check_request_id(request.request_id)
        remaining_s = context.time_remaining()
        timeout_s = self._request_timeout_s
        if remaining_s is not None:
            timeout_s = min(timeout_s, remaining_s)
        deadline = asyncio.get_running_loop().time() + timeout_s
        trace = TraceContext(metadata.get("traceparent", ""), metadata.get("tracestate", ""))
        with self._table.follow(request, deadline, tenant=tenant, trace=trace) as follower:
            try:
                # A client that has not read by then counts as one that has left.
                async with asyncio.timeout_at(deadline + READ_GRACE_S):
                    await _write_all(follower, request.request_id, context)
            except TimeoutError:
                raise DeadlineExceeded("the answer was not read in time") from None

    async def GetModel(
        self, request: inference_pb2.GetModelRequest, context: Any
    ) -> inference_pb2.ModelInfo:
        self._tenant(_metadata(context))
        limits = self._shared.current_limits()
        fingerprint = self._shared.placer.pool.fingerprint or types_pb2.Fingerprint()
        return inference_pb2.ModelInfo(
            name=limits.served_name,
            architecture=self._folder.architecture,
            vocab_size=limits.vocab_size,
            max_model_len=limits.max_model_len,
            block_size=fingerprint.block_size,
            eos_token_ids=limits.eos_token_ids,
            dtype=fingerprint.dtype,
        )

    async def GetStatus(
        self, request: inference_pb2.GetStatusRequest, context: Any
    ) -> inference_pb2.GetStatusResponse:
        self._tenant(_metadata(context))
        pool = self._shared.placer.pool
        workers = await asyncio.gather(*(worker_status(link, request.audit) for link in pool.links))
        return inference_pb2.GetStatusResponse(
            workers=workers,
            router=inference_pb2.RouterStatus(
                num_requests=self._table.num_running,
                redis_ok=bool(pool.is_registry_ok),
                model=self._shared.limits.served_name,
                pid=os.getpid(),
            ),
        )

    def _tenant(self, metadata: Mapping[str, str]) -> str:
        """The caller's tenant. Raises Unauthenticated."""
        return self._shared.tenants.tenant(metadata.get("authorization"))


def _metadata(context: Any) -> dict[str, str]:
    return dict(context.invocation_metadata() or ())


async def _write_all(follower: Follower, request_id: str, call: Call) -> None:
    """What a client is sent; the last message tells the outcome."""
    is_first = True
    write_tokens = _token_writer(request_id, call)
    while (chunk := await follower.next()) is not None:
        message = inference_pb2.GenerateResponse(
            request_id=request_id,
            text=chunk.text,
            token_ids=chunk.token_ids,
            output_index=chunk.output_index,
            choice=chunk.choice,
            logprobs=chunk.logprobs,
            finish_reason=chunk.finish_reason,
        )
        if is_first:
            is_first = False
            for prompt_message in _prompt_messages(follower.log.prompt_logprobs, request_id):
                await call.write(prompt_message)
        outcome = follower.log.outcome
        if outcome is not None and follower.is_at_end:
            message.usage.CopyFrom(outcome.usage)
            message.route.CopyFrom(outcome.route)
            message.timing.CopyFrom(outcome.timing)
        await call.write(message)
        if not chunk.finish_reason and not chunk.logprobs:
            await follower.push_tokens(write_tokens)
            # A token that has found no room does not wait for the next one.
            await call.drain()


def _token_writer(request_id: str, call: Call) -> WriteTokens:
    """Writes messages that have nothing but tokens and their text; nearly all have not."""

    def write(output_index: int, token_ids: Sequence[int], text: str) -> bool:
        message = inference_pb2.GenerateResponse(
            request_id=request_id, text=text, token_ids=token_ids, output_index=output_index
        )
        return call.write_soon(message)

    return write


def _prompt_messages(
    logprobs: Sequence[types_pb2.TokenLogprobs], request_id: str
) -> Iterator[inference_pb2.GenerateResponse]:
    """The prompt's log-probabilities, in messages of a size that every client takes."""
    for first in range(0, len(logprobs), MAX_TOKENS_PER_CHUNK):
        yield inference_pb2.GenerateResponse(
            request_id=request_id,
            prompt_logprobs=logprobs[first : first + MAX_TOKENS_PER_CHUNK],
        )


async def worker_status(link: WorkerLink, audit: bool) -> worker_pb2.WorkerStatus:
    """The worker's own answer, or what the registry said of it with state UNREACHABLE.

    READY means that requests can go there: a worker that calls itself so is shown as this
    router's stream to it has it, and as UNREACHABLE without one.
    """
    request = worker_pb2.WorkerStatusRequest(audit=audit)
    try:
        with pod_errors(link.worker_id):
            status = await link.worker.GetWorkerStatus(request, timeout=_STATUS_TIMEOUT_S)
    except BatonError:
        record = link.record
        return worker_pb2.WorkerStatus(
            id=record.worker_id,
            role=record.role,
            address=record.address,
            pid=record.pid,
            epoch=record.epoch,
            state=types_pb2.WORKER_STATE_UNREACHABLE,
        )
    if status.state == types_pb2.WORKER_STATE_READY and not link.is_ready:
        status.state = link.state if link.is_attached else types_pb2.WORKER_STATE_UNREACHABLE
    return status
