"""Tokens of one choice, however often workers repeat them, to text in the output log."""

from __future__ import annotations

from collections.abc import Callable

from baton.v1 import types_pb2, worker_pb2
from core.detokenizer import Detokenizer, nothing
from core.errors import InternalError
from core.tokenizer import StopMatcher
from router.outputs import ChoiceLog


class OutputText:
    """Orders, removes duplicates, detokenizes and applies stop strings.

    It lives as long as the choice, across attempts. Stop strings do not count before
    `min_tokens` tokens are out.
    """

    __slots__ = (
        "_detokenizer",
        "_has_stop",
        "_log",
        "_matcher",
        "_min_tokens",
        "is_stopped",
    )

    def __init__(
        self, log: ChoiceLog, detokenizer: Detokenizer, stop: tuple[str, ...], min_tokens: int
    ) -> None:
        self._log = log
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop)
        self._min_tokens = min_tokens
        self._has_stop = bool(stop)
        self.is_stopped = False
        """Whether a stop string has ended the text."""

    @property
    def text_of(self) -> Callable[[int], str]:
        """The text that a further token completes, less what may become a stop string."""
        return self._matched if self._has_stop else self._detokenizer.add

    @property
    def look(self) -> Callable[[int], str | None]:
        """The text of a token that needs nothing else, None for others: see Detokenizer.look.

        It holds until the next token for which it is None.
        """
        return nothing if self._has_stop else self._detokenizer.look

    def add(self, output: worker_pb2.SequenceOutput) -> bool:
        """Appends what is new in `output`. True when a stop string ends the request.

        Raises InternalError when tokens before `output` are missing: each worker sends its
        tokens in order and decode begins with prefill's, so that is a worker's fault.
        """
        log = self._log
        token_ids = output.token_ids
        num_known = self.num_known(output.output_index)
        ends_by_token = output.finish_reason == types_pb2.FINISH_REASON_STOP
        last = len(token_ids) - 1
        logprobs = output.logprobs
        for position in range(num_known, last + 1):
            token_id = token_ids[position]
            # The token that ends the text is not part of it.
            text = "" if ends_by_token and position == last else self.text_of(token_id)
            log.append(
                token_id,
                text,
                logprobs[position] if logprobs else None,
                is_last=bool(output.finish_reason),
            )
            if self.is_stopped:
                return True
        return False

    def num_known(self, output_index: int) -> int:
        """How many tokens from `output_index` on are here already. Raises InternalError when
        tokens before it are missing."""
        num_known = len(self._log.token_ids) - output_index
        if num_known < 0:
            raise InternalError(
                f"output begins at token {output_index}; the next is {output_index + num_known}"
            )
        return num_known

    def flush(self) -> str:
        """The text held back, once no more tokens will come; empty after a stop string."""
        return self._matcher.add(self._detokenizer.flush()) + self._matcher.flush()

    def _matched(self, token_id: int) -> str:
        text = self._detokenizer.add(token_id)
        if len(self._log.token_ids) + 1 < self._min_tokens:
            return text
        text = self._matcher.add(text)
        self.is_stopped = self._matcher.is_stopped
        return text
