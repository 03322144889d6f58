"""Log-probabilities as OpenAI's two APIs show them: tokens as text, as bytes, with offsets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from baton.v1 import types_pb2
from core.tokenizer import Tokenizer

LEAST_LOGPROB = -9999.0
"""Stands for everything below it: JSON has no infinity."""


def token_text(data: bytes) -> str:
    r"""A token's text or, of one that is no whole text, its bytes: `bytes:\xe2\x82`."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[types_pb2.TokenLogprobs], tokenizer: Tokenizer
) -> dict[str, Any]:
    """The `logprobs` of a chat choice; the `top_logprobs` are likeliest first."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token_id)
        return {"token": token_text(data), "logprob": _finite(logprob), "bytes": list(data)}

    content = []
    for token_id, given in zip(token_ids, logprobs, strict=True):
        top = [entry(item.token_id, item.logprob) for item in given.top]
        content.append(entry(token_id, given.logprob) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """The `logprobs` of a completion's choice, part by part as it streams.

    Offsets count characters of the choice's text. A token that completes no character has
    the offset at which the character will stand.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._offset = 0

    def prompt(
        self, text: str, token_ids: Sequence[int], logprobs: Sequence[types_pb2.TokenLogprobs]
    ) -> dict[str, list[Any]]:
        """Of an echoed prompt; nothing predicts its first token."""
        detokenizer = self._tokenizer.detokenizer()
        part = _part()
        for token_id, given in zip(token_ids, [None, *logprobs], strict=True):
            name = self._append(part, token_id, given)
            piece = detokenizer.add(token_id)
            # A special token has no text, unless the prompt spells it out.
            if not piece and text.startswith(name, self._offset):
                piece = name
            self._offset += len(piece)
        self._offset = len(text)
        return part

    def output(
        self, token_ids: Sequence[int], logprobs: Sequence[types_pb2.TokenLogprobs]
    ) -> dict[str, list[Any]]:
        """Of the next output tokens."""
        part = _part()
        for token_id, given in zip(token_ids, logprobs, strict=True):
            self._append(part, token_id, given)
            self._offset += len(self._detokenizer.add(token_id))
        return part

    def _append(
        self, part: dict[str, list[Any]], token_id: int, given: types_pb2.TokenLogprobs | None
    ) -> str:
        name = token_text(self._tokenizer.token_bytes(token_id))
        part["tokens"].append(name)
        part["text_offset"].append(self._offset)
        if given is None:
            part["token_logprobs"].append(None)
            part["top_logprobs"].append(None)
            return name
        part["token_logprobs"].append(_finite(given.logprob))
        top = {
            token_text(self._tokenizer.token_bytes(item.token_id)): _finite(item.logprob)
            for item in given.top
        }
        part["top_logprobs"].append(top | {name: _finite(given.logprob)})
        return name


def joined(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Two parts in a row."""
    return {key: values + second[key] for key, values in first.items()}


def _part() -> dict[str, list[Any]]:
    return {"text_offset": [], "token_logprobs": [], "tokens": [], "top_logprobs": []}


def _finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)
