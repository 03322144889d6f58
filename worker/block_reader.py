"""Reads blocks of a peer into those of an import, which keeps them until the read has settled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvtransfer.base import BlockCopy, BlockPart, Pull
from kvtransfer.imports import ImportKey, ImportTable
from kvtransfer.peers import Peer
from worker.host import WorkerHost


class BlockReader:
    """Reads for imports of one table. `on_room`: a read that was given up has settled."""

    def __init__(self, host: WorkerHost, imports: ImportTable, on_room: Callable[[], None]) -> None:
        self._host = host
        self._imports = imports
        self._on_room = on_room

    async def read(
        self, key: ImportKey, peer: Peer, copies: Sequence[BlockCopy], part: BlockPart
    ) -> None:
        """Returns when this part of all of them is in place; the link's meter learns of it.

        Raises TransferError. Whatever ends it earlier, the import is given up.
        """
        began_at = self._host.clock()
        pull = self._host.transport.pull(peer.agent, copies, part)
        self._imports.begin_read(key)
        try:
            await pull.done()
        except BaseException:
            self._host.counters.num_failed_reads += 1
            pull.abort()
            self._imports.abort(key)
            self._host.tasks.start(self._settle(key, pull))
            raise
        self._imports.end_read(key, len(copies))
        num_bytes, elapsed_s = len(copies) * part.num_bytes, self._host.clock() - began_at
        peer.link.observe(num_bytes, elapsed_s)
        self._host.counters.num_read_bytes += num_bytes
        self._host.counters.read_s += elapsed_s

    async def _settle(self, key: ImportKey, pull: Pull) -> None:
        """Frees quarantined blocks once nothing can land in them."""
        await pull.settled()
        self._imports.end_read(key, 0)
        self._on_room()
