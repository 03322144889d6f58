"""The bytes that a single token stands for; half a character is no text, but it is bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE_MARK = "▁"


class TokenBytes:
    """Call it with a token id. An id without a token stands for no bytes.

    Vocabularies write bytes in two ways, and the tokenizer's decoder tells which: byte-level
    BPE has a printable character for each byte (GPT-2's table); SentencePiece has `▁` for a
    space and `<0x0A>` for a byte that no token covers.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._added = {
            token_id: token.content.encode()
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        decoder = tokenizer.decoder
        kinds = set() if decoder is None else set(_kinds(json.loads(decoder.__getstate__())))
        self._byte_of = byte_alphabet() if "ByteLevel" in kinds else {}

    def __call__(self, token_id: int) -> bytes:
        added = self._added.get(token_id)
        if added is not None:
            return added
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_of:
            return alphabet_bytes(token, self._byte_of)
        match = _BYTE_TOKEN.fullmatch(token)
        if match:
            return bytes.fromhex(match[1])
        return token.replace(_SPACE_MARK, " ").encode()


def _kinds(decoder: dict[str, Any]) -> Iterator[str]:
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _kinds(part)


def alphabet_bytes(token: str, byte_of: Mapping[str, int]) -> bytes:
    """As the tokenizers library decodes it: a token outside the alphabet stands for itself."""
    try:
        return bytes(byte_of[character] for character in token)
    except KeyError:
        return token.encode()


def byte_alphabet() -> dict[str, int]:
    """GPT-2's table: printable bytes stand for themselves, the others for characters from U+0100
    on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(0x100) if byte not in printable)
    alphabet |= {chr(0x100 + index): byte for index, byte in enumerate(others)}
    return alphabet
