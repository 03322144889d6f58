"""Runs a job and writes its reply: events as they come, or one object at the end."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import ExitStack

from core.tasks import together
from router.follower import READ_GRACE_S, Follower
from router.http.call import Call
from router.http.errors import ClientLeft, to_http
from router.http.formats import DONE, Format, event
from router.http.jobs import Job
from router.outputs import Chunk
from router.requests import Part, RequestTable, parts_of


async def answer(call: Call, job: Job, form: Format, table: RequestTable, timeout_s: float) -> None:
    """Raises what goes wrong before anything is sent; later it becomes the last event.

    Leaving this, as soon as the client is gone, cancels the requests.
    """
    deadline = asyncio.get_running_loop().time() + timeout_s
    parts: Sequence[Part | None] = [None] * len(job.requests)
    if len(job.requests) > 1 and call.is_named:
        parts = parts_of(call.request_id, job.requests)
    with ExitStack() as following:
        followers = [
            following.enter_context(
                table.follow(
                    request,
                    deadline,
                    tenant=call.tenant,
                    is_named=call.is_named,
                    trace=call.trace,
                    part=part,
                )
            )
            for request, part in zip(job.requests, parts, strict=True)
        ]
        try:
            # A client that has not read by then counts as one that has left.
            async with asyncio.timeout_at(deadline + READ_GRACE_S):
                await _reply(call, job, form, followers)
        except TimeoutError:
            raise ClientLeft from None


async def _reply(call: Call, job: Job, form: Format, followers: Sequence[Follower]) -> None:
    if job.is_stream:
        stream = _Stream(call, job, form, followers)
        with call.while_connected():
            last = await stream.write()
        await stream.send(last, is_last=True)
    else:
        with call.while_connected():
            prompts = await together([_whole(follower) for follower in followers])
        await call.reply(200, form.answer(prompts, [follower.log for follower in followers]))


class _Stream:
    """The events of one reply, of all its prompts as they come."""

    def __init__(self, call: Call, job: Job, form: Format, followers: Sequence[Follower]) -> None:
        self._call = call
        self._job = job
        self._form = form
        self._followers = followers
        self._is_started = False
        self._start_lock = asyncio.Lock()

    async def write(self) -> bytes:
        """Sends everything but the last events, which it returns."""
        pumps = [self._pump(prompt, follower) for prompt, follower in enumerate(self._followers)]
        try:
            last = b"".join(await together(pumps))
        except Exception as error:
            if not self._is_started:
                raise
            return event(to_http(error, self._job.names, self._call.request_id).body)
        if not self._job.includes_usage:
            return last + DONE
        outcomes = [item.log.outcome for item in self._followers if item.log.outcome is not None]
        return last + self._form.usage_event(outcomes) + DONE

    async def send(self, data: bytes, *, is_last: bool = False) -> None:
        """Headers wait for the first event: until then a failure has a status of its own."""
        if not self._is_started:
            async with self._start_lock:
                if not self._is_started:
                    await self._call.start_events(data, is_last=is_last)
                    self._is_started = True
                    return
        await self._call.send_event(data, is_last=is_last)

    async def _pump(self, prompt: int, follower: Follower) -> bytes:
        """Sends the events of one prompt. The last one of a lone prompt is returned instead."""
        while (chunk := await follower.next()) is not None:
            data = self._form.chunk_event(prompt, chunk, follower.log)
            if not data:
                continue
            if follower.is_at_end and len(self._followers) == 1:
                return data
            await self.send(data)
            if not chunk.finish_reason and not self._job.wants_logprobs:
                text_event = self._form.text_event(prompt, chunk.choice)
                await follower.push_text(self._call.text_lane(text_event))
        return b""


async def _whole(follower: Follower) -> list[Chunk]:
    """One chunk for each choice, with everything in it."""
    parts: list[list[Chunk]] = [[] for _ in follower.log.choices]
    while (chunk := await follower.next()) is not None:
        parts[chunk.choice].append(chunk)
    return [_merged(chunks) for chunks in parts]


def _merged(chunks: Sequence[Chunk]) -> Chunk:
    return Chunk(
        choice=chunks[0].choice,
        output_index=0,
        token_ids=[token_id for chunk in chunks for token_id in chunk.token_ids],
        text="".join(chunk.text for chunk in chunks),
        logprobs=[entry for chunk in chunks for entry in chunk.logprobs],
        finish_reason=chunks[-1].finish_reason,
    )
