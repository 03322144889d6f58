"""Headers of a call, and what a server means by the way in which it ends one."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import unquote_to_bytes

import grpc

from core.http2.base import Headers
from core.http2.frames import ErrorCode
from core.http2.messages import CONTENT_TYPE, is_grpc
from router.grpc_client.http2 import name_of

Fields = Mapping[bytes, bytes]
"""Headers of an answer, by name."""

_CODES: dict[bytes, grpc.StatusCode] = {b"%d" % code.value[0]: code for code in grpc.StatusCode}
# doc/http-grpc-status-mapping.md
_OF_HTTP = {
    b"400": grpc.StatusCode.INTERNAL,
    b"401": grpc.StatusCode.UNAUTHENTICATED,
    b"403": grpc.StatusCode.PERMISSION_DENIED,
    b"404": grpc.StatusCode.UNIMPLEMENTED,
    b"429": grpc.StatusCode.UNAVAILABLE,
    b"502": grpc.StatusCode.UNAVAILABLE,
    b"503": grpc.StatusCode.UNAVAILABLE,
    b"504": grpc.StatusCode.UNAVAILABLE,
}
# doc/PROTOCOL-HTTP2.md, Errors
_OF_RESET: dict[int, grpc.StatusCode] = {
    ErrorCode.REFUSED_STREAM: grpc.StatusCode.UNAVAILABLE,
    ErrorCode.CANCEL: grpc.StatusCode.CANCELLED,
    ErrorCode.ENHANCE_YOUR_CALM: grpc.StatusCode.RESOURCE_EXHAUSTED,
    ErrorCode.INADEQUATE_SECURITY: grpc.StatusCode.PERMISSION_DENIED,
}


class CallFailed(Exception):
    """A call ended with another status than OK, or without one."""

    def __init__(self, code: grpc.StatusCode, message: str) -> None:
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message


def request_headers(method: str, authority: str, *, is_encrypted: bool) -> Headers:
    """Of a call to `method`, which is `/package.Service/Method`."""
    return [
        (b":method", b"POST"),
        (b":scheme", b"https" if is_encrypted else b"http"),
        (b":path", method.encode()),
        (b":authority", authority.encode()),
        (b"te", b"trailers"),
        (b"content-type", CONTENT_TYPE),
    ]


def check_answer(fields: Fields) -> None:
    """Whether messages follow an answer's first headers. Raises CallFailed."""
    http_status, content_type = fields.get(b":status", b""), fields.get(b"content-type", b"")
    if http_status != b"200":
        check_end(fields)
    if http_status != b"200" or not is_grpc(content_type):
        raise CallFailed(
            grpc.StatusCode.UNKNOWN,
            f"this is not gRPC: HTTP status {_text(http_status)}, {_text(content_type)!r}",
        )


def check_end(fields: Fields) -> None:
    """What all headers of an answer together say of its end. Raises CallFailed, unless it is OK."""
    status = fields.get(b"grpc-status")
    if status is not None:
        code = _CODES.get(status, grpc.StatusCode.UNKNOWN)
        if code is grpc.StatusCode.OK:
            return
        message = unquote_to_bytes(fields.get(b"grpc-message", b"")).decode(errors="replace")
        raise CallFailed(code, message)
    http_status = fields.get(b":status", b"")
    code = _OF_HTTP.get(http_status, grpc.StatusCode.UNKNOWN)
    raise CallFailed(code, f"an end without grpc-status, HTTP status {_text(http_status)}")


def of_reset(code: int) -> CallFailed:
    """The end of a call whose stream was reset."""
    status = _OF_RESET.get(code, grpc.StatusCode.INTERNAL)
    return CallFailed(status, f"the stream was reset: {name_of(code)}")


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
