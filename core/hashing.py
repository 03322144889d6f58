"""Chained block hashes: the key of the prefix cache, equal in every process.

hash_i = SHA-256(hash_{i-1} ‖ tokens of block i)[:16], hash_{-1} = SHA-256(scope)[:16].
Equal hashes mean equal token history in the same scope, so a block found under its hash
can stand in for computing it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from functools import lru_cache

HASH_BYTES = 16


@lru_cache(maxsize=1024)
def scope_hash(*parts: str) -> bytes:
    """Seed of a chain. `parts`: what two prompts must share beside tokens (fingerprint, salt)."""
    digest = hashlib.sha256()
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "big"))
        digest.update(encoded)
    return digest.digest()[:HASH_BYTES]


def block_hashes(token_ids: Sequence[int], block_size: int, scope: bytes) -> list[bytes]:
    """One 16-byte hash for each *full* block of `token_ids`, in order."""
    num_blocks = len(token_ids) // block_size
    tokens = array("i", token_ids[: num_blocks * block_size]).tobytes()
    stride = 4 * block_size
    hashes: list[bytes] = []
    parent = scope
    for start in range(0, num_blocks * stride, stride):
        parent = hashlib.sha256(parent + tokens[start : start + stride]).digest()[:HASH_BYTES]
        hashes.append(parent)
    return hashes
