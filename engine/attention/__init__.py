"""Paged attention: `base` is the contract, `reference` the specification, `gather` the fast way."""

from engine.attention.base import AttentionBackend, SequenceChunk, StepAttention
from engine.attention.gather import GatherAttention
from engine.attention.reference import ReferenceAttention

__all__ = [
    "AttentionBackend",
    "GatherAttention",
    "ReferenceAttention",
    "SequenceChunk",
    "StepAttention",
]
