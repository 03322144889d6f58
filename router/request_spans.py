"""What a request's spans say in the router, by OpenTelemetry's conventions for generative AI.

Names that begin with `baton.` are Baton's own; docs/tracing.md lists them. Nothing of a prompt
or an answer is said.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from baton.v1 import inference_pb2, types_pb2, worker_pb2
from core.tracing import Attributes, Span, TraceContext, Tracer
from router.choice import Choice
from router.dispatch import AttemptFailed, Placement
from router.outputs import OutputLog
from router.tenants import Tenant

_MAX_NAME = 128
"""Of a model, which a client may make up."""
_SAMPLING = (
    "max_tokens",
    "temperature",
    "top_p",
    "top_k",
    "seed",
    "presence_penalty",
    "frequency_penalty",
)
"""Fields of SamplingParams that the conventions know by the same names."""


def begin_request(
    tracer: Tracer,
    trace: TraceContext,
    request: inference_pb2.GenerateRequest,
    tenant: Tenant,
    served_name: str,
) -> Span:
    """The root span, which goes on with the caller's trace."""
    operation = "chat" if request.messages else "text_completion"
    span = tracer.serve(f"{operation} {served_name}", trace)
    if span.is_recorded:
        span.set(
            {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "baton",
                "gen_ai.request.model": request.model[:_MAX_NAME] or served_name,
                "gen_ai.response.model": served_name,
                "gen_ai.response.id": request.request_id,
                "baton.tenant.class": tenant.class_name,
                **_parameters(request),
            }
        )
    return span


def _parameters(request: inference_pb2.GenerateRequest) -> Attributes:
    """Those that the client gave."""
    given: dict[str, int | float] = {
        f"gen_ai.request.{field.name}": value
        for field, value in request.sampling.ListFields()
        if field.name in _SAMPLING
    }
    # Unsigned 64 bits here, signed ones there.
    if "gen_ai.request.seed" in given and given["gen_ai.request.seed"] >= 2**63:
        given["gen_ai.request.seed"] -= 2**64
    if request.HasField("n"):
        given["gen_ai.request.choice.count"] = request.n
    if request.HasField("priority"):
        given["baton.priority"] = request.priority
    return given


def end_request(
    span: Span,
    log: OutputLog,
    route: inference_pb2.Route,
    ttft_s: float | None,
    cancelled: str | None = None,
) -> None:
    """Ends the root span with what has become of the request. Only the first call counts.

    `cancelled`: why nobody wants it any more.
    """
    if not span.is_recorded:
        return
    reasons = [
        types_pb2.FinishReason.Name(choice.finish_reason).removeprefix("FINISH_REASON_").lower()
        for choice in log.choices
        if choice.finish_reason
    ]
    span.set(
        {
            "gen_ai.usage.output_tokens": log.num_tokens,
            "gen_ai.usage.cache_read.input_tokens": route.cached_tokens,
            "gen_ai.response.finish_reasons": reasons,
            "baton.attempts": route.attempts,
            "baton.prefill_worker": route.prefill_worker,
            "baton.decode_worker": route.decode_worker,
            "baton.transferred_blocks": route.transferred_blocks,
        }
    )
    if ttft_s is not None:
        span.set({"gen_ai.response.time_to_first_chunk": ttft_s})
    if cancelled is not None:
        span.cancel(cancelled)
    span.end(log.error)


@contextmanager
def attempt_span(
    request: Span, dispatch: worker_pb2.Dispatch, placement: Placement, choices: Sequence[Choice]
) -> Iterator[Span]:
    """Around one attempt: `dispatch` carries its context to the workers."""
    span = request.child("router.attempt", is_call=True)
    if span.is_recorded:
        dispatch.traceparent = span.traceparent
        span.set(_workers(placement))
        span.set({"baton.request_id": dispatch.request_id, "baton.attempt": dispatch.attempt})
    try:
        yield span
    except AttemptFailed as failure:
        span.end(failure.error)
        raise
    except BaseException as error:
        span.end(error)
        raise
    if not all(choice.is_finished for choice in choices):
        span.cancel("preempted")
    span.end()


def _workers(placement: Placement) -> Attributes:
    workers = {"baton.decode_worker": placement.decode.worker_id}
    if placement.prefill is not None:
        workers["baton.prefill_worker"] = placement.prefill.worker_id
    if placement.source is not None:
        workers["baton.prefix_source"] = placement.source.worker.worker_id
    return workers
