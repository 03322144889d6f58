"""The blocking client."""

from __future__ import annotations

from types import TracebackType
from typing import Self, Unpack

import grpc

from baton.v1 import inference_pb2, inference_pb2_grpc
from client._errors import translate
from client._options import (
    CHANNEL_OPTIONS,
    DEFAULT_SERVER,
    GenerateOptions,
    build_request,
    call_metadata,
    trace_metadata,
)
from client._results import Assembler, Chunk, Completion


class CompletionStream:
    """Iterates over the chunks of one running request.

    Closing it, or leaving its `with` block, before the end cancels the request: everything
    that it holds on the pods is freed. Iterating raises the errors of `core.errors`.
    """

    def __init__(
        self, call: grpc.CallIterator[inference_pb2.GenerateResponse], server: str
    ) -> None:
        self._call = call
        self._messages = iter(call)
        self._server = server
        self._assembler = Assembler()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        try:
            return self._assembler.add(next(self._messages))
        except grpc.RpcError as error:
            raise translate(error, self._server) from None

    def completion(self) -> Completion:
        """Reads what is still to come and returns the whole."""
        for _ in self:
            pass
        return self._assembler.completion()

    def close(self) -> None:
        self._call.cancel()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


class BatonClient:
    """Talks to one router over one connection; safe to share between threads."""

    def __init__(self, server: str = DEFAULT_SERVER, api_key: str | None = None) -> None:
        """`server` is HOST:PORT. Connecting happens with the first call."""
        self._server = server
        self._metadata = call_metadata(api_key)
        self._channel = grpc.insecure_channel(server, options=CHANNEL_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    def generate(self, prompt: str | None = None, **options: Unpack[GenerateOptions]) -> Completion:
        """Runs one request to its end. Raises the errors of `core.errors`."""
        with self.stream(prompt, **options) as stream:
            return stream.completion()

    def stream(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> CompletionStream:
        """Starts one request and returns its stream."""
        request, timeout_s = build_request(prompt, options)
        metadata = (*self._metadata, *trace_metadata(options))
        call = self._stub.Generate(request, timeout=timeout_s, metadata=metadata)
        return CompletionStream(call, self._server)

    def model(self) -> inference_pb2.ModelInfo:
        """The model that is served, and its limits."""
        try:
            request = inference_pb2.GetModelRequest()
            return self._stub.GetModel(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self._server) from None

    def status(self, audit: bool = False) -> inference_pb2.GetStatusResponse:
        """State of every worker; `audit` also checks every block of their pools."""
        try:
            request = inference_pb2.GetStatusRequest(audit=audit)
            return self._stub.GetStatus(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self._server) from None

    def close(self) -> None:
        """Ends the connection and every request still running on it."""
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
