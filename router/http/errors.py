"""Errors as OpenAI's clients expect them: a status and a JSON object that says what is wrong."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

from starlette.exceptions import HTTPException

from core.errors import (
    AlreadyExists,
    BatonError,
    ContextExceeded,
    DeadlineExceeded,
    InternalError,
    InvalidArgument,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
    from_exception,
    status_of,
)
from core.logs import event

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499
"""Status that stands in the metrics for a client that did not wait; nobody is sent it."""

_MIN_RETRY_AFTER_S = 1

_CODES: dict[type[BatonError], str] = {
    InvalidArgument: "invalid_value",
    ContextExceeded: "context_length_exceeded",
    Unauthenticated: "invalid_api_key",
    AlreadyExists: "request_id_in_use",
    ResourceExhausted: "overloaded",
    Unavailable: "unavailable",
    DeadlineExceeded: "timeout",
}


class ClientLeft(Exception):
    """The connection is gone; there is nobody to answer."""


class HttpError(Exception):
    """A request that ends with `status`. `param` names the parameter or header at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The error object."""
        return {
            "error": {
                "message": self.message,
                "type": _error_type(self.status),
                "param": self.param,
                "code": self.code,
            }
        }


def to_http(error: Exception, names: Mapping[str, str], request_id: str) -> HttpError:
    """Any error as it leaves over HTTP.

    `names` translates fields of GenerateRequest to the parameters that the client gave.
    """
    if isinstance(error, HttpError):
        return error
    if isinstance(error, HTTPException):  # of the routes: 404, 405
        code = "not_found" if error.status_code == 404 else "method_not_allowed"
        return HttpError(error.status_code, error.detail, code=code, headers=error.headers)
    known = from_exception(error)
    if isinstance(known, InternalError):
        event(logger, logging.ERROR, "http_failed", request_id=request_id, error=known.message)
        logger.error("traceback", exc_info=error)
        message = f"internal error; the router's log has it under request id {request_id}"
        return HttpError(500, message, code="internal_error")
    status = status_of(known)
    field = known.field
    param = names.get(field, field)
    headers = {}
    if status.retryable:
        headers["retry-after"] = str(max(_MIN_RETRY_AFTER_S, math.ceil(known.retry_after_s)))
    code = next((_CODES[kind] for kind in type(known).mro() if kind in _CODES), "error")
    return HttpError(
        status.http,
        _renamed(known.message, field, param),
        code=code,
        param=param or None,
        headers=headers,
    )


def _renamed(message: str, field: str, param: str) -> str:
    """Messages begin with the field's name."""
    if field and message.startswith(field):
        return param + message.removeprefix(field)
    return message


def _error_type(status: int) -> str:
    if status == 401:
        return "authentication_error"
    if status == 429:
        return "rate_limit_error"
    return "invalid_request_error" if status < 500 else "server_error"
