"""The asyncio client."""

from __future__ import annotations

from types import TracebackType
from typing import Self, Unpack

import grpc
import grpc.aio

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

Call = grpc.aio.UnaryStreamCall[inference_pb2.GenerateRequest, inference_pb2.GenerateResponse]


class AsyncCompletionStream:
    """Iterates over the chunks of one running request; closing it early cancels the request."""

    def __init__(self, call: Call, server: str) -> None:
        self._call = call
        self._server = server
        self._messages = call.__aiter__()
        self._assembler = Assembler()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        try:
            return self._assembler.add(await anext(self._messages))
        except grpc.RpcError as error:
            raise translate(error, self._server) from None

    async def completion(self) -> Completion:
        """Reads what is still to come and returns the whole."""
        async for _ in self:
            pass
        return self._assembler.completion()

    async def close(self) -> None:
        self._call.cancel()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()


class AsyncBatonClient:
    """`BatonClient` for asyncio: make it and use it inside one event loop."""

    def __init__(self, server: str = DEFAULT_SERVER, api_key: str | None = None) -> None:
        """`server` is HOST:PORT. Connecting happens with the first call."""
        self._server = server
        self._metadata = call_metadata(api_key)
        self._channel = grpc.aio.insecure_channel(server, options=CHANNEL_OPTIONS)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)

    async def generate(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> Completion:
        """Runs one request to its end. Raises the errors of `core.errors`."""
        async with self.stream(prompt, **options) as stream:
            return await stream.completion()

    def stream(
        self, prompt: str | None = None, **options: Unpack[GenerateOptions]
    ) -> AsyncCompletionStream:
        """Starts one request and returns its stream."""
        request, timeout_s = build_request(prompt, options)
        metadata = (*self._metadata, *trace_metadata(options))
        call = self._stub.Generate(request, timeout=timeout_s, metadata=metadata)
        return AsyncCompletionStream(call, self._server)

    async def model(self) -> inference_pb2.ModelInfo:
        """The model that is served, and its limits."""
        try:
            request = inference_pb2.GetModelRequest()
            return await self._stub.GetModel(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self._server) from None

    async def status(self, audit: bool = False) -> inference_pb2.GetStatusResponse:
        """State of every worker; `audit` also checks every block of their pools."""
        try:
            request = inference_pb2.GetStatusRequest(audit=audit)
            return await self._stub.GetStatus(request, metadata=self._metadata)
        except grpc.RpcError as error:
            raise translate(error, self._server) from None

    async def close(self) -> None:
        """Ends the connection and every request still running on it."""
        await self._channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()
