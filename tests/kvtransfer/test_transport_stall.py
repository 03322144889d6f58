"""What happens to a read when its peer hangs: SIGSTOP stands for a machine that hangs.

Over CMA a read needs nothing of its owner, so a stalled owner does not hold it up; with the
backends here it does. NIXL cannot stop a read that has begun; where the owner sends, closing the
connection does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from core.errors import TransferError
from kvtransfer.base import BlockCopy
from kvtransfer.local_peer import LocalPeer, local_peer
from tests.kvtransfer.readers import (
    SHAPE,
    UCX_TLS,
    Reader,
    goes_on,
    needs_nixl,
    needs_ucxx,
    promptly,
    started,
    transport_of,
)

ALL_BLOCKS = [BlockCopy(i, i) for i in range(16)]
NIXL = pytest.param("nixl-tcp", marks=needs_nixl)
UCXX = pytest.param("ucxx", marks=needs_ucxx)
every_backend = pytest.mark.parametrize("backend", [NIXL, UCXX, "tcp"])
nixl = pytest.mark.parametrize("backend", [NIXL])
owner_sends = pytest.mark.parametrize("backend", [UCXX, "tcp"])


@pytest.fixture
def peer(backend: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalPeer]:
    """One to stall, with seed 50."""
    monkeypatch.setenv("UCX_TLS", UCX_TLS[backend])
    with local_peer(transport_of(backend), "p@1", SHAPE, seed=50) as peer:
        yield peer


@every_backend
async def test_a_read_from_a_stalled_peer_waits_and_then_goes_on(
    backend: str, peer: LocalPeer
) -> None:
    reader = Reader(backend)
    async with started(reader, peer) as transport:
        peer.stall()
        pull = transport.pull("p@1", ALL_BLOCKS)
        assert await goes_on(pull.done())
        peer.resume()
        await promptly(pull.done())
    assert reader.holds(15, 50, 15)


@every_backend
async def test_a_waiting_read_settles_as_soon_as_it_is_aborted(
    backend: str, peer: LocalPeer
) -> None:
    async with started(Reader(backend), peer) as transport:
        peer.stall()
        first, second = transport.pull("p@1", ALL_BLOCKS), transport.pull("p@1", ALL_BLOCKS)
        assert await goes_on(first.done())
        second.abort()
        await promptly(second.settled())
        assert await goes_on(first.done())
        peer.kill()
        await promptly(first.settled())


@every_backend
async def test_a_stalled_peer_does_not_hold_up_another(backend: str, peer: LocalPeer) -> None:
    reader = Reader(backend)
    with local_peer(transport_of(backend), "q@1", SHAPE, seed=70) as other:
        async with started(reader, peer, other) as transport:
            peer.stall()
            stuck = transport.pull("p@1", [BlockCopy(0, 0)])
            await promptly(transport.pull("q@1", [BlockCopy(1, 1)]).done())
            peer.kill()
            await promptly(stuck.settled())
    assert reader.holds(1, 70, 1)


@every_backend
async def test_killing_a_stalled_peer_ends_the_read(backend: str, peer: LocalPeer) -> None:
    async with started(Reader(backend), peer) as transport:
        peer.stall()
        pull = transport.pull("p@1", ALL_BLOCKS)
        assert await goes_on(pull.done())
        peer.kill()
        with pytest.raises(TransferError):
            await promptly(pull.done())
        await promptly(pull.settled())
        assert not transport.is_connected("p@1")


@nixl
async def test_an_aborted_nixl_read_settles_only_when_its_bytes_have_landed(
    backend: str, peer: LocalPeer
) -> None:
    reader = Reader(backend)
    async with started(reader, peer) as transport:
        peer.stall()
        pull = transport.pull("p@1", ALL_BLOCKS)
        assert await goes_on(pull.done())
        pull.abort()
        with pytest.raises(TransferError, match="aborted"):
            await promptly(pull.done())
        assert await goes_on(pull.settled())
        peer.resume()
        await promptly(pull.settled())
        assert reader.holds(15, 50, 15)
        await promptly(transport.pull("p@1", [BlockCopy(3, 4)]).done())


@owner_sends
async def test_an_aborted_read_settles_at_once_where_the_owner_sends_and_nothing_lands_later(
    backend: str, peer: LocalPeer
) -> None:
    reader = Reader(backend)
    async with started(reader, peer) as transport:
        peer.stall()
        pull = transport.pull("p@1", [BlockCopy(0, 0)])
        assert await goes_on(pull.done())
        pull.abort()
        await promptly(pull.settled())
        with pytest.raises(TransferError, match="aborted"):
            await promptly(pull.done())
        peer.resume()
        await promptly(transport.pull("p@1", [BlockCopy(3, 4)]).done())
    assert reader.is_untouched(0) and reader.holds(4, 50, 3)


@every_backend
async def test_disconnecting_a_stalled_peer_returns_and_fails_its_reads(
    backend: str, peer: LocalPeer
) -> None:
    async with started(Reader(backend), peer) as transport:
        peer.stall()
        pulls = [transport.pull("p@1", ALL_BLOCKS), transport.pull("p@1", ALL_BLOCKS)]
        assert await goes_on(pulls[0].done())
        await promptly(transport.disconnect("p@1"))
        for pull in pulls:
            with pytest.raises(TransferError):
                await promptly(pull.done())
        await promptly(pulls[1].settled())
        peer.kill()
        await promptly(pulls[0].settled())


@nixl
async def test_a_nixl_peer_can_come_back_after_it_was_given_up(
    backend: str, peer: LocalPeer
) -> None:
    reader = Reader(backend)
    async with started(reader, peer) as transport:
        peer.stall()
        given_up = transport.pull("p@1", ALL_BLOCKS)
        assert await goes_on(given_up.done())
        await promptly(transport.disconnect("p@1"))
        await transport.connect(peer.descriptor)
        pull = transport.pull("p@1", [BlockCopy(7, 0)])
        assert await goes_on(given_up.settled())
        peer.resume()
        await promptly(given_up.settled())
        await promptly(pull.done())
    assert reader.holds(0, 50, 7)


@owner_sends
async def test_close_settles_a_read_from_a_stalled_peer_where_the_owner_sends(
    backend: str, peer: LocalPeer
) -> None:
    reader = Reader(backend)
    async with started(reader, peer) as transport:
        peer.stall()
        pull = transport.pull("p@1", ALL_BLOCKS)
        assert await goes_on(pull.done())
        await promptly(transport.close())
        await promptly(pull.settled())


@nixl
async def test_close_of_nixl_waits_for_a_stalled_read(backend: str, peer: LocalPeer) -> None:
    async with started(Reader(backend), peer) as transport:
        peer.stall()
        transport.pull("p@1", ALL_BLOCKS)
        closing = asyncio.ensure_future(transport.close())
        assert await goes_on(asyncio.shield(closing))
        peer.kill()
        await promptly(closing)
