"""Conformance: every backend, against a peer in another process, keeps base.py's contract."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from core.errors import TransferError
from kvtransfer.base import BlockCopy, BlockPart
from kvtransfer.local_peer import LOOPBACK, HostPool, LocalPeer, local_peer
from kvtransfer.select import make_transport
from tests.kvtransfer.readers import (
    A_WHILE_S,
    BACKENDS,
    BLOCK_BYTES,
    NUM_BLOCKS,
    PROMPT_S,
    SHAPE,
    UCX_TLS,
    Reader,
    promptly,
    started,
    transport_of,
)


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", UCX_TLS[request.param])
        yield request.param


@pytest.fixture(scope="module")
def peer(backend: str) -> Iterator[LocalPeer]:
    """One that every test leaves alive, with seed 100."""
    with local_peer(transport_of(backend), "p@1", SHAPE, seed=100) as peer:
        yield peer


@pytest.fixture
def mortal(backend: str) -> Iterator[LocalPeer]:
    """One for a test to stall or kill, with seed 50."""
    with local_peer(transport_of(backend), "m@1", SHAPE, seed=50) as peer:
        yield peer


async def test_scattered_blocks_arrive_where_they_belong(backend: str, peer: LocalPeer) -> None:
    reader = Reader(backend)
    async with started(reader, peer) as transport:
        pull = transport.pull("p@1", [BlockCopy(9, 0), BlockCopy(3, 7), BlockCopy(4, 8)])
        await promptly(pull.done())
        await promptly(pull.settled())
    assert reader.holds(0, 100, 9) and reader.holds(7, 100, 3) and reader.holds(8, 100, 4)
    assert all(reader.is_untouched(block) for block in (1, 2, 3, 4, 5, 6, 9, 10, 15))


async def test_many_pulls_at_once_all_arrive(backend: str, peer: LocalPeer) -> None:
    reader = Reader(backend)
    async with started(reader, peer) as transport:
        pulls = [transport.pull("p@1", [BlockCopy(15 - i, i)]) for i in range(NUM_BLOCKS)]
        await promptly(asyncio.gather(*(pull.done() for pull in pulls)))
    assert all(reader.holds(i, 100, 15 - i) for i in range(NUM_BLOCKS))


@pytest.mark.parametrize(
    "part", [BlockPart(0, 4096), BlockPart(1000, 30_001), BlockPart(65_535, 1)]
)
async def test_a_part_of_each_block_arrives_and_the_rest_stays_untouched(
    backend: str, peer: LocalPeer, part: BlockPart
) -> None:
    reader = Reader(backend)
    copies = [BlockCopy(9, 0), BlockCopy(3, 7), BlockCopy(4, 8)]
    async with started(reader, peer) as transport:
        await promptly(transport.pull("p@1", copies, part).done())
    assert all(reader.holds_only(copy.destination, part, 100, copy.source) for copy in copies)
    assert all(reader.is_untouched(block) for block in (1, 6, 9))


async def test_parts_pulled_one_after_the_other_make_whole_blocks(
    backend: str, peer: LocalPeer
) -> None:
    reader = Reader(backend)
    copies = [BlockCopy(15 - i, i) for i in range(NUM_BLOCKS)]
    parts = [BlockPart(offset, 1 << 12) for offset in range(0, BLOCK_BYTES, 1 << 12)]
    async with started(reader, peer) as transport:
        pulls = [transport.pull("p@1", copies, part) for part in parts]
        await promptly(asyncio.gather(*(pull.done() for pull in pulls)))
    assert all(reader.holds(i, 100, 15 - i) for i in range(NUM_BLOCKS))


@pytest.mark.parametrize(
    "part", [BlockPart(-1, 8), BlockPart(0, 0), BlockPart(4, -4), BlockPart(65_530, 8)]
)
async def test_a_part_outside_a_block_is_refused(
    backend: str, peer: LocalPeer, part: BlockPart
) -> None:
    async with started(Reader(backend), peer) as transport:
        with pytest.raises(TransferError, match="is not inside a block of 65536 bytes"):
            await promptly(transport.pull("p@1", [BlockCopy(0, 0)], part).done())
        assert transport.is_connected("p@1")


async def test_a_pull_of_nothing_is_done(backend: str, peer: LocalPeer) -> None:
    async with started(Reader(backend), peer) as transport:
        await promptly(transport.pull("p@1", []).done())


async def test_pools_may_differ_in_number_of_blocks(backend: str, peer: LocalPeer) -> None:
    reader = Reader(backend, num_blocks=3)
    async with started(reader, peer) as transport:
        await promptly(transport.pull("p@1", [BlockCopy(15, 2)]).done())
    assert reader.holds(2, 100, 15)


async def test_two_peers_are_read_at_the_same_time(
    backend: str, peer: LocalPeer, mortal: LocalPeer
) -> None:
    reader = Reader(backend)
    async with started(reader, peer, mortal) as transport:
        pulls = [transport.pull("p@1", [BlockCopy(1, 1)]), transport.pull("m@1", [BlockCopy(1, 2)])]
        await promptly(asyncio.gather(*(pull.done() for pull in pulls)))
    assert reader.holds(1, 100, 1) and reader.holds(2, 50, 1)


async def test_connecting_again_is_a_no_op(backend: str, peer: LocalPeer) -> None:
    async with started(Reader(backend), peer) as transport:
        connects = [transport.connect(peer.descriptor) for _ in range(3)]
        await promptly(asyncio.gather(*connects))
        await promptly(transport.pull("p@1", [BlockCopy(0, 0)]).done())


async def test_a_peer_under_another_name_is_refused(backend: str, peer: LocalPeer) -> None:
    impostor = type(peer.descriptor)()
    impostor.CopyFrom(peer.descriptor)
    impostor.agent = "p@2"
    async with started(Reader(backend)) as transport:
        with pytest.raises(TransferError, match="p@2"):
            await transport.connect(impostor)
        assert not transport.is_connected("p@2")


async def test_another_block_size_is_refused(backend: str, peer: LocalPeer) -> None:
    pool = HostPool(2, 2 * BLOCK_BYTES)
    transport = make_transport(transport_of(backend), "r@1", pool.region, LOOPBACK)
    await transport.start()
    with pytest.raises(TransferError, match="131072"):
        await transport.connect(peer.descriptor)
    await transport.close()


async def test_an_unknown_agent_makes_a_pull_that_fails(backend: str) -> None:
    async with started(Reader(backend)) as transport:
        pull = transport.pull("nobody@1", [BlockCopy(0, 0)])
        with pytest.raises(TransferError, match="nobody@1 is not connected"):
            await promptly(pull.done())
        await promptly(pull.settled())


@pytest.mark.parametrize("copy", [BlockCopy(16, 0), BlockCopy(-1, 0), BlockCopy(0, 16)])
async def test_a_block_outside_its_pool_is_refused(
    backend: str, peer: LocalPeer, copy: BlockCopy
) -> None:
    async with started(Reader(backend), peer) as transport:
        with pytest.raises(TransferError, match="is not one of 16"):
            await promptly(transport.pull("p@1", [copy]).done())
        assert transport.is_connected("p@1")


async def test_a_pull_after_the_peer_died_fails_and_settles(
    backend: str, mortal: LocalPeer
) -> None:
    async with started(Reader(backend), mortal) as transport:
        await promptly(transport.pull("m@1", [BlockCopy(0, 0)]).done())
        mortal.kill()
        pull = transport.pull("m@1", [BlockCopy(1, 1)])
        with pytest.raises(TransferError):
            await promptly(pull.done())
        await promptly(pull.settled())
        assert not transport.is_connected("m@1")
        with pytest.raises(TransferError):
            await promptly(transport.connect(mortal.descriptor))


async def test_a_restarted_peer_is_readable_under_its_new_epoch_only(
    backend: str, mortal: LocalPeer
) -> None:
    reader = Reader(backend)
    async with started(reader, mortal) as transport:
        mortal.kill()
        with local_peer(transport_of(backend), "m@2", SHAPE, seed=60) as reborn:
            await transport.connect(reborn.descriptor)
            old = transport.pull("m@1", [BlockCopy(0, 0)])
            await promptly(transport.pull("m@2", [BlockCopy(3, 1)]).done())
            with pytest.raises(TransferError):
                await promptly(old.done())
    assert reader.is_untouched(0) and reader.holds(1, 60, 3)


async def test_a_disconnected_peer_can_be_connected_again(backend: str, peer: LocalPeer) -> None:
    reader = Reader(backend)
    async with started(reader, peer) as transport:
        await promptly(transport.disconnect("p@1"))
        assert not transport.is_connected("p@1")
        await transport.connect(peer.descriptor)
        await promptly(transport.pull("p@1", [BlockCopy(2, 2)]).done())
    assert reader.holds(2, 100, 2)


async def test_a_late_read_from_an_owner_without_exports_ends(backend: str) -> None:
    pool = HostPool(*SHAPE)
    pool.fill(seed=7)
    owner = make_transport(transport_of(backend), "o@1", pool.region, LOOPBACK)
    await owner.start()
    try:
        descriptor = owner.descriptor()
        await asyncio.sleep(0.5)
        reader = Reader(backend)
        async with started(reader) as transport:
            await transport.connect(descriptor)
            await promptly(transport.pull("o@1", [BlockCopy(3, 5)]).done())
        assert reader.holds(5, 7, 3)
    finally:
        await owner.close()


async def test_close_leaves_no_threads_behind(backend: str, peer: LocalPeer) -> None:
    before = set(transport_threads())
    async with started(Reader(backend), peer) as transport:
        await promptly(transport.pull("p@1", [BlockCopy(0, 0)]).done())
        assert set(transport_threads()) - before
    assert not set(transport_threads()) - before


async def test_an_idle_transport_never_wakes(backend: str, peer: LocalPeer) -> None:
    async with started(Reader(backend), peer) as transport:
        transport.set_num_exports(1)
        await promptly(transport.pull("p@1", [BlockCopy(0, 0)]).done())
        transport.set_num_exports(0)
        # Wiring up a new connection takes a number of wake-ups.
        async with asyncio.timeout(PROMPT_S):
            while await wakes_up():
                pass


def transport_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("kv-")]


async def wakes_up() -> bool:
    """Whether a thread of the transport does anything for a while."""
    before = num_wake_ups()
    await asyncio.sleep(A_WHILE_S)
    return num_wake_ups() != before


def num_wake_ups() -> int:
    """How often the transport's threads have gone to sleep since they were started."""
    total = 0
    for thread in transport_threads():
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        total += int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    return total
