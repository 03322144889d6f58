"""Between protobuf and the engine's types."""

from __future__ import annotations

from baton.v1 import types_pb2, worker_pb2
from core.errors import InvalidArgument
from core.fingerprint import hash_scope
from core.sampling import SamplingParams, choice_seed
from engine.batch import Logprobs, SampledToken
from engine.block_pool import BlockStats
from engine.sequence import FinishReason, Sequence

_FINISH = {
    None: types_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
}


def finish_to_proto(reason: FinishReason | None) -> types_pb2.FinishReason.ValueType:
    """None is "not finished"."""
    return _FINISH[reason]


def logprobs_to_proto(logprobs: Logprobs) -> types_pb2.TokenLogprobs:
    """One token's, for a message."""
    return types_pb2.TokenLogprobs(
        logprob=logprobs.chosen,
        top=[types_pb2.TokenLogprob(token_id=t, logprob=p) for t, p in logprobs.top],
    )


def token_output(
    sequence: Sequence, token: SampledToken, output_index: int, reason: FinishReason | None
) -> worker_pb2.SequenceOutput:
    """One new token of `sequence` for its router."""
    return worker_pb2.SequenceOutput(
        request_id=sequence.request_id,
        attempt=sequence.attempt,
        choice=sequence.choice,
        output_index=output_index,
        token_ids=[token.token_id],
        logprobs=[logprobs_to_proto(token.logprobs)] if token.logprobs is not None else [],
        finish_reason=finish_to_proto(reason),
    )


def stats_to_proto(stats: BlockStats) -> types_pb2.BlockStats:
    """The pool's counts as load reports carry them."""
    return types_pb2.BlockStats(
        total=stats.total,
        free=stats.free,
        cached=stats.cached,
        referenced=stats.referenced,
        quarantined=stats.quarantined,
    )


def sequence_from_dispatch(
    dispatch: worker_pb2.Dispatch, fingerprint: types_pb2.Fingerprint, max_model_len: int
) -> Sequence:
    """The engine's view of a dispatch, without blocks.

    Raises InvalidArgument when it is empty, leaves no room for one more token, or wants
    several choices to go on from outputs.
    """
    num_tokens = len(dispatch.prompt_token_ids) + len(dispatch.output_token_ids)
    if not dispatch.prompt_token_ids:
        raise InvalidArgument("the prompt has no tokens", field="prompt_token_ids")
    if num_tokens >= max_model_len:
        raise InvalidArgument(
            f"{num_tokens} tokens leave no room for an answer in the {max_model_len} tokens "
            "that this worker can hold",
            field="prompt_token_ids",
        )
    if dispatch.n > 1 and dispatch.output_token_ids:
        raise InvalidArgument(
            f"{dispatch.n} choices cannot go on from the same {len(dispatch.output_token_ids)} "
            "output tokens",
            field="n",
        )
    return Sequence(
        request_id=dispatch.request_id,
        attempt=dispatch.attempt,
        prompt_token_ids=list(dispatch.prompt_token_ids),
        output_token_ids=list(dispatch.output_token_ids),
        num_prior_outputs=len(dispatch.output_token_ids),
        sampling=SamplingParams.from_proto(dispatch.sampling, tuple(dispatch.eos_token_ids)),
        scope=hash_scope(fingerprint, dispatch.hash_salt),
    )


def prompt_from_dispatch(
    dispatch: worker_pb2.Dispatch, fingerprint: types_pb2.Fingerprint, max_model_len: int
) -> Sequence:
    """A sequence that computes a dispatch's prompt for all choices, with their first tokens.

    Raises InvalidArgument as `sequence_from_dispatch` does.
    """
    sequence = sequence_from_dispatch(dispatch, fingerprint, max_model_len)
    seed = sequence.sampling.seed
    sequence.sibling_seeds = tuple(choice_seed(seed, choice) for choice in range(1, dispatch.n))
    if dispatch.HasField("prompt_logprobs"):
        sequence.num_prompt_logprobs = dispatch.prompt_logprobs
    return sequence
