"""A request's choices: sequences that go on from one prompt, each by itself.

They begin together, with the blocks that the hand-off brought, and end one by one; with the
last of them the request is over.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Items
from dataclasses import replace

from baton.v1 import worker_pb2
from baton.v1.kv_transfer_pb2 import FirstToken
from core.errors import InvalidArgument
from core.logs import event
from core.sampling import choice_seed
from decode_svc.request import Request
from engine.fork import Branch, fork
from engine.sequence import Sequence
from kvtransfer.imports import Import
from worker.host import WorkerHost

logger = logging.getLogger(__name__)


def check_first_tokens(firsts: Items[FirstToken], num_choices: int) -> None:
    """Raises InvalidArgument unless they are of different choices, at least of one."""
    choices = [first.choice for first in firsts]
    if not choices or len(set(choices)) < len(choices):
        raise InvalidArgument(f"first tokens of choices {choices}", field="first_tokens")
    if min(choices) < 0 or max(choices) >= num_choices:
        raise InvalidArgument(
            f"first tokens of choices {choices}; the request has {num_choices}",
            field="first_tokens",
        )


class Choices:
    """Starts and ends the sequences of requests in the engine."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._pool = host.engine.pool

    def start(self, request: Request, blocks: Import, firsts: Items[FirstToken]) -> None:
        """The KV is here and right: from now on the choices own the blocks.

        Those that were aborted meanwhile do not begin.
        """
        request.is_committed = True
        self._host.counters.num_prefix_queries += request.prompt.num_tokens
        self._host.counters.num_prefix_hits += len(blocks.held) * self._pool.block_size
        wanted = [first for first in firsts if first.choice not in request.cancelled]
        if not wanted:
            self._pool.release([*blocks.spare, *reversed(blocks.block_table)])
            request.end()
            return
        num_tokens = request.prompt.num_tokens
        branches = fork(self._pool, blocks.block_table, num_tokens, blocks.spare, len(wanted))
        sequences = [
            _choice(request.prompt, first, branch)
            for first, branch in zip(wanted, branches, strict=True)
        ]
        request.running = {sequence.choice: sequence for sequence in sequences}
        for sequence, first in zip(sequences, wanted, strict=True):
            self._publish_first(request, first)
            if sequence.block_table:
                self._host.loop.add_computed(sequence)
            elif not self.give_back(request, sequence):
                self._host.loop.add(sequence)

    def _publish_first(self, request: Request, first: FirstToken) -> None:
        output = worker_pb2.SequenceOutput(
            request_id=request.key[0],
            attempt=request.key[1],
            choice=first.choice,
            output_index=request.prompt.num_prior_outputs,
            token_ids=[first.token_id],
            transferred_blocks=request.num_pulled,
        )
        if first.HasField("logprobs"):
            output.logprobs.append(first.logprobs)
        self._host.hub.publish(request.dispatch.router_id, output)

    def give_back(self, request: Request, sequence: Sequence) -> bool:
        """Sends a choice that has lost its blocks to the router, if it is a long one.

        False: it is short enough to be computed again here without stalling the batch.
        """
        if sequence.num_tokens <= self._host.settings.max_recompute_tokens:
            return False
        event(logger, logging.INFO, "preempted", request_id=sequence.request_id)
        self._host.loop.abort(sequence.key)
        self._publish_preempted(request, sequence.choice)
        request.end_choice(sequence.choice, "preempted")
        return True

    def give_all_back(self, request: Request) -> None:
        """Sends every choice that is not over to the router."""
        has_begun = request.is_committed or request.prefill is None
        for choice in list(request.running) if has_begun else range(request.num_choices):
            self._publish_preempted(request, choice)

    def _publish_preempted(self, request: Request, choice: int) -> None:
        self._host.counters.num_given_back += 1
        request_id, attempt = request.key
        output = worker_pb2.SequenceOutput(
            request_id=request_id, attempt=attempt, choice=choice, preempted=True
        )
        self._host.hub.publish(request.dispatch.router_id, output)

    def abort(self, request: Request, choice: int) -> None:
        """Ends one choice, also before it begins; nothing when there is no such one any more."""
        sequence = request.running.get(choice)
        if sequence is not None:
            self._host.loop.abort(sequence.key)
            request.end_choice(choice, "aborted")
        elif not request.is_committed and 0 <= choice < request.num_choices:
            request.cancelled.add(choice)

    def free(self, request: Request) -> None:
        """Ends all choices."""
        for sequence in request.running.values():
            self._host.loop.abort(sequence.key)


def _choice(prompt: Sequence, first: FirstToken, branch: Branch | None) -> Sequence:
    """A choice behind its first token. Without blocks it counts as preempted."""
    blocks = branch or Branch([])
    return replace(
        prompt,
        choice=first.choice,
        sampling=replace(prompt.sampling, seed=choice_seed(prompt.sampling.seed, first.choice)),
        output_token_ids=[*prompt.output_token_ids, first.token_id],
        block_hashes=list(prompt.block_hashes),
        block_table=blocks.block_table,
        copy_source=blocks.copy_source,
        num_computed_tokens=prompt.num_tokens if branch is not None else 0,
        num_preemptions=0 if branch is not None else 1,
    )
