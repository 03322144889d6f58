"""Text to tokens and back for callers who count: off the event loop, within a prompt's limits."""

from __future__ import annotations

import asyncio

from router.generation import Generation
from router.http.jobs import chat_messages, check_model
from router.http.parameters import DetokenizeBody, TokenizeBody
from router.validate import check_prompt_length, check_token_ids


async def tokenized(body: TokenizeBody, shared: Generation) -> dict[str, object]:
    """The tokens of a prompt or chat. Raises HttpError, InvalidArgument."""
    limits, tokenizer = shared.current_limits(), shared.tokenizer
    check_model(body.model, limits)
    if body.prompt is not None:
        field = "prompt"
        tokens = await tokenizer.encode_prompt(
            body.prompt, limits.max_model_len, add_special_tokens=body.add_special_tokens
        )
    else:
        field = "messages"
        messages = await asyncio.to_thread(chat_messages, body.messages)
        tokens = await tokenizer.encode_chat(messages, limits.max_model_len)
    check_prompt_length(field, len(tokens), limits.max_model_len)
    return {"tokens": tokens, "count": len(tokens), "max_model_len": limits.max_model_len}


async def detokenized(body: DetokenizeBody, shared: Generation) -> dict[str, object]:
    """The text of tokens. Raises HttpError, InvalidArgument."""
    limits = shared.current_limits()
    check_model(body.model, limits)
    check_prompt_length("tokens", len(body.tokens), limits.max_model_len)

    def decode() -> str:
        check_token_ids("tokens", body.tokens, limits.vocab_size)
        return shared.tokenizer.decode(body.tokens)

    return {"prompt": await asyncio.to_thread(decode)}
