"""Tokens to text as they come, without parts of characters.

Byte-level vocabularies, most of today's, are a table from tokens to bytes, so that a token of
whole characters costs one look. All others take the tokenizers library's own stream.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable
from typing import Protocol

import tokenizers
from tokenizers.decoders import DecodeStream

from core.token_bytes import alphabet_bytes, byte_alphabet

# A character has at most 4 bytes, so this many tokens without a whole one are no text.
_MAX_PENDING_TOKENS = 32
_UTF_8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Text of one growing list of tokens. Special tokens leave none."""

    @property
    def look(self) -> Callable[[int], str | None]:
        """Of a token that begins and ends between characters it gives the text, and need not be
        told to `add`; of others it gives None. It holds until the next `add`."""

    def add(self, token_id: int) -> str:
        """Text that `token_id` completes; empty while a character is incomplete."""

    def flush(self) -> str:
        """Text of the tokens held back, with U+FFFD for what is no text."""


def nothing(token_id: int) -> None:
    """A `look` that knows no token."""


def detokenizers(tokenizer: tokenizers.Tokenizer) -> Callable[[], Detokenizer]:
    """What makes a detokenizer for each output; they share what they learn of tokens."""
    decoder = tokenizer.decoder
    if decoder is not None and json.loads(decoder.__getstate__())["type"] == "ByteLevel":
        table = TokenTable(tokenizer)
        return lambda: ByteLevelDetokenizer(table)
    return lambda: StreamDetokenizer(tokenizer)


class TokenTable(dict[int, str | None]):
    """Text by token id, None for a token that has parts of characters; filled by use."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = {token_id for token_id, token in added.items() if token.special}
        self._byte_of = byte_alphabet()

    def __missing__(self, token_id: int) -> str | None:
        try:
            text = self.bytes_of(token_id).decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """What the token adds; special ones add nothing."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None or token_id in self._special:
            return b""
        return alphabet_bytes(token, self._byte_of)


class ByteLevelDetokenizer:
    """For vocabularies whose tokens are bytes."""

    __slots__ = ("_decoder", "_is_between_characters", "_table")

    def __init__(self, table: TokenTable) -> None:
        self._table = table
        self._decoder = _UTF_8("replace")
        self._is_between_characters = True

    @property
    def look(self) -> Callable[[int], str | None]:
        return self._table.__getitem__ if self._is_between_characters else nothing

    def add(self, token_id: int) -> str:
        if self._is_between_characters:
            text = self._table[token_id]
            if text is not None:
                return text
        text = self._decoder.decode(self._table.bytes_of(token_id))
        self._is_between_characters = not self._decoder.getstate()[0]
        return text

    def flush(self) -> str:
        self._is_between_characters = True
        return self._decoder.decode(b"", final=True)


class StreamDetokenizer:
    """For any vocabulary."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._context: list[int] = []
        self._pending: list[int] = []

    @property
    def look(self) -> Callable[[int], str | None]:
        return nothing

    def add(self, token_id: int) -> str:
        self._pending.append(token_id)
        if len(self._pending) > _MAX_PENDING_TOKENS:
            return self.flush()
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:
            # The stream gives up where a token changes text that is out already. The class
            # of its error is plain Exception.
            return self.flush()
        if text is None:
            return ""
        self._context, self._pending = self._pending, []
        return text

    def flush(self) -> str:
        if not self._pending:
            return ""
        before = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        self._context, self._pending = self._pending, []
        self._stream = DecodeStream(self._context, skip_special_tokens=True)
        return text[len(before) :] if text.startswith(before) else text

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
