"""One of a request's n answers: what workers say of it, across attempts, to its end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.v1 import types_pb2, worker_pb2
from core.detokenizer import Detokenizer
from router.attach import TakeToken
from router.metrics import RouterMetrics
from router.output_text import OutputText
from router.outputs import OutputLog
from router.validate import ResolvedRequest


@dataclass(frozen=True)
class Pace:
    """Where the times between outputs are counted. `received_at` is in `time.monotonic`."""

    received_at: float
    metrics: RouterMetrics


class Choice:
    """Takes outputs in until it is finished. `index` counts from 0 in its request."""

    __slots__ = (
        "_gaps",
        "_last_output_at",
        "_log",
        "_look",
        "_may_stop",
        "_on_error",
        "_on_stopped",
        "_pace",
        "_request_log",
        "_text",
        "index",
    )

    def __init__(
        self,
        index: int,
        log: OutputLog,
        detokenizer: Detokenizer,
        resolved: ResolvedRequest,
        pace: Pace,
    ) -> None:
        self.index = index
        self._request_log = log
        self._log = log.choices[index]
        self._pace = pace
        self._last_output_at: float | None = None
        self._text = OutputText(self._log, detokenizer, resolved.stop, resolved.sampling.min_tokens)
        self._look = self._text.look
        self._may_stop = bool(resolved.stop)
        self._gaps = pace.metrics.itl.gaps
        self._on_stopped: Callable[[], None] = _nobody_asks
        self._on_error: Callable[[Exception], None] = _nobody_asks

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
        num_known = len(self.token_ids)
        is_stopped = self._text.add(output)
        self._look = self._text.look
        if len(self.token_ids) > num_known:
            self._count_time(time.monotonic())
        if is_stopped:
            self._log.finish(types_pb2.FINISH_REASON_STOP)
        elif output.finish_reason:
            self._log.finish(output.finish_reason, self._text.flush())

    def token_taker(
        self, on_stopped: Callable[[], None], on_error: Callable[[Exception], None]
    ) -> TakeToken:
        """What takes in single tokens that end nothing by themselves, as `receive` does.

        `on_stopped` is called when a stop string has finished the choice. To be given up with
        `leave_tokens`.
        """
        self._on_stopped, self._on_error = on_stopped, on_error
        return self._take

    def leave_tokens(self) -> None:
        """Who took a `token_taker` has no use for it any more, and is not held by it."""
        self._on_stopped = self._on_error = _nobody_asks

    def _take(self, output_index: int, token_id: int, now: float) -> None:
        """Runs for every token of every stream: what costs is each call, and far more all the
        memory that it touches, which is cold by the time of the next step."""
        try:
            log = self._log
            lane = log.lane
            if lane is not None and output_index == len(log.token_ids):
                text = self._look(token_id)
                if text:
                    log.push(lane, token_id, text)
                    last_at, self._last_output_at = self._last_output_at, now
                    if last_at is not None:
                        self._gaps[now - last_at] += 1
                    return
            self._take_any(output_index, token_id, now)
        except Exception as error:
            self._on_error(error)

    def _take_any(self, output_index: int, token_id: int, now: float) -> None:
        """`_take` for what may be known already, or has no text of its own, or a stop string."""
        log = self._log
        if self._text.num_known(output_index):
            return
        log.append(token_id, self._text.text_of(token_id))
        self._look = self._text.look
        self._count_time(now)
        if self._may_stop and self._text.is_stopped:
            log.finish(types_pb2.FINISH_REASON_STOP)
            self._on_stopped()

    def _count_time(self, now: float) -> None:
        if self._last_output_at is not None:
            self._gaps[now - self._last_output_at] += 1
        elif self.index == 0:
            self._pace.metrics.ttft.observe(now - self._pace.received_at)
        self._last_output_at = now


def _nobody_asks(_: object = None) -> None:
    """In the place of what an attempt wants to hear, when there is none."""
