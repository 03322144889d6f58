"""Bodies and headers that are too large, half, or never come."""

import asyncio
import contextlib
import json
from types import SimpleNamespace

import pytest

from router.http.app import MAX_HEADER_BYTES
from router.http.call import MAX_BODY_BYTES, MAX_DISCARDED_BYTES
from tests.router.fakes import Script
from tests.router.stack import PATIENCE_S, REPLY, wait_for

POST = b"POST /v1/completions HTTP/1.1\r\nhost: a\r\n"


async def exchange(s, *parts):
    """Sends `parts` over a connection of its own; returns status and body of the answer."""
    host, port = s.stack.http_url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    for part in parts:
        writer.write(part)
    async with asyncio.timeout(PATIENCE_S):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.split("content-length: ")[1].split("\r\n")[0])
        body = json.loads(await reader.readexactly(length))
    writer.close()
    return int(head.split()[1]), body["error"]["code"]


async def has_left(s):
    """Returns when one client counts as one that has left."""
    metrics = ""
    async with asyncio.timeout(PATIENCE_S):
        while 'baton_http_responses_total{status="499"} 1.0' not in metrics:
            metrics = (await s.http.get("/metrics")).text
            await asyncio.sleep(0.02)


@pytest.mark.parametrize("is_chunked", [False, True])
async def test_a_body_over_the_limit_is_read_and_refused(serve, is_chunked):
    async def parts():
        for _ in range(5):
            yield b" " * (MAX_BODY_BYTES // 4)

    async with serve() as s:
        content = parts() if is_chunked else b" " * (MAX_BODY_BYTES + 1)
        response = await s.http.post("/v1/completions", content=content)
    assert (response.status_code, response.json()["error"]["code"]) == (413, "request_too_large")


async def test_a_body_of_the_limit_is_taken(serve):
    body = json.dumps({"prompt": "Where?", "max_tokens": 1}).encode()
    async with serve() as s:
        response = await s.http.post("/v1/completions", content=body.ljust(MAX_BODY_BYTES))
    assert response.status_code == 200


async def test_a_huge_body_is_refused_before_it_comes(serve):
    length = f"content-length: {MAX_DISCARDED_BYTES + 1}\r\n\r\n".encode()
    async with serve() as s:
        assert await exchange(s, POST + length) == (413, "request_too_large")


async def test_headers_over_the_limit_are_refused(serve):
    async with serve() as s:
        response = await s.http.get("/health", headers={"x": "y" * MAX_HEADER_BYTES})
        path = await s.http.get("/" + "y" * MAX_HEADER_BYTES)
        fits = await s.http.get("/health", headers={"x": "y" * (MAX_HEADER_BYTES // 2)})
    assert (response.status_code, path.status_code, fits.status_code) == (431, 431, 200)


async def test_headers_that_do_not_end_are_cut_off(serve):
    async with serve() as s:
        endless = b"x: " + b"y" * (MAX_HEADER_BYTES // 2)
        assert await exchange(s, POST, endless, endless) == (431, "headers_too_large")


@pytest.mark.parametrize("first", [b"", POST + b"x: "])
async def test_a_connection_without_a_whole_head_is_closed(serve, monkeypatch, first):
    monkeypatch.setattr("router.http.protocol.HEAD_TIMEOUT_S", 0.3)
    async with serve() as s:
        host, port = s.stack.http_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        async with asyncio.timeout(PATIENCE_S):
            closed = asyncio.create_task(reader.read())
            writer.write(first)
            while first and not closed.done():  # drop by drop
                writer.write(b"y")
                await asyncio.sleep(0.05)
            with contextlib.suppress(ConnectionResetError):
                assert await closed == b""
        writer.close()
        monkeypatch.setattr("router.http.protocol.HEAD_TIMEOUT_S", 60.0)
        slow = await exchange(s, POST, b"content-length: 1\r\n\r\n", b"{")
    assert slow == (400, "invalid_json")


async def test_an_answer_with_half_a_head_behind_it_goes_on(serve, monkeypatch):
    body = b'{"prompt": "a", "stream": true}'
    async with serve(script=Script(list(REPLY), num_decode_tokens=3)) as s:
        host, port = s.stack.http_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        await wait_for(lambda: s.stack.router._http._server.server_state.connections)
        monkeypatch.setattr("router.http.protocol.HEAD_TIMEOUT_S", 0.1)
        writer.write(POST + b"content-length: %d\r\n\r\n" % len(body) + body + POST)
        await reader.readuntil(b"data: ")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await reader.read(-1)
        writer.close()


async def test_empty_lines_after_an_answer_do_not_keep_the_connection(serve, monkeypatch):
    async with serve() as s:
        host, port = s.stack.http_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n")
        await reader.readuntil(b"}")
        monkeypatch.setattr("router.http.protocol.HEAD_TIMEOUT_S", 0.1)
        writer.write(b"\r\n")
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.read() == b""
        writer.close()


async def test_a_client_that_leaves_in_its_body_leaves_nothing(serve):
    async with serve() as s:
        host, port = s.stack.http_url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(POST + b"content-length: 100\r\n\r\n{")
        await writer.drain()
        writer.close()
        await has_left(s)


async def test_a_body_that_does_not_come_is_a_timeout(serve, monkeypatch):
    monkeypatch.setattr("router.http.call.BODY_TIMEOUT_S", 0.1)
    async with serve() as s:
        assert await exchange(s, POST + b"content-length: 5\r\n\r\n{") == (408, "timeout")


async def test_a_client_that_never_reads_is_given_up_after_its_deadline(serve, monkeypatch):
    monkeypatch.setattr("router.http.answer.READ_GRACE_S", 0.1)
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"x-request-timeout", b"2")],
        "baton.body": SimpleNamespace(
            begin=lambda: None,
            in_one_write=contextlib.nullcontext,
            flush=lambda num_bytes, is_last: None,
            is_asked=True,
            is_lost=False,
            watch=lambda on_lost: None,
        ),
    }
    messages = [
        {"type": "http.request", "body": b'{"prompt":"a","stream":true}', "more_body": False}
    ]

    async def receive():
        return messages.pop() if messages else await asyncio.Event().wait()

    async def send(message):
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async with serve() as s, asyncio.timeout(60):
        await s.stack.router._http._server.config.app(scope, receive, send)
        await has_left(s)


async def test_trailers_without_end_end_the_connection(serve):
    async with serve() as s:
        host, port = s.stack.http_url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(POST + b"transfer-encoding: chunked\r\n\r\n0\r\n")
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    writer.write(b"x: " + b"b" * 1000 + b"\r\n")
                    await writer.drain()
        writer.close()


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: x\r\n\r\n",
        b"content-length: 3\r\ntransfer-encoding: chunked\r\n\r\n",
    ],
)
async def test_what_is_no_http_is_refused_with_an_error_object(serve, head):
    async with serve() as s:
        assert await exchange(s, POST + head) == (400, "invalid_http")
        wrong_version = POST.replace(b"1.1", b"9.9") + b"\r\n"
        assert await exchange(s, wrong_version) == (400, "invalid_http")


async def test_a_stream_to_http_1_0_has_no_chunks_and_ends_with_the_connection(serve):
    body = json.dumps({"prompt": "Where?", "max_tokens": 3, "stream": True}).encode()
    request = POST.replace(b"1.1", b"1.0") + b"content-length: %d\r\n\r\n%b" % (len(body), body)
    async with serve() as s:
        host, port = s.stack.http_url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        async with asyncio.timeout(PATIENCE_S):
            head, _, events = (await reader.read()).partition(b"\r\n\r\n")
        writer.close()
    assert b"transfer-encoding" not in head.lower()
    parts = events.decode().split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    texts = [json.loads(part[6:])["choices"][0]["text"] for part in parts[:-2]]
    assert "".join(texts) == "Par"
