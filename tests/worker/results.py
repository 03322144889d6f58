"""What a stand-in for the router learns of the attempts that it sends."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from baton.v1 import types_pb2, worker_pb2
from core.errors import BatonError, HandOffGivenUp, from_detail


@dataclass
class Result:
    """What a router learns of one choice of an attempt.

    Both workers speak of it, each on a stream of its own: which of them is heard first is chance.
    """

    is_handed_off: bool = False
    """Prefill's first token, with what was cached of the prompt, belongs to what it waits for."""
    tokens: dict[int, int] = field(default_factory=dict)
    logprobs: dict[int, types_pb2.TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: list[types_pb2.TokenLogprobs] = field(default_factory=list)
    finish_reason: types_pb2.FinishReason.ValueType = types_pb2.FINISH_REASON_UNSPECIFIED
    error: BatonError | None = None
    """The first one; one that refers to what the other worker says counts until that is here."""
    cached_tokens: int = 0
    transferred_blocks: int = 0
    was_preempted: bool = False
    is_accepted: bool = False
    prefill_has_spoken: bool = False
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    """Decode takes the dispatch, or `error` says why not."""
    first_token: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """Nothing more is to come; a worker that gave up for the other's sake ends nothing."""

    @property
    def output(self) -> list[int]:
        first = min(self.tokens, default=0)
        assert sorted(self.tokens) == list(range(first, first + len(self.tokens)))
        return [self.tokens[index] for index in sorted(self.tokens)]

    def note_accepted(self) -> None:
        self.is_accepted = True
        self.answered.set()

    def note_error(self, detail: types_pb2.ErrorDetail) -> None:
        error = from_detail(detail)
        if self.error is None or isinstance(self.error, HandOffGivenUp):
            self.error = error
        self.answered.set()
        if not isinstance(error, HandOffGivenUp):
            self.ended.set()

    def note_token(self, index: int, token_id: int) -> None:
        """One of decode's that says nothing else."""
        assert index - 1 in self.tokens, "an output has spoken of it before"
        assert self.tokens.setdefault(index, token_id) == token_id

    def note_output(self, output: worker_pb2.SequenceOutput, is_prefill: bool) -> None:
        # Of prefill nothing comes before a prompt's own log-probabilities.
        assert not (output.prompt_logprobs and self.prefill_has_spoken)
        self.prompt_logprobs += output.prompt_logprobs
        for offset, token in enumerate(output.token_ids):
            index = output.output_index + offset
            assert self.tokens.setdefault(index, token) == token
            self.first_token.set()
            self.prefill_has_spoken |= is_prefill
            if output.logprobs:
                self.logprobs[index] = output.logprobs[offset]
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        self.transferred_blocks = max(self.transferred_blocks, output.transferred_blocks)
        self.finish_reason = output.finish_reason or self.finish_reason
        self.was_preempted |= output.preempted
        is_complete = self.prefill_has_spoken or not self.is_handed_off
        if self.was_preempted or (self.finish_reason and is_complete):
            self.ended.set()
