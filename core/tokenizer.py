"""Text to token ids and back, from a model folder, without transformers.

`Tokenizer` encodes prompts and chats; its detokenizers (core/detokenizer.py) turn one output's
tokens into text as they come; `StopMatcher` finds stop strings in that text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import tokenizers

from core.chat_template import ChatTemplate, Message
from core.detokenizer import Detokenizer, detokenizers
from core.errors import InvalidArgument, StartupError
from core.model_folder import ModelFolder
from core.text_parts import cut, may_cut, text_frame
from core.token_bytes import TokenBytes

# Below this, encoding takes less time than the trip to a thread is worth.
_INLINE_CHARS = 2000
_INLINE_MESSAGES = 128
"""Rendered in a third of a millisecond."""
_PROBE_CHARS_PER_TOKEN = 16
_PART_CHARS = 4096
"""Of a long text, encoded in a thread of the library's: about half a millisecond."""


class Tokenizer:
    """The tokenizer and chat template of a model folder. Raises StartupError."""

    def __init__(self, folder: ModelFolder) -> None:
        self._tokenizer = _load_tokenizer(folder.path / "tokenizer.json")
        self._template = ChatTemplate.load(folder.path)
        self.token_bytes = TokenBytes(self._tokenizer)
        """The bytes that a token stands for."""
        self.detokenizer: Callable[[], Detokenizer] = detokenizers(self._tokenizer)
        """Makes one for an output."""
        self._frame = text_frame(self._tokenizer) if may_cut(self._tokenizer) else None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; with special tokens as the folder asks for them."""
        if self._frame is None or len(text) <= _PART_CHARS:
            return self._encode([text], add_special_tokens=add_special_tokens)[0].ids
        # Parts take less time than the whole, even one after the other.
        parts = self._encode(cut(text, _PART_CHARS), add_special_tokens=False)
        token_ids = [token_id for part in parts for token_id in part.ids]
        if not add_special_tokens:
            return token_ids
        before, after = self._frame
        return [*before, *token_ids, *after]

    def _encode(self, texts: list[str], *, add_special_tokens: bool) -> list[tokenizers.Encoding]:
        # The batch call, unlike `encode`, releases the GIL and skips offsets.
        return self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special_tokens)

    async def encode_prompt(
        self, text: str, max_tokens: int, *, add_special_tokens: bool = True
    ) -> list[int]:
        """Token ids of a completion prompt, in a thread when `text` is long.

        Of a text that has far more than `max_tokens` tokens only a beginning is encoded, which
        alone has more than `max_tokens`: a text that is refused anyway costs little.
        """
        return await self._encode_bounded(text, max_tokens, add_special_tokens=add_special_tokens)

    async def encode_chat(self, messages: Sequence[Message], max_tokens: int) -> list[int]:
        """Token ids of a chat, ready for the assistant's turn; `max_tokens` as above.

        Raises InvalidArgument as `render_chat` does.
        """
        if len(messages) <= _INLINE_MESSAGES:
            text = self.render_chat(messages)
        else:
            text = await asyncio.to_thread(self.render_chat, messages)
        # The template writes special tokens itself.
        return await self._encode_bounded(text, max_tokens, add_special_tokens=False)

    def render_chat(self, messages: Sequence[Message]) -> str:
        """The prompt that the chat template makes of `messages`.

        Raises InvalidArgument when the model has no template or the template refuses.
        """
        if self._template is None:
            raise InvalidArgument("messages: this model has no chat template", field="messages")
        return self._template.render(messages)

    async def _encode_bounded(
        self, text: str, max_tokens: int, *, add_special_tokens: bool
    ) -> list[int]:
        if len(text) <= _INLINE_CHARS:
            return self.encode(text, add_special_tokens=add_special_tokens)
        num_chars = _PROBE_CHARS_PER_TOKEN * max_tokens
        while num_chars < len(text):
            token_ids = await asyncio.to_thread(self.encode, text[:num_chars])
            # Where the text is cut a few tokens may differ, never half of them.
            if len(token_ids) > 2 * max_tokens:
                return token_ids
            num_chars *= 2
        return await asyncio.to_thread(self.encode, text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of `token_ids`, which must be in the vocabulary."""
        # The batch call, unlike `decode`, releases the GIL.
        batch = [list(token_ids)]
        return self._tokenizer.decode_batch(batch, skip_special_tokens=skip_special_tokens)[0]


class StopMatcher:
    """Finds stop strings in streamed text and holds back what may become one."""

    def __init__(self, stops: Iterable[str]) -> None:
        self._stops = tuple(stops)
        self._prefixes = {stop[:end] for stop in self._stops for end in range(1, len(stop))}
        self._max_held = max((len(stop) - 1 for stop in self._stops), default=0)
        self._held = ""
        self.is_stopped = False

    def add(self, text: str) -> str:
        """Text that is safe to show. Sets `is_stopped` at the first stop string in the text.

        The stop string and what follows it are dropped.
        """
        if not self._stops or self.is_stopped:
            return "" if self.is_stopped else text
        text = self._held + text
        found = [position for stop in self._stops if (position := text.find(stop)) >= 0]
        if found:
            self.is_stopped = True
            self._held = ""
            return text[: min(found)]
        num_held = self._num_held(text)
        safe, self._held = text[: len(text) - num_held], text[len(text) - num_held :]
        return safe

    def flush(self) -> str:
        """What was held back, when no more text will come."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        for length in range(min(self._max_held, len(text)), 0, -1):
            if text[-length:] in self._prefixes:
                return length
        return 0


def _load_tokenizer(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise StartupError(f"{path} does not exist; the model folder needs a fast tokenizer")
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise StartupError(f"{path} cannot be read: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
