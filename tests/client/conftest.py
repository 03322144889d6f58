"""A router that follows a script, served over real gRPC."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2, worker_pb2
from core.errors import ERROR_METADATA_KEY, BatonError, status_of, to_detail

PARIS = (
    inference_pb2.GenerateResponse(request_id="r1", text="Par", token_ids=[7, 8]),
    inference_pb2.GenerateResponse(
        request_id="r1",
        text="is.",
        token_ids=[9],
        output_index=2,
        finish_reason=types_pb2.FINISH_REASON_STOP,
        usage=inference_pb2.Usage(prompt_tokens=5, completion_tokens=3),
        route=inference_pb2.Route(
            prefill_worker="prefill-0",
            decode_worker="decode-0",
            cached_tokens=16,
            transferred_blocks=2,
            attempts=1,
        ),
        timing=inference_pb2.Timing(ttft_s=0.25, total_s=0.5),
    ),
)


def two_answers() -> list[inference_pb2.GenerateResponse]:
    """To a prompt of three tokens with log-probabilities: "a b" and "c", in turns."""

    def message(choice: int, text: str, **fields: object) -> inference_pb2.GenerateResponse:
        return inference_pb2.GenerateResponse(
            request_id="r1", choice=choice, text=text, token_ids=[ord(text[-1])], **fields
        )

    prompt = inference_pb2.GenerateResponse(request_id="r1")
    prompt.prompt_logprobs.add(logprob=-1.5)
    prompt.prompt_logprobs.add(logprob=-0.5)
    last = message(0, " b", finish_reason=types_pb2.FINISH_REASON_STOP, output_index=1)
    last.usage.prompt_tokens = 3
    last.route.attempts = 1
    last.timing.total_s = 0.5
    second = message(1, "c", finish_reason=types_pb2.FINISH_REASON_LENGTH)
    return [prompt, message(0, "a"), second, last]


def worker_status(name: str = "prefill-0", **fields: object) -> worker_pb2.WorkerStatus:
    """A healthy, idle worker."""
    blocks = types_pb2.BlockStats(total=10, free=6, cached=3, referenced=1)
    status = worker_pb2.WorkerStatus(
        id=name,
        role=types_pb2.ROLE_PREFILL,
        address="127.0.0.1:4000",
        pid=42,
        epoch=17,
        state=types_pb2.WORKER_STATE_READY,
        kv_transport="tcp",
        load=types_pb2.Load(queue_depth=1, running=2, blocks=blocks, exports=3, imports=4),
    )
    status.MergeFrom(worker_pb2.WorkerStatus(**fields))
    return status


class FakeRouter(inference_pb2_grpc.InferenceServicer):
    """Answers every Generate with `responses`, then with `error` if there is one."""

    def __init__(self) -> None:
        self.address = ""
        self.responses: list[inference_pb2.GenerateResponse] = list(PARIS)
        self.error: BatonError | None = None
        self.hangs = False
        self.num_cancelled = 0
        """Calls that it cancels at first, without an answer."""
        self.requests: list[inference_pb2.GenerateRequest] = []
        self.time_remaining: float | None = None
        self.call_ended = threading.Event()
        self.workers = [worker_status()]
        self.audits: list[bool] = []
        self.authorizations: list[str | None] = []
        self.traceparents: list[str | None] = []

    def _note_authorization(self, context):
        self.authorizations.append(dict(context.invocation_metadata()).get("authorization"))

    def Generate(self, request, context):
        self._note_authorization(context)
        self.traceparents.append(dict(context.invocation_metadata()).get("traceparent"))
        self.requests.append(request)
        self.time_remaining = context.time_remaining()
        context.add_callback(self.call_ended.set)
        if self.num_cancelled:
            self.num_cancelled -= 1
            context.abort(grpc.StatusCode.CANCELLED, "stopping")
        yield from self.responses
        if self.hangs:
            self.call_ended.wait(60)
        if self.error is not None:
            detail = to_detail(self.error).SerializeToString()
            context.set_trailing_metadata(((ERROR_METADATA_KEY, detail),))
            context.abort(status_of(self.error).grpc, self.error.message)

    def GetModel(self, request, context):
        self._note_authorization(context)
        return inference_pb2.ModelInfo(name="tiny", max_model_len=512)

    def GetStatus(self, request, context):
        self._note_authorization(context)
        self.audits.append(request.audit)
        router = inference_pb2.RouterStatus(num_requests=1, redis_ok=True, model="tiny", pid=41)
        return inference_pb2.GetStatusResponse(workers=self.workers, router=router)


@pytest.fixture
def router() -> Iterator[FakeRouter]:
    """A FakeRouter that listens on `router.address`."""
    servicer = FakeRouter()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    server.stop(None).wait()
