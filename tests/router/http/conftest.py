"""A router with fake workers, and OpenAI's own client to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx2
import openai
import pytest

from tests.router.stack import PATIENCE_S, Stack, stack


@dataclass
class HttpStack:
    """`openai` retries nothing; `http` sends what is no OpenAI request."""

    stack: Stack
    openai: openai.AsyncOpenAI
    http: httpx2.AsyncClient

    async def complete(self, prompt="Where?", **parameters):
        """One completion."""
        return await self.openai.completions.create(
            model="tiny", prompt=prompt, **({"max_tokens": 40} | parameters)
        )

    async def chat(self, content="Where?", **parameters):
        """One chat completion for a user's message."""
        messages = [{"role": "user", "content": content}]
        return await self.openai.chat.completions.create(
            model="tiny", messages=messages, **parameters
        )


@pytest.fixture
def serve(tmp_path, redis_server):
    """`async with serve(...) as s`: an HttpStack on the test's Redis."""

    @asynccontextmanager
    async def serving(api_key="none", **options) -> AsyncIterator[HttpStack]:
        async with (
            stack(tmp_path / "tiny", redis_server.url, **options) as running,
            openai.AsyncOpenAI(
                base_url=f"{running.http_url}/v1", api_key=api_key, max_retries=0
            ) as client,
            httpx2.AsyncClient(base_url=running.http_url, timeout=PATIENCE_S) as http,
        ):
            yield HttpStack(running, client, http)

    return serving
