"""Requests that ask for another protocol are answered in this one, as Java's client expects."""

import asyncio
import json

import pytest

BODY = b'{"prompt": "Where?", "max_tokens": 5}'
UPGRADE = b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAEAAEAAAAI\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"
WITH_LENGTH = b"content-length: %d\r\n" % len(BODY)
CHUNKED = b"transfer-encoding: chunked\r\n"
CHUNKS = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)


async def exchange(s, *parts):
    """Sends `parts` apart from each other; yields the body of one answer after the other."""
    host, port = s.stack.http_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(0.05)
        async with asyncio.timeout(60):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.split("content-length: ")[1].split("\r\n")[0])
                yield json.loads(await reader.readexactly(length))
    finally:
        writer.close()


@pytest.mark.parametrize(
    "parts",
    [
        (POST + UPGRADE + WITH_LENGTH + b"\r\n" + BODY,),
        (POST + UPGRADE + WITH_LENGTH, b"\r\n", BODY[:5], BODY[5:]),
        (POST + UPGRADE + CHUNKED + b"\r\n" + CHUNKS,),
        (POST + UPGRADE + CHUNKED + b"\r\n", CHUNKS[:7], CHUNKS[7:]),
    ],
)
async def test_the_body_is_read_and_the_connection_goes_on(serve, parts):
    plain = POST + WITH_LENGTH + b"\r\n" + BODY
    again = POST + UPGRADE + WITH_LENGTH + b"\r\n" + BODY
    async with serve() as s:
        answers = exchange(s, *parts, plain, again)
        texts = [(await anext(answers))["choices"][0]["text"] for _ in range(3)]
        await answers.aclose()
    assert texts == ["Paris"] * 3


async def test_a_request_without_a_body_is_answered(serve):
    async with serve() as s:
        answers = exchange(s, b"GET /v1/models HTTP/1.1\r\nhost: a\r\n" + UPGRADE + b"\r\n")
        assert (await anext(answers))["data"][0]["id"] == "tiny"
        await answers.aclose()


async def test_what_follows_is_checked_as_ever(serve):
    wrong = POST + UPGRADE + CHUNKED + b"\r\n" + b"no chunk\r\n"
    async with serve() as s:
        refusal = await anext(exchange(s, wrong))
    assert refusal["error"]["code"] == "invalid_http"


async def test_many_in_one_read_are_answered_in_turn(serve):
    one = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n" + UPGRADE + b"\r\n"
    async with serve() as s:
        answers = exchange(s, one * 1500)
        for _ in range(1500):
            assert (await anext(answers))["data"][0]["id"] == "tiny"
        await answers.aclose()


@pytest.mark.parametrize("upgrade", [b"", UPGRADE])
async def test_what_comes_behind_the_last_request_is_no_error(serve, upgrade):
    last = b"GET /v1/models HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
    first = b"GET /v1/models HTTP/1.1\r\nhost: a\r\n" + upgrade + b"\r\n" if upgrade else b""
    async with serve() as s:
        answers = exchange(s, first + last + b"GET / HTTP/1.1\r\n\r\n")
        for _ in range(2 if upgrade else 1):
            assert (await anext(answers))["data"][0]["id"] == "tiny"
        await answers.aclose()
