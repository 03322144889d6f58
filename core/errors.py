"""Every error that Baton raises on purpose, and what each becomes on the wire.

BatonError
├── InvalidArgument       a field of the request is wrong: names the field and the limit
│   └── ContextExceeded   the prompt, or it and its output, are longer than the context
├── Unauthenticated       no API key, or one that the operator has not given out
├── AlreadyExists         the request id is in use for another request
├── ResourceExhausted     no room now; try again after `retry_after_s`
├── FailedPrecondition    two pods do not fit together (fingerprints differ)
├── Unavailable           a worker, Redis or the network is away
│   ├── Unreachable       a pod gives no answer
│   ├── TransferError     a KV read failed, or its lease did not hold
│   └── HandOffGivenUp    the other pod of a hand-off gave it up, and will say why
├── DeadlineExceeded      the request's time is over
├── Cancelled             the client left
├── InternalError         a bug: the message goes to the log, the client learns that much
└── StartupError          a service cannot start: one line for the operator, exit code 1

Foreign errors are translated where they enter; `from_exception` is that boundary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import grpc

from baton.v1 import types_pb2

ERROR_METADATA_KEY = "baton-error-bin"


class BatonError(Exception):
    """Base of all. `field` names the request's field at fault."""

    def __init__(self, message: str, *, field: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.retry_after_s = retry_after_s

    def bare(self) -> Self:
        """The same without its traceback, which holds the frames that it went through.

        Who keeps an error that was raised, or raises one that is kept, does so with this: what
        these frames know of often holds the error, and so itself.
        """
        return type(self)(self.message, field=self.field, retry_after_s=self.retry_after_s)


class InvalidArgument(BatonError):
    """The request is wrong and will stay wrong."""


class ContextExceeded(InvalidArgument):
    """More tokens than the model's context, or the KV pool, holds."""


class Unauthenticated(BatonError):
    """The caller gave no valid API key."""


class AlreadyExists(BatonError):
    """The request id belongs to a request with another content."""


class ResourceExhausted(BatonError):
    """Full; the same request may succeed later."""


class FailedPrecondition(BatonError):
    """Two pods were configured differently."""


class Unavailable(BatonError):
    """Something that the request needs cannot be reached."""


class Unreachable(Unavailable):
    """A call to another pod got no answer of that pod's own."""


class TransferError(Unavailable):
    """A KV read failed or may not be used."""


class HandOffGivenUp(Unavailable):
    """The other pod of a hand-off gave it up: what that pod says of it counts, not this."""


class DeadlineExceeded(BatonError):
    """The time that the client gave is over."""


class Cancelled(BatonError):
    """The client took the request back."""


class InternalError(BatonError):
    """A broken invariant."""


class StartupError(BatonError):
    """A service cannot start."""


@dataclass(frozen=True)
class Status:
    """One row of the status table."""

    grpc: grpc.StatusCode
    http: int
    retryable: bool


STATUS_TABLE: dict[type[BatonError], Status] = {
    InvalidArgument: Status(grpc.StatusCode.INVALID_ARGUMENT, 400, False),
    ContextExceeded: Status(grpc.StatusCode.INVALID_ARGUMENT, 400, False),
    Unauthenticated: Status(grpc.StatusCode.UNAUTHENTICATED, 401, False),
    AlreadyExists: Status(grpc.StatusCode.ALREADY_EXISTS, 409, False),
    ResourceExhausted: Status(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, True),
    FailedPrecondition: Status(grpc.StatusCode.FAILED_PRECONDITION, 503, False),
    Unavailable: Status(grpc.StatusCode.UNAVAILABLE, 503, True),
    Unreachable: Status(grpc.StatusCode.UNAVAILABLE, 503, True),
    TransferError: Status(grpc.StatusCode.UNAVAILABLE, 503, True),
    HandOffGivenUp: Status(grpc.StatusCode.ABORTED, 503, True),
    DeadlineExceeded: Status(grpc.StatusCode.DEADLINE_EXCEEDED, 504, False),
    Cancelled: Status(grpc.StatusCode.CANCELLED, 499, False),
    InternalError: Status(grpc.StatusCode.INTERNAL, 500, False),
    StartupError: Status(grpc.StatusCode.FAILED_PRECONDITION, 500, False),
}

_BY_CODE: dict[str, type[BatonError]] = {
    status.grpc.name: kind
    for kind, status in reversed(STATUS_TABLE.items())
    if kind not in (StartupError, Unreachable, TransferError, ContextExceeded)
}


def status_of(error: BatonError) -> Status:
    """The row of the status table for `error`."""
    return STATUS_TABLE[type(error)]


def to_detail(error: BatonError) -> types_pb2.ErrorDetail:
    """`error` as it travels between pods and to clients."""
    status = status_of(error)
    return types_pb2.ErrorDetail(
        code=status.grpc.name,
        message=error.message,
        field=error.field,
        retryable=status.retryable,
        retry_after_s=error.retry_after_s,
    )


def from_detail(detail: types_pb2.ErrorDetail) -> BatonError:
    """Inverse of `to_detail`; an unknown code becomes InternalError."""
    kind = _BY_CODE.get(detail.code, InternalError)
    return kind(detail.message, field=detail.field, retry_after_s=detail.retry_after_s)


def from_exception(error: BaseException) -> BatonError:
    """Translates any exception: gRPC errors by their detail or code, others to InternalError."""
    if isinstance(error, BatonError):
        return error
    if isinstance(error, grpc.RpcError):
        return _from_rpc_error(error)
    if isinstance(error, TimeoutError):
        return DeadlineExceeded(str(error) or "timed out")
    return InternalError(f"{type(error).__name__}: {error}")


def _from_rpc_error(error: grpc.RpcError) -> BatonError:
    own = own_error(error)
    if own is not None:
        return own
    kind = _BY_CODE.get(error.code().name, InternalError)
    return kind(error.details() or error.code().name)


def own_error(error: grpc.RpcError) -> BatonError | None:
    """What the called service itself has answered; None when the call did not get that far."""
    # grpc-stubs type a pair as an object that cannot be unpacked.
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == ERROR_METADATA_KEY:
            return from_detail(types_pb2.ErrorDetail.FromString(value))
    return None
