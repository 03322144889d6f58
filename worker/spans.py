"""The span of a worker's part in a request: it goes below the router's attempt."""

from __future__ import annotations

from baton.v1 import worker_pb2
from core.tracing import Span, TraceContext, Tracer


def dispatch_span(tracer: Tracer, name: str, dispatch: worker_pb2.Dispatch) -> Span:
    """Begins now; nothing is recorded of a dispatch that names no trace."""
    return tracer.serve(
        name,
        TraceContext(dispatch.traceparent),
        {
            "baton.request_id": dispatch.request_id,
            "baton.attempt": dispatch.attempt,
            "baton.prompt_tokens": len(dispatch.prompt_token_ids),
            "baton.prior_output_tokens": len(dispatch.output_token_ids),
        },
    )
