"""A collector of traces for a test: takes OTLP over HTTP, keeps every span."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

PATH = "/v1/traces"


@dataclass(frozen=True)
class Received:
    """A span, and which service has sent it."""

    service: str
    instance: str
    span: Span

    @property
    def trace_id(self) -> str:
        return self.span.trace_id.hex()


class Receiver:
    """What has come so far. `url` is the services' endpoint."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._received: list[Received] = []

    def take(self, request: ExportTraceServiceRequest) -> None:
        for group in request.resource_spans:
            told = {item.key: item.value.string_value for item in group.resource.attributes}
            names = told["service.name"], told["service.instance.id"]
            self._received += [
                Received(*names, span) for scope in group.scope_spans for span in scope.spans
            ]

    def of(self, trace_id: str) -> dict[str, Received]:
        """One trace's spans by name."""
        return {item.span.name: item for item in self._received if item.trace_id == trace_id}

    @property
    def trace_ids(self) -> set[str]:
        return {item.trace_id for item in self._received}

    def wait_for(self, is_there: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Returns as soon as `is_there()`; fails after `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while not is_there():
            names = [(item.trace_id, item.span.name) for item in self._received]
            assert time.monotonic() < deadline, f"not received, only {names}"
            time.sleep(0.02)


@contextmanager
def otlp_receiver() -> Iterator[Receiver]:
    """Listens on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == PATH
            receiver.take(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Says nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = Receiver(f"http://127.0.0.1:{server.server_port}{PATH}")
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
