"""What two pods must share before KV passes between them, and the hash scope made of it."""

from __future__ import annotations

from baton.v1 import types_pb2
from core.hashing import scope_hash

_FIELDS = ("model", "dtype", "layout", "block_size", "block_bytes", "hash_seed", "kv_transport")


def mismatches(own: types_pb2.Fingerprint, peer: types_pb2.Fingerprint) -> list[str]:
    """One line for each field that differs, with both values; empty when KV may pass."""
    return [
        f"{name}: own {getattr(own, name)!r}, peer {getattr(peer, name)!r}"
        for name in _FIELDS
        if getattr(own, name) != getattr(peer, name)
    ]


def hash_scope(fingerprint: types_pb2.Fingerprint, salt: str = "") -> bytes:
    """Seed of the block hash chain of a deployment and, with `salt`, of one tenant."""
    return scope_hash(
        fingerprint.hash_seed,
        fingerprint.model,
        fingerprint.dtype,
        fingerprint.layout,
        str(fingerprint.block_size),
        salt,
    )
