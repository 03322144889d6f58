"""Kubernetes' label selectors, as they come in a query: `a=b,c!=d,e in (f,g),h notin (i),j,!k`."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from core.errors import InvalidArgument

Selector = Callable[[Mapping[str, str]], bool]

_KEY = r"(?P<key>[A-Za-z0-9][A-Za-z0-9._/-]*)"
_VALUE = r"[A-Za-z0-9._-]*"
_EQUALITY = re.compile(rf"{_KEY}\s*(?P<operator>==|=|!=)\s*(?P<value>{_VALUE})")
_SET = re.compile(
    rf"{_KEY}\s+(?P<operator>in|notin)\s*\(\s*(?P<values>{_VALUE}(?:\s*,\s*{_VALUE})*)\s*\)"
)
_EXISTS = re.compile(rf"(?P<absent>!?)\s*{_KEY}")
_COMMA = re.compile(r",(?![^(]*\))")
"""Not one between brackets."""
_NOT_IN_LABELS = re.compile(r"[^A-Za-z0-9._-]")
_MAX_LABEL_CHARS = 63


def parse_selector(text: str) -> Selector:
    """Whether labels have everything that `text` asks for. Raises InvalidArgument."""
    requirements = [_requirement(part.strip()) for part in _COMMA.split(text) if text.strip()]
    return lambda labels: all(holds(labels) for holds in requirements)


def label_value(name: str) -> str:
    """`name` as the value of a label, which may not have every character."""
    return _NOT_IN_LABELS.sub("_", name)[:_MAX_LABEL_CHARS].strip("._-")


def _requirement(text: str) -> Selector:
    if match := _EQUALITY.fullmatch(text):
        values, is_wanted = {match["value"]}, match["operator"] != "!="
    elif match := _SET.fullmatch(text):
        values = {value.strip() for value in match["values"].split(",")}
        is_wanted = match["operator"] == "in"
    elif match := _EXISTS.fullmatch(text):
        key, must_exist = match["key"], not match["absent"]
        return lambda labels: (key in labels) == must_exist
    else:
        raise InvalidArgument(f"{text!r} is no requirement on a label", field="labelSelector")
    name = match["key"]
    # A label that is not there differs from every value.
    return lambda labels: (labels.get(name) in values) == is_wanted
