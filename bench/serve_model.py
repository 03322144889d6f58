"""The random Llama of 246 million parameters with a tokenizer that has text for every token.

A server tells its clients nothing about a token that has no text, so gaps between the others
would count for gaps between tokens.
"""

from __future__ import annotations

import itertools
import json
import os
import string
from pathlib import Path

from bench.random_model import WEIGHTS, made_once
from bench.small_model import NAME, small_model

_NUM_ASCII = 128


def model_of_words() -> Path:
    """Its folder, beside the other models; made if it is not there yet."""
    source = small_model()
    return made_once(source.with_name(f"{NAME}-words"), lambda folder: _write(folder, source))


def _write(folder: Path, source: Path) -> None:
    os.link(source / WEIGHTS, folder / WEIGHTS)
    config = (source / "config.json").read_text()
    (folder / "config.json").write_text(config)
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"] = vocabulary(json.loads(config)["vocab_size"])
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def vocabulary(size: int) -> dict[str, int]:
    """ASCII, a character a token, so that any English text is a prompt; above it four letters a
    token. Other bytes are left out: a part of a character is no text before its rest has come."""
    ascii_tokens = (_byte_token(byte) for byte in range(_NUM_ASCII))
    words = map("".join, itertools.product(string.ascii_lowercase, repeat=4))
    tokens = itertools.chain(ascii_tokens, words)
    return {token: index for index, token in enumerate(itertools.islice(tokens, size))}


def _byte_token(byte: int) -> str:
    """How tokenizers of bytes write one: printable ones as they are, others from U+0100 on."""
    is_printable = 0x21 <= byte <= 0x7E
    return chr(byte) if is_printable else chr(0x100 + _unprintable_rank(byte))


def _unprintable_rank(byte: int) -> int:
    return byte if byte <= 0x20 else byte - 0x7F + 0x21
