"""The ucxx transport's owner keeps its memory to readers that speak the protocol, and gives
back whatever a connection has cost."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from google.protobuf.message import Message

from baton.v1 import kv_transfer_pb2
from core.errors import StartupError, TransferError
from kvtransfer.base import BlockCopy, MemoryRegion
from kvtransfer.local_peer import LOOPBACK, HostPool, LocalPeer, block_content, local_peer
from kvtransfer.send_receive import parse
from kvtransfer.ucxx_channel import Channel
from kvtransfer.ucxx_transport import UcxxTransport
from kvtransfer.ucxx_worker import UcxxWorker
from tests.kvtransfer.readers import (
    BLOCK_BYTES,
    PROMPT_S,
    SHAPE,
    Reader,
    needs_ucxx,
    promptly,
    started,
)

pytestmark = needs_ucxx


@pytest.fixture(scope="module")
def peer() -> Iterator[LocalPeer]:
    """An owner `p@1` with seed 7 that every test leaves alive."""
    with local_peer("ucxx", "p@1", SHAPE, seed=7) as peer:
        yield peer


@pytest.fixture
def worker() -> Iterator[UcxxWorker]:
    worker = UcxxWorker("DRAM", LOOPBACK)
    yield worker
    worker.close()


@pytest.fixture
def channel(peer: LocalPeer, worker: UcxxWorker) -> Channel:
    """A reader's bare connection to the owner."""
    return worker.connect(LOOPBACK, peer.descriptor.port)


def wait_until(worker: UcxxWorker, is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PROMPT_S
    while not is_so():
        assert time.monotonic() < deadline
        worker.progress()
        time.sleep(0.001)


def is_cut_off(channel: Channel) -> bool:
    try:
        channel.check()
    except ConnectionError:
        return True
    return False


def greet(worker: UcxxWorker, channel: Channel) -> None:
    channel.send(kv_transfer_pb2.KvHello(agent="p@1"))
    received: list[bytearray] = []
    wait_until(worker, lambda: received.extend(filter(None, [channel.receive()])) or received)
    assert parse(kv_transfer_pb2.KvHello, received[0]).agent == "p@1"


def test_a_reader_gets_the_blocks_in_the_order_it_asked_for(
    worker: UcxxWorker, channel: Channel
) -> None:
    greet(worker, channel)
    first, second = bytearray(BLOCK_BYTES), bytearray(BLOCK_BYTES)
    channel.receive_blocks([memoryview(first), memoryview(second)], tag=5)
    channel.send(kv_transfer_pb2.KvRead(block_ids=[3, 0], tag=5))
    wait_until(worker, channel.blocks.have_succeeded)
    assert first == block_content(7, 3, BLOCK_BYTES)
    assert second == block_content(7, 0, BLOCK_BYTES)


@pytest.mark.parametrize(
    "message",
    [
        kv_transfer_pb2.KvHello(agent="p@0"),
        kv_transfer_pb2.KvRead(block_ids=[0], tag=1),
        kv_transfer_pb2.KvHello(),
    ],
    ids=["a former life", "no hello", "nothing"],
)
def test_a_reader_without_the_right_hello_is_cut_off(
    worker: UcxxWorker, channel: Channel, message: Message
) -> None:
    channel.send(message)
    wait_until(worker, lambda: is_cut_off(channel))


@pytest.mark.parametrize(
    "read",
    [
        kv_transfer_pb2.KvRead(block_ids=[0, 16]),
        kv_transfer_pb2.KvRead(block_ids=[-1]),
        kv_transfer_pb2.KvRead(block_ids=[0], offset=BLOCK_BYTES, num_bytes=1),
    ],
)
def test_a_read_out_of_bounds_cuts_the_reader_off(
    worker: UcxxWorker, channel: Channel, read: kv_transfer_pb2.KvRead
) -> None:
    greet(worker, channel)
    channel.send(read)
    wait_until(worker, lambda: is_cut_off(channel))


async def test_a_read_in_progress_stops_where_it_is_aborted() -> None:
    shape = (64, 1 << 20)
    pool = HostPool(*shape)
    transport = UcxxTransport("r@1", pool.region, LOOPBACK)
    await transport.start()
    with local_peer("ucxx", "p@1", shape) as peer:
        await transport.connect(peer.descriptor)
        for pause_s in (0.0, 0.001, 0.002, 0.004, 0.008):
            pull = transport.pull("p@1", [BlockCopy(i, i) for i in range(64)])
            await asyncio.sleep(pause_s)
            pull.abort()
            await promptly(pull.settled())
            pool.memory[:] = bytes(len(pool.memory))
            await asyncio.sleep(0.02)
            assert not any(pool.block(i).strip(b"\x00") for i in range(64))
        await promptly(transport.pull("p@1", [BlockCopy(9, 0)]).done())
        await promptly(transport.close())
    assert pool.block(0) == block_content(0, 9, shape[1])


async def test_connections_that_were_given_up_leave_no_files_open() -> None:
    with local_peer("ucxx", "m@1", SHAPE) as mortal:
        async with started(Reader("ucxx"), mortal) as transport:
            await promptly(transport.pull("m@1", [BlockCopy(0, 0)]).done())
            before = num_open_files()
            for _ in range(5):
                mortal.stall()
                pull = transport.pull("m@1", [BlockCopy(0, 0)])
                await asyncio.sleep(0.02)
                pull.abort()
                await promptly(pull.settled())
                mortal.resume()
                await promptly(transport.pull("m@1", [BlockCopy(0, 0)]).done())
            # UCX closes the last one in its own time.
            async with asyncio.timeout(PROMPT_S):
                while num_open_files() > before + 2:
                    await asyncio.sleep(0.02)


def num_open_files() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


async def test_a_peer_that_does_not_answer_cannot_be_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("kvtransfer.ucxx_transport.CONNECT_TIMEOUT_S", 0.3)
    with local_peer("ucxx", "m@1", SHAPE) as mortal:
        mortal.stall()
        async with started(Reader("ucxx")) as transport:
            with pytest.raises(TransferError, match="cannot connect to m@1: no answer"):
                await promptly(transport.connect(mortal.descriptor))
            assert not transport.is_connected("m@1")


async def test_a_host_without_an_address_cannot_be_connected(peer: LocalPeer) -> None:
    descriptor = type(peer.descriptor)()
    descriptor.CopyFrom(peer.descriptor)
    descriptor.host = "::1"
    async with started(Reader("ucxx")) as transport:
        with pytest.raises(TransferError, match="cannot connect to p@1: ::1"):
            await transport.connect(descriptor)


async def test_ucxx_refuses_device_memory() -> None:
    transport = UcxxTransport("p@1", MemoryRegion(0, 1, BLOCK_BYTES, memory="VRAM"), LOOPBACK)
    with pytest.raises(StartupError, match="only host memory"):
        await transport.start()


LIBRARIES = """
import asyncio, sys
from kvtransfer.local_peer import HostPool
from kvtransfer.select import make_transport

async def main():
    transport = make_transport(sys.argv[1], "r@1", HostPool(1, 64).region, "127.0.0.1")
    await transport.start()
    with open("/proc/self/maps") as maps:
        print(len({line.split()[-1] for line in maps if "libucp" in line}))
    await transport.close()

asyncio.run(main())
"""


@pytest.mark.parametrize(("transport", "num_copies"), [("ucxx", "1"), ("tcp", "0")])
def test_a_worker_loads_no_other_copy_of_ucx(transport: str, num_copies: str) -> None:
    command = [sys.executable, "-c", LIBRARIES, transport]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == num_copies
