"""Traces of requests, by choice: what each service says of its part of a request's way.

One trace holds a request's spans of the router and of both workers: the router's root span
continues the caller's trace, and the `traceparent` of each attempt travels in its dispatch.
`Span` and `Tracer` are what stands everywhere while nothing is recorded: to say something then
is a call that does nothing, once in a phase of a request and never for a token. The recording
ones are in core/otel.py, which alone needs OpenTelemetry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import NamedTuple, Self

from pydantic import Field

from core.errors import StartupError
from core.settings import Settings

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]

NO_ATTRIBUTES: Attributes = MappingProxyType({})

END_REASON = "baton.end_reason"
"""Attribute of a span that ends early: why."""


class TraceContext(NamedTuple):
    """The headers of W3C Trace Context that a call came with."""

    traceparent: str = ""
    """Empty: the caller has no trace."""
    tracestate: str = ""


NO_CONTEXT = TraceContext()


class Span:
    """A part of a request's way, of which nothing is recorded."""

    is_recorded = False
    """Whether it is worth while to find out what could be said."""

    @property
    def traceparent(self) -> str:
        """What another process has to be told, so that its spans go below this one."""
        return ""

    def child(
        self, name: str, attributes: Attributes = NO_ATTRIBUTES, *, is_call: bool = False
    ) -> Span:
        """A part of this one, from now on. `is_call`: what happens in other processes."""
        return self

    def set(self, attributes: Attributes) -> None:
        """Says more about it; nothing when it has ended."""

    def event(self, name: str, attributes: Attributes = NO_ATTRIBUTES) -> None:
        """Something happens now; nothing when it has ended."""

    def end(self, error: BaseException | None = None) -> None:
        """It is over, with `error` badly, unless that is a cancellation. The first end counts."""

    def cancel(self, reason: str) -> None:
        """It is over early, without a fault."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end(error)


class Tracer:
    """Begins the spans of one process: here such as record nothing."""

    def serve(
        self, name: str, context: TraceContext, attributes: Attributes = NO_ATTRIBUTES
    ) -> Span:
        """What this process does for a call that came with `context`."""
        return NO_SPAN

    async def close(self) -> None:
        """Sends what has not been sent, for a bounded time."""


NO_SPAN = Span()


class TracingSettings(Settings):
    """Settings of every service that traces requests."""

    otlp_traces_endpoint: str | None = Field(
        None,
        pattern="^https?://.+",
        description="Where OpenTelemetry traces of requests are sent, with OTLP over HTTP: "
        "http://HOST:4318/v1/traces; needs the extra otel; without it nothing is traced",
    )


def make_tracer(
    settings: TracingSettings, service: str, instance: str, sampling_ratio: float = 0.0
) -> Tracer:
    """A process's tracer. Raises StartupError without OpenTelemetry where it is needed.

    `sampling_ratio` is of calls that come without a trace; with 0 only others' are continued.
    """
    if settings.otlp_traces_endpoint is None:
        return Tracer()
    try:
        from core.otel import Resource, otlp_tracer
    except ModuleNotFoundError as error:
        raise StartupError(
            f"--otlp-traces-endpoint needs OpenTelemetry ({error.name} is not installed): "
            "install baton-serving with its extra `otel`"
        ) from error
    return otlp_tracer(settings.otlp_traces_endpoint, Resource(service, instance), sampling_ratio)
