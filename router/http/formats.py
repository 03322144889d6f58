"""Chunks of output as the JSON of OpenAI's completions and chat completions.

A token of a running stream is one escaped string between two prepared byte strings; all else
is made as a dict and dumped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import orjson

from baton.v1 import types_pb2
from core.tokenizer import Tokenizer
from router.http.jobs import Job
from router.http.parameters import Prompt
from router.http.token_logprobs import CompletionLogprobs, chat_logprobs, joined
from router.outputs import Chunk, Outcome, OutputLog

DONE = b"data: [DONE]\n\n"

_MARK = "\x00text\x00"
_FINISH_REASONS = {
    types_pb2.FINISH_REASON_UNSPECIFIED: None,
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True)
class Reply:
    """What every object of one reply repeats. `created` is in unix seconds."""

    request_id: str
    created: int
    model: str


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + orjson.dumps(value) + b"\n\n"


def usage_object(job: Job, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The usage of all prompts together."""
    num_prompt = sum(outcome.usage.prompt_tokens for outcome in outcomes)
    num_output = sum(outcome.usage.completion_tokens for outcome in outcomes)
    if job.drops_output:
        num_output = 0
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {
            "cached_tokens": sum(outcome.route.cached_tokens for outcome in outcomes)
        },
    }


class Format(ABC):
    """One reply. Choices are numbered prompt by prompt, `n` for each."""

    id_prefix: ClassVar[str]
    object_name: ClassVar[str]
    chunk_object_name: ClassVar[str]

    def __init__(self, job: Job, reply: Reply, tokenizer: Tokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._reply = reply
        self._begun: set[int] = set()
        """Choices of which something was sent."""

    def chunk_event(self, prompt: int, chunk: Chunk, log: OutputLog) -> bytes:
        """A stream's event for `chunk` of prompt number `prompt`; empty if it tells nothing."""
        index = prompt * self._job.n + chunk.choice
        is_first = index not in self._begun
        self._begun.add(index)
        says_nothing = not (is_first or chunk.finish_reason or chunk.text or chunk.logprobs)
        if says_nothing:
            return b""
        delta = self._delta(prompt, self._shown(chunk), log, is_first=is_first)
        return event(self._chunk_object([{"index": index, **delta}]))

    def text_event(self, prompt: int, choice: int) -> tuple[bytes, bytes]:
        """What stands before and after the escaped text in an event that brings only text.

        Nearly all events are of this kind, and need no more than this.
        """
        delta = self._text_delta(_MARK)
        data = event(self._chunk_object([{"index": prompt * self._job.n + choice, **delta}]))
        before, after = data.split(orjson.dumps(_MARK))
        return before, after

    def usage_event(self, outcomes: Sequence[Outcome]) -> bytes:
        """The last event of a stream that includes the usage."""
        return event(self._chunk_object([]) | {"usage": usage_object(self._job, outcomes)})

    def answer(self, prompts: Sequence[Sequence[Chunk]], logs: Sequence[OutputLog]) -> bytes:
        """The whole reply; `prompts` has one chunk for each choice of each prompt."""
        choices = []
        for prompt, (chunks, log) in enumerate(zip(prompts, logs, strict=True)):
            for chunk in chunks:
                index = prompt * self._job.n + chunk.choice
                choices.append({"index": index, **self._whole(prompt, self._shown(chunk), log)})
        outcomes = [log.outcome for log in logs if log.outcome is not None]
        head = self._head(self.object_name)
        return orjson.dumps(head | {"choices": choices, "usage": usage_object(self._job, outcomes)})

    @abstractmethod
    def _delta(
        self, prompt: int, chunk: Chunk, log: OutputLog, *, is_first: bool
    ) -> dict[str, Any]:
        """A choice in a stream, less its index: what `chunk` adds."""

    @abstractmethod
    def _whole(self, prompt: int, chunk: Chunk, log: OutputLog) -> dict[str, Any]:
        """A choice in an answer, less its index; `chunk` is all of it."""

    @abstractmethod
    def _text_delta(self, text: str) -> dict[str, Any]:
        """A choice in a stream to which `text` is added and nothing else."""

    def _shown(self, chunk: Chunk) -> Chunk:
        if self._job.drops_output:
            return chunk._replace(text="", token_ids=(), logprobs=())
        return chunk

    def _chunk_object(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = self._head(self.chunk_object_name) | {"choices": choices}
        return head | {"usage": None} if self._job.includes_usage else head

    def _head(self, object_name: str) -> dict[str, Any]:
        return {
            "id": self.id_prefix + self._reply.request_id,
            "object": object_name,
            "created": self._reply.created,
            "model": self._reply.model,
        }


class CompletionFormat(Format):
    """/v1/completions"""

    id_prefix = "cmpl-"
    object_name = chunk_object_name = "text_completion"

    def __init__(self, job: Job, reply: Reply, tokenizer: Tokenizer) -> None:
        super().__init__(job, reply, tokenizer)
        self._logprobs: dict[tuple[int, int], CompletionLogprobs] = {}

    def _delta(
        self, prompt: int, chunk: Chunk, log: OutputLog, *, is_first: bool
    ) -> dict[str, Any]:
        echoed = self._job.echoed if is_first else None
        text = None if echoed is None else self._prompt_text(echoed[prompt])
        return {
            "text": (text or "") + chunk.text,
            "logprobs": self._logprobs_of(prompt, chunk, log, text),
            "finish_reason": _FINISH_REASONS[chunk.finish_reason],
        }

    def _whole(self, prompt: int, chunk: Chunk, log: OutputLog) -> dict[str, Any]:
        return self._delta(prompt, chunk, log, is_first=True)

    def _text_delta(self, text: str) -> dict[str, Any]:
        return {"text": text, "logprobs": None, "finish_reason": None}

    def _logprobs_of(
        self, prompt: int, chunk: Chunk, log: OutputLog, echoed: str | None
    ) -> dict[str, list[Any]] | None:
        """Of `chunk`, and before it of the prompt if that is `echoed` now."""
        if not self._job.wants_logprobs:
            return None
        key = (prompt, chunk.choice)
        writer = self._logprobs.get(key)
        if writer is None:
            writer = self._logprobs[key] = CompletionLogprobs(self._tokenizer)
        if echoed is None:
            return writer.output(chunk.token_ids, chunk.logprobs)
        token_ids = self._job.requests[prompt].token_ids.ids
        first = writer.prompt(echoed, token_ids, log.prompt_logprobs)
        return joined(first, writer.output(chunk.token_ids, chunk.logprobs))

    def _prompt_text(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        return self._tokenizer.decode(prompt, skip_special_tokens=True)


class ChatFormat(Format):
    """/v1/chat/completions"""

    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"

    def _delta(
        self, prompt: int, chunk: Chunk, log: OutputLog, *, is_first: bool
    ) -> dict[str, Any]:
        delta = {"role": "assistant"} if is_first else {}
        if chunk.text or is_first:
            delta["content"] = chunk.text
        return {"delta": delta, **self._common(chunk)}

    def _whole(self, prompt: int, chunk: Chunk, log: OutputLog) -> dict[str, Any]:
        message = {"role": "assistant", "content": chunk.text, "refusal": None}
        return {"message": message, **self._common(chunk)}

    def _text_delta(self, text: str) -> dict[str, Any]:
        return {"delta": {"content": text}, "logprobs": None, "finish_reason": None}

    def _common(self, chunk: Chunk) -> dict[str, Any]:
        logprobs = None
        if self._job.wants_logprobs:
            logprobs = chat_logprobs(chunk.token_ids, chunk.logprobs, self._tokenizer)
        return {"logprobs": logprobs, "finish_reason": _FINISH_REASONS[chunk.finish_reason]}
