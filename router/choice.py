"""One of a request's n answers: what workers say of it, across attempts, to its end."""

from __future__ import annotations

from collections.abc import Sequence

from baton.v1 import types_pb2, worker_pb2
from core.tokenizer import Detokenizer
from router.output_text import OutputText
from router.outputs import OutputLog
from router.validate import ResolvedRequest


class Choice:
    """Takes outputs in until it is finished. `index` counts from 0 in its request."""

    def __init__(
        self, index: int, log: OutputLog, detokenizer: Detokenizer, resolved: ResolvedRequest
    ) -> None:
        self.index = index
        self._request_log = log
        self._log = log.choices[index]
        self._text = OutputText(self._log, detokenizer, resolved.stop, resolved.sampling.min_tokens)

    @property
    def token_ids(self) -> list[int]:
        """Its output tokens so far."""
        return self._log.token_ids

    @property
    def is_finished(self) -> bool:
        return self._log.is_finished

    def receive_prompt(self, logprobs: Sequence[types_pb2.TokenLogprobs]) -> None:
        """Takes in the prompt's log-probabilities, all of them, before any output."""
        self._request_log.prompt_logprobs = logprobs

    def receive(self, output: worker_pb2.SequenceOutput) -> None:
        """Takes tokens in; with a finish reason, or at a stop string, it is finished.

        Raises InternalError when tokens are missing before these.
        """
        if self._text.add(output):
            self._log.finish(types_pb2.FINISH_REASON_STOP)
        elif output.finish_reason:
            self._log.finish(output.finish_reason, self._text.flush())
