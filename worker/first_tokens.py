"""The first token of each of a request's choices, all from one computation of the prompt."""

from __future__ import annotations

from dataclasses import dataclass

from baton.v1 import worker_pb2
from core.sampling import SamplingParams
from engine.batch import Logprobs, SampledToken, SequenceUpdate
from engine.finish import finish_reason_at
from engine.sequence import FinishReason, Sequence
from worker.convert import logprobs_to_proto, token_output

PROMPT_TOKENS_PER_OUTPUT = 512
"""With 20 log-probabilities each an output has some 150 kB, which is parsed in a millisecond."""


@dataclass(frozen=True)
class FirstToken:
    """The first token of one choice; with a reason, its only one."""

    choice: int
    token: SampledToken
    finish_reason: FinishReason | None


def first_tokens(
    update: SequenceUpdate, sampling: SamplingParams, max_model_len: int
) -> tuple[FirstToken, ...]:
    """Those that a step brought, by choice; none when it ended inside the prompt.

    `sampling` has the limits that the client gave.
    """
    if update.token is None:
        return ()
    num_outputs = update.output_index + 1
    num_left = max_model_len - len(update.sequence.prompt_token_ids) - num_outputs
    return tuple(
        FirstToken(
            choice,
            token,
            finish_reason_at(token.token_id, num_outputs, num_left, sampling),
        )
        for choice, token in enumerate((update.token, *update.siblings))
    )


def first_outputs(
    sequence: Sequence, firsts: tuple[FirstToken, ...]
) -> list[worker_pb2.SequenceOutput]:
    """What the router is told by the worker that computed the prompt of `sequence`."""
    outputs = []
    for first in firsts:
        output = token_output(
            sequence, first.token, sequence.num_prior_outputs, first.finish_reason
        )
        output.choice = first.choice
        output.cached_tokens = sequence.num_cached_tokens
        outputs.append(output)
    return outputs


def prompt_outputs(sequence: Sequence, logprobs: list[Logprobs]) -> list[worker_pb2.SequenceOutput]:
    """The prompt's own log-probabilities, in order; the first tokens come after them."""
    return [
        worker_pb2.SequenceOutput(
            request_id=sequence.request_id,
            attempt=sequence.attempt,
            output_index=sequence.num_prior_outputs,
            prompt_logprobs=[
                logprobs_to_proto(item)
                for item in logprobs[first : first + PROMPT_TOKENS_PER_OUTPUT]
            ],
        )
        for first in range(0, len(logprobs), PROMPT_TOKENS_PER_OUTPUT)
    ]
