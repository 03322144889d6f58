"""The tcp transport's owner keeps its memory to readers that speak the protocol."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from baton.v1 import kv_transfer_pb2
from core.errors import StartupError, TransferError
from kvtransfer.base import BlockCopy, BlockPart, MemoryRegion
from kvtransfer.local_peer import LOOPBACK, HostPool, block_content, local_peer
from kvtransfer.pulls import ThreadPull
from kvtransfer.select import make_transport
from kvtransfer.tcp_frames import ACCEPTED, receive_into, runs, send_frame
from kvtransfer.tcp_peer import TcpPeer
from kvtransfer.tcp_server import TcpServer
from kvtransfer.tcp_transport import TcpTransport
from tests.kvtransfer.readers import PROMPT_S, SHAPE, Reader, promptly, started

BLOCK_BYTES = 64


@pytest.fixture
def port() -> Iterator[int]:
    """Of an owner `p@1` of four blocks with seed 7."""
    pool = HostPool(4, BLOCK_BYTES)
    pool.fill(7)
    server = TcpServer("p@1", pool.region)
    yield server.start(LOOPBACK)
    server.close()


@pytest.fixture
def reader(port: int) -> Iterator[socket.socket]:
    with socket.create_connection((LOOPBACK, port), timeout=PROMPT_S) as connection:
        yield connection


def greet(connection: socket.socket, agent: str) -> bytes:
    send_frame(connection, kv_transfer_pb2.KvHello(agent=agent))
    return connection.recv(1)


def test_a_reader_gets_the_blocks_in_the_order_it_asked_for(reader: socket.socket) -> None:
    assert greet(reader, "p@1") == ACCEPTED
    send_frame(reader, kv_transfer_pb2.KvRead(block_ids=[3, 0]))
    answer = bytearray(2 * BLOCK_BYTES)
    receive_into(reader, memoryview(answer))
    assert answer == block_content(7, 3, BLOCK_BYTES) + block_content(7, 0, BLOCK_BYTES)


def test_a_reader_gets_the_part_of_each_block_that_it_asked_for(reader: socket.socket) -> None:
    greet(reader, "p@1")
    send_frame(reader, kv_transfer_pb2.KvRead(block_ids=[3, 0], offset=60, num_bytes=4))
    answer = bytearray(8)
    receive_into(reader, memoryview(answer))
    assert answer == block_content(7, 3, 4) + block_content(7, 0, 4)


@pytest.mark.parametrize(("offset", "num_bytes"), [(60, 5), (-1, 4), (8, 0), (64, 1), (0, -1)])
def test_bytes_outside_a_block_cut_the_reader_off(
    reader: socket.socket, offset: int, num_bytes: int
) -> None:
    greet(reader, "p@1")
    send_frame(reader, kv_transfer_pb2.KvRead(block_ids=[0], offset=offset, num_bytes=num_bytes))
    assert reader.recv(1) == b""


def test_a_reader_of_a_former_life_is_cut_off(reader: socket.socket) -> None:
    assert greet(reader, "p@0") == b""


@pytest.mark.parametrize("block_id", [4, -1])
def test_a_block_outside_the_pool_cuts_the_reader_off(reader: socket.socket, block_id: int) -> None:
    greet(reader, "p@1")
    send_frame(reader, kv_transfer_pb2.KvRead(block_ids=[0, block_id]))
    assert reader.recv(1) == b""


@pytest.mark.parametrize(
    "frame", [b"\xff\xff\xff\xff", b"\x00\x00\x00\x03\xff\xff\xff"], ids=["long", "garbage"]
)
def test_a_frame_that_is_none_cuts_the_reader_off(reader: socket.socket, frame: bytes) -> None:
    reader.sendall(frame)
    assert reader.recv(1) == b""


def test_a_silent_reader_does_not_hold_up_another(reader: socket.socket, port: int) -> None:
    with socket.create_connection((LOOPBACK, port), timeout=PROMPT_S) as other:
        assert greet(other, "p@1") == ACCEPTED


def test_runs_join_neighbours_and_are_cut_at_a_mebibyte() -> None:
    whole = BlockPart(0, 100)
    assert list(runs([5, 6, 2, 4], 100, whole)) == [(500, 200), (200, 100), (400, 100)]
    large = BlockPart(0, 1 << 21)
    assert list(runs([1], 1 << 21, large)) == [(1 << 21, 1 << 20), (3 << 20, 1 << 20)]
    assert list(runs([], 100, whole)) == []


def test_runs_of_parts_stay_apart() -> None:
    assert list(runs([5, 6], 100, BlockPart(10, 80))) == [(510, 80), (610, 80)]


async def test_an_abort_at_the_last_byte_does_not_spoil_the_next_pull(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = TcpPeer._read

    def read_and_abort(peer: TcpPeer, pull: ThreadPull) -> None:
        read(peer, pull)
        pull.is_aborted = True
        peer.abort(pull)

    reader = Reader("tcp")
    with local_peer("tcp", "p@1", SHAPE, seed=100) as peer:
        async with started(reader, peer) as transport:
            with monkeypatch.context() as patch:
                patch.setattr(TcpPeer, "_read", read_and_abort)
                await promptly(transport.pull("p@1", [BlockCopy(0, 0)]).settled())
            await promptly(transport.pull("p@1", [BlockCopy(3, 1)]).done())
    assert reader.holds(1, 100, 3)


async def test_tcp_refuses_device_memory() -> None:
    transport = TcpTransport("p@1", MemoryRegion(0, 1, BLOCK_BYTES, memory="VRAM"), LOOPBACK)
    with pytest.raises(StartupError, match="only host memory"):
        await transport.start()


async def test_an_address_of_another_machine_cannot_be_listened_on() -> None:
    transport = TcpTransport("p@1", HostPool(1, BLOCK_BYTES).region, "192.0.2.1")
    with pytest.raises(StartupError, match=r"cannot listen on 192\.0\.2\.1"):
        await transport.start()


async def test_a_peer_of_another_transport_is_refused() -> None:
    transport = make_transport("tcp", "r@1", HostPool(1, BLOCK_BYTES).region, LOOPBACK)
    with pytest.raises(TransferError, match="speaks 'nixl'"):
        await transport.connect(
            kv_transfer_pb2.TransportDescriptor(transport="nixl", agent="p@1", block_bytes=64)
        )
