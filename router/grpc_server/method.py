"""What servicers do, and how that ends."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from router.grpc_server.head import Metadata


@dataclass(frozen=True)
class Method:
    """How one method is called."""

    path: str
    behaviour: Callable[[Any, Any], Any]
    is_generator: bool
    """Whether it yields its messages. Another one writes them to the context."""
    has_one_request: bool
    has_one_response: bool
    deserialize: Callable[[bytes], Any]
    serialize: Callable[[Any], bytes]

    @classmethod
    def of(cls, path: str, handler: grpc.RpcMethodHandler[Any, Any]) -> Method:
        """As protoc's plugin registers it."""
        behaviour: Any = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        return cls(
            path=path,
            behaviour=behaviour,
            is_generator=inspect.isasyncgenfunction(behaviour),
            has_one_request=not handler.request_streaming,
            has_one_response=not handler.response_streaming,
            deserialize=handler.request_deserializer or bytes,
            serialize=handler.response_serializer or bytes,
        )


@dataclass(frozen=True)
class End:
    """How a call ends."""

    code: grpc.StatusCode
    message: str = ""
    metadata: Metadata = ()
