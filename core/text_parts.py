"""Where a long text may be cut, so that its parts have the tokens of the whole.

Byte-level BPE first splits a text into words by a pattern, and a token never crosses a word's
end. In the patterns below a space between two letters always begins a word: what matches a letter
matches letters alone behind it, and all that can match the space and the letter behind it begins
with that space. So a text may be cut there whatever stands around it.
"""

from __future__ import annotations

import json
import re
from typing import Any

import tokenizers

_CUT = re.compile(r"[A-Za-z](?= [A-Za-z])")
"""A cut is behind the first letter. Normal forms of Unicode leave it as it is."""
_LETTER_AND_SPACE = re.compile(r"\w\s")
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = frozenset(
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + _REST
    for digits in (r"\p{N}{1,3}", r"\p{N}")
)
"""Llama 3's and Qwen 2's; GPT-2's is the byte-level pre-tokenizer's own."""
_NORMAL_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})


def may_cut(tokenizer: tokenizers.Tokenizer) -> bool:
    """Whether `cut` leaves this tokenizer's tokens as they are."""
    return (
        isinstance(tokenizer.model, tokenizers.models.BPE)
        and _definition(tokenizer.normalizer).get("type", "NFC") in _NORMAL_FORMS
        and _splits_at_cuts(_definition(tokenizer.pre_tokenizer))
        and not any(map(_may_cross_cuts, tokenizer.get_added_tokens_decoder().values()))
    )


def text_frame(tokenizer: tokenizers.Tokenizer) -> tuple[list[int], list[int]] | None:
    """Special tokens before and after those of a text; None if they are elsewhere, too."""
    encoding = tokenizer.encode("a")
    mask, token_ids = encoding.special_tokens_mask, encoding.ids
    if 0 not in mask:
        return None
    start, end = mask.index(0), len(mask) - mask[::-1].index(0)
    return None if any(mask[start:end]) else (token_ids[:start], token_ids[end:])


def cut(text: str, num_chars: int) -> list[str]:
    """Parts of at least `num_chars` each but the last, cut where the next place is."""
    parts = []
    start = 0
    while place := _CUT.search(text, start + num_chars - 1):
        parts.append(text[start : place.end()])
        start = place.end()
    return [*parts, text[start:]]


def _definition(part: Any) -> dict[str, Any]:
    """Of a normalizer or pre-tokenizer, as the tokenizer's file has it; empty without one."""
    return {} if part is None else dict(json.loads(part.__getstate__()))


def _splits_at_cuts(pre_tokenizer: dict[str, Any]) -> bool:
    """Whether words end at cuts: steps that are known split the text before its bytes are
    written as letters."""
    *splits, last = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
    return (
        last.get("type") == "ByteLevel"
        and all(step["type"] == "Digits" or _is_known(step) for step in splits)
        and (last["use_regex"] or any(map(_is_known, splits)))
    )


def _is_known(step: dict[str, Any]) -> bool:
    return (
        step["type"] == "Split"
        and step["pattern"].get("Regex") in _PATTERNS
        and step["behavior"] == "Isolated"
        and not step["invert"]
    )


def _may_cross_cuts(token: tokenizers.AddedToken) -> bool:
    """Whether a token that is found before words are may reach over a cut."""
    return bool(token.rstrip or _LETTER_AND_SPACE.search(token.content))
