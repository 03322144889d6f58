"""Headers of calls: what a client asks with, and what it is answered with."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

import grpc

from core.http2.messages import CONTENT_TYPE, ENCODINGS, Refused, is_grpc

Headers = list[tuple[bytes, bytes]]
Metadata = Sequence[tuple[str, str | bytes]]

_UNIT_S = {"H": 3600.0, "M": 60.0, "S": 1.0, "m": 1e-3, "u": 1e-6, "n": 1e-9}
_MAX_TIMEOUT_DIGITS = 8
# Printable ASCII but "%"; `quote` itself leaves letters, digits and "_.-~".
_PLAIN_IN_MESSAGE = " !\"#$&'()*+,/:;<=>?@[\\]^`{|}"

RESPONSE: Headers = [
    (b":status", b"200"),
    (b"content-type", CONTENT_TYPE),
    (b"grpc-accept-encoding", ",".join(ENCODINGS).encode()),
]


class NotGrpc(Exception):
    """A request of HTTP that is none of gRPC's; `status` is HTTP's."""

    def __init__(self, status: int) -> None:
        super().__init__(f"HTTP status {status}")
        self.status = status


@dataclass(frozen=True, slots=True)
class RequestHead:
    """What a call's first frame says."""

    path: str
    """`/package.Service/Method`."""
    metadata: Metadata
    timeout_s: float | None
    encoding: str
    """Of compressed messages; a key of ENCODINGS."""


def read_head(headers: Iterable[tuple[bytes, bytes]]) -> RequestHead:
    """Raises NotGrpc, and Refused for what gRPC has a status for."""
    path, method, content_type, timeout, encoding = "", b"", b"", "", "identity"
    metadata: list[tuple[str, str | bytes]] = []
    for name, value in headers:
        if name == b":path":
            path = value.decode(errors="replace")
        elif name == b":method":
            method = value
        elif name == b"content-type":
            content_type = value
        elif name == b"grpc-timeout":
            timeout = value.decode(errors="replace")
        elif name == b"grpc-encoding":
            encoding = value.decode(errors="replace")
        elif not name.startswith((b":", b"grpc-")) and name != b"te":
            metadata += _metadata(name.decode("latin-1"), value)
    if method != b"POST":
        raise NotGrpc(405)
    if not is_grpc(content_type):
        raise NotGrpc(415)
    if encoding not in ENCODINGS:
        raise Refused(
            grpc.StatusCode.UNIMPLEMENTED,
            f"grpc-encoding {encoding!r} is not known; these are: {', '.join(ENCODINGS)}",
        )
    return RequestHead(path, metadata, _seconds(timeout) if timeout else None, encoding)


def _metadata(name: str, value: bytes) -> Metadata:
    if not name.endswith("-bin"):
        return [(name, value.decode("latin-1"))]
    try:
        # Binary values of one name may come in one header (PROTOCOL-HTTP2.md, Requests).
        return [
            (name, base64.b64decode(part + b"=" * (-len(part) % 4))) for part in value.split(b",")
        ]
    except binascii.Error:
        raise Refused(grpc.StatusCode.INTERNAL, f"metadata {name!r} is not base64") from None


def _seconds(timeout: str) -> float:
    digits, unit = timeout[:-1], timeout[-1]
    if not (digits.isascii() and digits.isdigit()) or len(digits) > _MAX_TIMEOUT_DIGITS:
        raise Refused(grpc.StatusCode.INTERNAL, f"grpc-timeout {timeout!r} is no time")
    if unit not in _UNIT_S:
        raise Refused(grpc.StatusCode.INTERNAL, f"grpc-timeout {timeout!r} has no known unit")
    return int(digits) * _UNIT_S[unit]


def trailers(code: grpc.StatusCode, message: str = "", metadata: Metadata = ()) -> Headers:
    """The headers that end a call."""
    number: int = code.value[0]
    headers = [(b"grpc-status", b"%d" % number)]
    if message:
        headers.append((b"grpc-message", _quoted(message)))
    for name, value in metadata:
        data = base64.b64encode(value) if isinstance(value, bytes) else value.encode("latin-1")
        headers.append((name.encode(), data))
    return headers


def _quoted(message: str) -> bytes:
    return quote(message, safe=_PLAIN_IN_MESSAGE, errors="replace").encode()
