"""Bytes of a body to its model, or the error that names the first parameter at fault."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import orjson
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from router.http.errors import HttpError
from router.http.parameters import Body

BodyT = TypeVar("BodyT", bound=Body)
P = ParamSpec("P")
T = TypeVar("T")

_MAX_NAME_CHARS = 64
_INLINE_PARTS = 512
"""Commas of a body that is less than a millisecond's work: what takes time is many parts, not
a long text."""


async def off_loop(data: bytes, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """What `function` makes of the body `data`, in a thread if it takes long.

    The event loop gets its turns between the steps of Python code, of which a body of many parts
    takes many. JSON alone is read in one: 3 ms for 131,072 token ids.
    """
    if data.count(b",") <= _INLINE_PARTS:
        return function(*args, **kwargs)
    return await asyncio.to_thread(function, *args, **kwargs)


def parse_body(cls: type[BodyT], data: bytes) -> BodyT:
    """`data` as a `cls`. Raises HttpError that names the first parameter at fault."""
    try:
        content = orjson.loads(data)
    except orjson.JSONDecodeError as error:  # too deep a nesting, too
        raise HttpError(400, f"the body is no valid JSON: {error}", code="invalid_json") from None
    if not isinstance(content, dict):
        raise HttpError(400, "the body must be a JSON object", code="invalid_json")
    try:
        return cls.model_validate(content)
    except ValidationError as error:
        raise _refusal(error.errors(include_url=False)[0]) from None


def _refusal(detail: ErrorDetails) -> HttpError:
    """The message has the whole path to what is wrong; `param` is the parameter it is in."""
    kind, context = detail["type"], detail.get("ctx", {})
    path = _path(detail["loc"])
    param = _shown(str(detail["loc"][0])) if detail["loc"] else None
    if kind == "value_error":
        message = str(context["error"])
        if param is None:  # a rule between parameters: the message begins with the one at fault
            param = message.split(" ", 1)[0]
        else:
            message = path + ("" if message.startswith("[") else " ") + message
    elif kind in _MESSAGES:
        message = _MESSAGES[kind].format(path=path, **context)
    else:
        reason = detail["msg"].removeprefix("Input ")
        message = f"{path} {reason[:1].lower()}{reason[1:]}"
    return HttpError(400, message, code=_CODES.get(kind, "invalid_value"), param=param)


_MESSAGES = {
    "extra_forbidden": "unknown parameter: {path}",
    "missing": "{path} is missing",
    "none_required": "{path} is not supported",
    "literal_error": "{path} is supported only as {expected}",
    "too_long": "{path} is supported only when it is empty",
}
_CODES = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    "none_required": "unsupported_value",
    "literal_error": "unsupported_value",
    "too_long": "unsupported_value",
}


def _path(location: Sequence[str | int]) -> str:
    """`("messages", 0, "content")` as `messages[0].content`."""
    path = ""
    for part in location:
        if isinstance(part, int):
            path += f"[{part}]"
        else:
            path += f".{_shown(part)}" if path else _shown(part)
    return path


def _shown(name: str) -> str:
    """Names that nobody knows may be of any length."""
    return name if len(name) <= _MAX_NAME_CHARS else name[:_MAX_NAME_CHARS] + "..."
