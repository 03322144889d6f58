"""The limits that a scheduler keeps."""

from __future__ import annotations

from dataclasses import dataclass

from core.errors import StartupError


@dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Raises StartupError when the limits contradict each other.

    A prefill is *partial* in a step that leaves some of its tokens uncomputed; one that a
    step completes counts against the token budget only. A sequence is *long* while more
    than `long_prefill_token_threshold` of its tokens are uncomputed.
    """

    max_model_len: int
    """Most tokens of a sequence, prompt and outputs together."""
    max_num_seqs: int = 64
    """Most sequences in the batch, decoding or being prefilled."""
    max_num_batched_tokens: int = 2048
    """Most tokens computed in one step."""
    max_prefill_tokens_beside_decodes: int | None = None
    """Most tokens of prompts in a step that decodes too; None: as many as fit the step."""
    max_num_partial_prefills: int = 2
    """Most partial prefills at a time; each long one is sure of its share of the budget."""
    max_long_partial_prefills: int = 1
    """Most long sequences among them. Those beyond it wait, and shorter ones pass them."""
    long_prefill_token_threshold: int = 2048
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        for name in (
            "max_model_len",
            "max_num_seqs",
            "max_num_partial_prefills",
            "max_long_partial_prefills",
            "long_prefill_token_threshold",
        ):
            if getattr(self, name) < 1:
                raise StartupError(f"{name} is {getattr(self, name)}: it must be at least 1")
        beside = self.max_prefill_tokens_beside_decodes
        if beside is not None and beside < 1:
            raise StartupError(
                f"max_prefill_tokens_beside_decodes is {beside}: it must be at least 1"
            )
        # A step has room for every running decode, so none is stalled by the others.
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise StartupError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}: "
                f"it must be at least max_num_seqs ({self.max_num_seqs})"
            )
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise StartupError(
                f"max_long_partial_prefills is {self.max_long_partial_prefills}: it must be "
                f"at most max_num_partial_prefills ({self.max_num_partial_prefills})"
            )
