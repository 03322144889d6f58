"""Services with certificates of one CA hear each other, and nobody else."""

import logging
import os

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from core.errors import StartupError
from core.rpc import RpcServer, open_channel
from core.settings import load_settings
from core.tls import TlsSettings, load_tls
from tests.pki import Authority, identity

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture(scope="module")
def authority():
    return Authority("ours")


async def health(channel):
    async with channel:
        stub = health_pb2_grpc.HealthStub(channel)
        reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=60)
        return reply.status


async def started(tls):
    server = RpcServer("127.0.0.1", 0, tls)
    address = await server.start([])
    await server.set_serving(True)
    return server, address


async def test_services_of_one_deployment_hear_each_other_whatever_their_address(
    tmp_path, authority
):
    server, address = await started(identity(tmp_path / "a", authority))
    assert await health(open_channel(address, identity(tmp_path / "b", authority))) == SERVING
    await server.stop(0)


async def test_nobody_else_is_heard(tmp_path, authority):
    server, address = await started(identity(tmp_path / "a", authority))
    strangers = [
        open_channel(address),
        open_channel(address, identity(tmp_path / "b", Authority("theirs"))),
        grpc.aio.secure_channel(
            address,
            grpc.ssl_channel_credentials(authority.certificate),
            options=(("grpc.ssl_target_name_override", "baton"),),
        ),
    ]
    for channel in strangers:
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await health(channel)
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(0)


async def test_a_server_without_the_deployments_name_is_not_called(tmp_path, authority):
    server, address = await started(identity(tmp_path / "a", authority, name="other"))
    with pytest.raises(grpc.aio.AioRpcError):
        await health(open_channel(address, identity(tmp_path / "b", authority)))
    await server.stop(0)


async def test_a_replaced_certificate_is_shown_from_the_next_handshake_on(tmp_path, authority):
    server, address = await started(identity(tmp_path / "a", authority))
    others = Authority("new")
    identity(tmp_path / "a", others)
    for path in (tmp_path / "a").iterdir():
        os.utime(path, (1, 1))
    assert await health(open_channel(address, identity(tmp_path / "b", others))) == SERVING
    await server.stop(0)


def test_some_of_the_files_are_not_enough(tmp_path):
    settings = load_settings(TlsSettings, "x", ["--tls-cert", str(tmp_path / "tls.crt")])
    with pytest.raises(StartupError, match="needs --tls-key and --tls-ca, too"):
        load_tls(settings)


def test_a_file_that_is_not_there_is_named(tmp_path):
    flags = [f"--tls-{name}={tmp_path / name}" for name in ("cert", "key", "ca")]
    with pytest.raises(StartupError, match=r"/ca cannot be read: No such file"):
        load_tls(load_settings(TlsSettings, "x", flags))


def test_without_any_it_is_off_and_logged(caplog):
    with caplog.at_level(logging.INFO):
        assert load_tls(load_settings(TlsSettings, "x", [])) is None
    assert "tls_off" in caplog.text
