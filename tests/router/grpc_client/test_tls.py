"""Calls over mutual TLS."""

from __future__ import annotations

import asyncio
import ssl

import pytest

from core.errors import StartupError
from router.grpc_client.connect import open_call
from tests.pki import Authority, identity
from tests.router.grpc_client.conftest import PATIENCE_S, called, grpc_server, outcome, read_all
from tests.router.grpc_client.test_grpcio import MESSAGES
from tests.router.stack import wait_for


@pytest.fixture(scope="module")
def authority():
    return Authority("ours")


@pytest.fixture
def ours(tmp_path, authority):
    return identity(tmp_path / "ours", authority)


async def test_services_of_one_deployment_hear_each_other_whatever_their_address(
    tmp_path, authority, ours
):
    async with grpc_server(identity(tmp_path / "server", authority)) as (address, probe, _):
        async with called(address, ours) as call:
            for message in (*MESSAGES, b"end"):
                call.send(message)
            assert await read_all(call) == ([b"re: " + message for message in MESSAGES], "OK")
            assert call._transport.get_extra_info("ssl_object").version() in ("TLSv1.2", "TLSv1.3")
        await probe.ended.wait()


async def test_a_server_without_the_deployments_name_is_not_called(tmp_path, authority, ours):
    async with grpc_server(identity(tmp_path / "s", authority, name="other")) as (address, _, _):
        messages, end = await outcome(address, ours)
    assert messages == []
    assert end.startswith(f"UNAVAILABLE: {address}: ")
    assert "certificate is not valid for 'baton'" in end


async def test_a_server_of_another_authority_is_not_called(tmp_path, ours):
    async with grpc_server(identity(tmp_path / "s", Authority("theirs"))) as (address, _, _):
        messages, end = await outcome(address, ours)
    assert messages == []
    assert end.startswith(f"UNAVAILABLE: {address}: ")
    assert "CERTIFICATE_VERIFY_FAILED" in end


async def test_a_server_that_takes_none_of_our_certificates_is_unavailable(
    tmp_path, authority, ours
):
    strict = identity(tmp_path / "s", authority)
    (tmp_path / "s" / "ca.crt").write_bytes(Authority("theirs").certificate)
    async with grpc_server(strict) as (address, _, _):
        messages, end = await outcome(address, ours)
    assert (messages, end.split(":")[0]) == ([], "UNAVAILABLE")


async def test_a_server_without_tls_is_unavailable_to_who_wants_it(ours):
    async with grpc_server() as (address, _, _):
        messages, end = await outcome(address, ours)
    assert (messages, end.split(":")[0]) == ([], "UNAVAILABLE")


async def test_a_server_with_tls_is_unavailable_to_who_has_none(ours):
    async with grpc_server(ours) as (address, _, _):
        messages, end = await outcome(address)
    assert (messages, end.split(":")[0]) == ([], "UNAVAILABLE")


async def test_a_replaced_certificate_is_shown_with_the_next_call(tmp_path, ours):
    others = Authority("new")
    async with grpc_server(identity(tmp_path / "server", others)) as (address, _, _):
        assert "CERTIFICATE_VERIFY_FAILED" in (await outcome(address, ours))[1]
        identity(tmp_path / "ours", others)
        async with called(address, ours) as call:
            call.send(b"x")
            assert await call.read(PATIENCE_S) == b"re: x"


@pytest.mark.parametrize("name", ["ca.crt", "tls.crt", "tls.key"])
@pytest.mark.parametrize("content", [None, b"", b"not PEM"])
async def test_files_that_cannot_be_used_make_a_call_fail(tmp_path, ours, name, content):
    path = tmp_path / "ours" / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(StartupError, match="--tls-cert, --tls-key or --tls-ca cannot be used"):
        ours.client_context()
    messages, end = await outcome("127.0.0.1:1", ours)
    assert messages == []
    assert end.startswith("UNAVAILABLE: 127.0.0.1:1: --tls-cert, --tls-key or --tls-ca cannot")


async def test_a_server_that_does_not_choose_http2_is_unavailable(tmp_path, ours):
    async def hold(reader, writer):
        await reader.read()
        writer.close()

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "ours" / "tls.crt", tmp_path / "ours" / "tls.key")
    server = await asyncio.start_server(hold, "127.0.0.1", 0, ssl=context)
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    assert await outcome(address, ours) == ([], f"UNAVAILABLE: {address} does not speak HTTP/2")
    server.close()
    await server.wait_closed()


async def test_a_caller_may_be_cancelled_at_any_moment(tmp_path, authority, ours):
    async def call_for_ever(address):
        async with called(address, ours) as call:
            call.send(b"x")
            while True:
                await call.read(PATIENCE_S)

    async with grpc_server(identity(tmp_path / "server", authority)) as (address, probe, _):
        for number in range(120):
            caller = asyncio.create_task(call_for_ever(address))
            await asyncio.sleep(number * 5e-5)
            caller.cancel()
            await asyncio.wait([caller])
            assert caller.cancelled()
        await asyncio.sleep(0.2)
        await wait_for(lambda: probe.num_running == 0)


async def test_a_server_that_does_not_shake_hands_is_given_up(ours):
    async def hold(reader, writer):
        await reader.read()
        writer.close()

    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(TimeoutError):
        async with open_call(f"127.0.0.1:{port}", "/a/b", ours, 0.2):
            raise AssertionError("it is connected")
    server.close()
    await server.wait_closed()
