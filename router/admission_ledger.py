"""What this router has in flight, and what its workers have left for more. Pure bookkeeping.

Each request in flight counts at the workers of its present attempt (`router.admission_workers`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from baton.v1 import types_pb2
from router.admission_model import RatioMeter
from router.admission_workers import DecodeState, InFlight, PrefillState
from router.demand import Pace, Work

_RESIDENCE_DECAY = 0.95
_ASSUMED_RESIDENCE_S = 5.0
_NO_LIMIT = 1 << 40
"""Blocks; of outputs while no pool's size is known."""
_MAX_GROWTH = 1 / 4
"""Of the largest decode pool, that a request's output may count for. With many choices it may
be more than the whole pool; to wait for that would have everybody behind wait for an idle worker.
"""
ASSUMED_TOKENS_PER_S = 2000.0
"""Of a prefill worker before anything has been measured; only bounds what is sent there."""


@dataclass(frozen=True, slots=True)
class Workers:
    """Where an attempt goes. Without a prefill worker, decode computes the prompt."""

    prefill_id: str | None
    decode_id: str


class Ledger:
    """`prefill_ahead_s`: work that a prefill worker may have waiting, so that it never runs
    dry. `load_max_age_s`: an older report counts as unknown, and unknown is not full.
    """

    def __init__(self, prefill_ahead_s: float, load_max_age_s: float) -> None:
        self._prefill_ahead_s = prefill_ahead_s
        self._load_max_age_s = load_max_age_s
        self._prefills: dict[str, PrefillState] = {}
        self._decodes: dict[str, DecodeState] = {}
        self._unplaced: set[InFlight] = set()
        self._tokens_per_s = ASSUMED_TOKENS_PER_S
        self._residence = RatioMeter()
        """Seconds that a block stays with a request on decode."""
        self.num_inflight = 0
        self.is_measured = False
        """Whether any prefill worker's speed is known."""

    def set_workers(self, prefill_ids: Iterable[str], decode_ids: Iterable[str]) -> None:
        """The workers that requests may go to now."""
        self._prefills = {name: self._prefills.get(name, PrefillState()) for name in prefill_ids}
        self._decodes = {name: self._decodes.get(name, DecodeState()) for name in decode_ids}
        self._sum_speeds()

    @property
    def num_prefill(self) -> int:
        return len(self._prefills)

    @property
    def tokens_per_s(self) -> float:
        """Of all prefill workers together; those not measured count as the mean of others."""
        return self._tokens_per_s

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens in flight without a first token."""
        unplaced = sum([item.num_tokens for item in self._unplaced])
        return unplaced + sum([worker.tokens for worker in self._prefills.values()])

    def pace(self) -> Pace:
        """How fast a worker of each role is, assumed where nothing is measured."""
        s_per_token = max(1, len(self._prefills)) / self._tokens_per_s
        return Pace(s_per_token, self._residence.value or _ASSUMED_RESIDENCE_S)

    def unplaced(self) -> Work:
        """Requests that were released and have no workers yet, if there are any."""
        items = self._unplaced
        num_tokens = sum([item.num_tokens for item in items])
        return Work(len(items), num_tokens, sum([item.need_blocks for item in items]))

    # Events

    def released(self, item: InFlight) -> None:
        """It is about to be placed."""
        self._unplaced.add(item)
        self.num_inflight += 1

    def placed(self, item: InFlight, workers: Workers, num_uncached: int, now: float) -> None:
        """An attempt of it goes to these workers; a former attempt is over."""
        self._take_back(item)
        item.is_prefilled, item.num_uncached = False, num_uncached
        item.prefill = self._prefills.get(workers.prefill_id or "")
        item.decode = self._decodes.get(workers.decode_id)
        if item.prefill is not None:
            if not item.prefill.num_own:
                item.prefill.window_at = now
            item.prefill.add(item)
        if item.decode is not None:
            item.decode.add(item)

    def prefilled(self, item: InFlight, now: float) -> None:
        """The first token of its present attempt is there."""
        if item.is_prefilled:
            return
        item.is_prefilled, item.prefilled_at = True, now
        worker = item.prefill
        if worker is not None:
            own_share = worker.own_tokens / worker.tokens
            worker.add(item, -1)
            worker.speed.add(item.num_tokens, own_share * (now - worker.window_at))
            worker.window_at = now
            self._sum_speeds()

    def ended(self, item: InFlight, now: float) -> None:
        """It is over, whatever the reason."""
        if item.is_prefilled:
            block_seconds = item.need_blocks * (now - item.prefilled_at)
            self._residence.add(block_seconds, item.need_blocks, _RESIDENCE_DECAY)
        self._take_back(item)
        self.num_inflight -= 1

    def reported(self, worker_id: str, load: types_pb2.Load, now: float) -> None:
        """A worker's new load report."""
        prefill = self._prefills.get(worker_id)
        if prefill is not None:
            prefill.foreign_tokens = max(0, load.queued_tokens - prefill.own_uncached)
        decode = self._decodes.get(worker_id)
        if decode is not None:
            decode.report(load, now)

    # Questions

    def has_prefill_turn(self) -> bool:
        """Whether some prefill worker is near the end of its work."""
        if not self._prefills:
            return True
        mean_per_s = self._tokens_per_s / len(self._prefills)
        more = 0.0
        if self._unplaced:
            more = sum([item.num_tokens for item in self._unplaced]) / len(self._prefills)
        for worker in self._prefills.values():
            tokens = worker.tokens + more
            if tokens <= self._prefill_ahead_s * (worker.speed.value or mean_per_s):
                return True
        return False

    def has_room(self, need_blocks: int, now: float) -> bool:
        """Whether some decode worker has `need_blocks`, or nothing else to do, or is unknown."""
        more = 0.0
        if self._unplaced and self._decodes:
            more = sum([item.need_blocks for item in self._unplaced]) / len(self._decodes)
        for worker in self._decodes.values():
            if self._is_unknown(worker, now) or (worker.is_idle and not more):
                return True
            if worker.room(need_blocks) >= need_blocks + more:
                return True
        return not self._decodes

    def max_growth(self, num_choices: int) -> int:
        """How many blocks a request's output may count for, whatever is expected of it.

        Each choice has one: decode keeps them free for it.
        """
        total = max([worker.total_blocks for worker in self._decodes.values()], default=0)
        return max(num_choices, int(_MAX_GROWTH * total)) if total else _NO_LIMIT

    def blocks_short(self, need_blocks: float, now: float) -> float:
        """How many blocks of all decode workers must become free before `need_blocks` fit."""
        workers = self._decodes.values()
        if any(self._is_unknown(worker, now) for worker in workers):
            return 0.0
        unplaced = sum([item.need_blocks for item in self._unplaced])
        return max(0.0, need_blocks + unplaced - sum([worker.room(0) for worker in workers]))

    def blocks_per_s(self) -> float | None:
        """How fast blocks become free on full decode workers (Little's law); None: unknown."""
        residence_s = self._residence.value
        total = sum([worker.total_blocks for worker in self._decodes.values()])
        return total / residence_s if residence_s and total else None

    def _is_unknown(self, worker: DecodeState, now: float) -> bool:
        reported_at = worker.reported_at
        return reported_at is None or now - reported_at > self._load_max_age_s

    def _sum_speeds(self) -> None:
        speeds = [worker.speed.value for worker in self._prefills.values()]
        known = [speed for speed in speeds if speed is not None]
        self.is_measured = bool(known)
        mean = sum(known) / len(known) if known else ASSUMED_TOKENS_PER_S
        self._tokens_per_s = mean * max(1, len(speeds))

    def _take_back(self, item: InFlight) -> None:
        self._unplaced.discard(item)
        if item.prefill is not None and not item.is_prefilled:
            item.prefill.add(item, -1)
        if item.decode is not None:
            item.decode.remove(item)
        item.prefill = item.decode = None
