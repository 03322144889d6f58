"""How much of a prompt each worker holds, as far as it can be known quickly."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence

from core.errors import Unavailable
from core.logs import event
from core.prefix_index import PrefixIndexReader
from router.attach import WorkerLink

logger = logging.getLogger(__name__)

_TIMEOUT_S = 0.2
_PAUSE_S = 1.0


class PrefixHints:
    """Asks the prefix index, and leaves it alone for a while after it failed.

    No request waits for Redis longer than a fifth of a second, and at most one a second does.
    """

    def __init__(self, reader: PrefixIndexReader) -> None:
        self._reader = reader
        self._resume_at = 0.0
        self._is_away = False

    async def held_blocks(
        self, hashes: Sequence[bytes], links: Iterable[WorkerLink]
    ) -> dict[str, int]:
        """Leading blocks of `hashes` that each worker holds; empty when the index is away."""
        if time.monotonic() < self._resume_at:
            return {}
        candidates = {link.worker_id: link.epoch for link in links}
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                held = await self._reader.lookup(hashes, candidates)
        except (Unavailable, TimeoutError) as error:
            self._resume_at = time.monotonic() + _PAUSE_S
            if not self._is_away:
                event(logger, logging.WARNING, "prefix_index_away", error=error)
            self._is_away = True
            return {}
        self._is_away = False
        return held
