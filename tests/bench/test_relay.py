"""A relay forwards bytes at its rate and no faster."""

from __future__ import annotations

import socket
import time

import pytest

from bench.limited_prefill import LimitedTransport
from bench.relay import Pacer, relay
from kvtransfer.base import BlockCopy
from kvtransfer.local_peer import LOOPBACK, HostPool, block_content
from kvtransfer.tcp_transport import TcpTransport

MBIT = 1e6


def test_bytes_follow_each_other_through_a_link() -> None:
    pacer = Pacer(8 * MBIT)
    assert pacer.through_at(500_000, now=10.0) == pytest.approx(10.5, abs=0.002)
    assert pacer.through_at(250_000, now=10.1) == pytest.approx(10.75, abs=0.002)
    assert pacer.through_at(250_000, now=20.0) == pytest.approx(20.25, abs=0.002)


def test_a_relay_paces_what_comes_back() -> None:
    with (
        socket.create_server((LOOPBACK, 0)) as target,
        relay(target.getsockname(), bits_per_s=40 * MBIT) as port,
        socket.create_connection((LOOPBACK, port)) as reader,
    ):
        owner, _ = target.accept()
        with owner:
            reader.sendall(b"please")
            assert owner.recv(6) == b"please"
            begin = time.monotonic()
            owner.sendall(bytes(500_000))
            assert len(reader.recv(500_000, socket.MSG_WAITALL)) == 500_000
    assert time.monotonic() - begin > 0.095


async def test_peers_read_a_limited_prefill_through_its_relay() -> None:
    pools = HostPool(4, 4096), HostPool(4, 4096)
    pools[0].fill(7)
    owner = LimitedTransport("p@1", pools[0].region, LOOPBACK)
    reader = TcpTransport("r@1", pools[1].region, LOOPBACK)
    await owner.start()
    await reader.start()
    assert owner.descriptor().port != TcpTransport.descriptor(owner).port
    await reader.connect(owner.descriptor())
    await reader.pull("p@1", [BlockCopy(3, 0)]).done()
    await reader.close()
    await owner.close()
    assert pools[1].block(0) == block_content(7, 3, 4096)
