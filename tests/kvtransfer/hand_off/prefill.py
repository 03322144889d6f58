"""A prefill worker around a real export table, step by step as prefill_svc/service.py does it."""

from __future__ import annotations

from dataclasses import dataclass, field

from core.errors import BatonError
from kvtransfer.exports import ExportTable, LeaseConfig
from kvtransfer.imports import Announcement
from tests.kvtransfer.hand_off.world import (
    DEADLINE_S,
    Address,
    Answer,
    Dispatch,
    Key,
    Life,
    World,
)

LEASE = LeaseConfig(lease_s=4.0, max_lease_s=7.0, pin_s=25.0)


@dataclass(eq=False)
class Prefilling:
    """One request."""

    dispatch: Dispatch
    expires_at: float
    is_granted: bool = False
    next_block: int = 0
    sequence: int = 0
    blocks: list[int] = field(default_factory=list)
    """The export's and, until the first token, the sequence's."""
    is_sequence_alive: bool = True
    num_computed: int = 0
    num_unanswered: int = 0
    """Announcements on their way."""
    is_announced: bool = False
    """The last announcement is sent."""
    is_cancelled: bool = False
    """Its task ends as soon as it runs; the engine goes on until then."""


@dataclass
class Lease:
    """What this test believes about one open export."""

    blocks: list[int]
    until: float
    cap: float | None = None
    """Set when everything is announced."""


class PrefillLife(Life):
    """One life of a prefill worker."""

    def __init__(self, world: World, address: Address, num_unanswered: int) -> None:
        super().__init__(world, address)
        self.max_unanswered = num_unanswered
        self.exports = ExportTable(LEASE, self.clock, self.pool.acquire, self.pool.release)
        self.requests: dict[Key, Prefilling] = {}
        self.leases: dict[Key, Lease] = {}
        self.answers: dict[Key, tuple[bool, float]] = {}
        """What `Release` has to answer for an ended export, and until when at least."""
        self.released_at: dict[Key, int] = {}
        """When, in world order, an export ended with its lease unbroken."""

    @property
    def num_open(self) -> int:
        return self.exports.num_open + len(self.requests)

    def keys(self) -> list[Key]:
        return list(self.requests)

    def knows(self, key: Key) -> bool:
        return key in self.leases or key in self.requests

    def owners(self) -> list[list[int]]:
        sequences = [r.blocks for r in self.requests.values() if r.is_sequence_alive]
        return super().owners() + sequences + [lease.blocks for lease in self.leases.values()]

    def cancelled(self) -> list[Key]:
        return [key for key, request in self.requests.items() if request.is_cancelled]

    # What the router says

    def prefill(self, dispatch: Dispatch) -> None:
        if dispatch.key in self.seen:
            return
        self.seen.add(dispatch.key)
        request = Prefilling(dispatch, self.world.now + DEADLINE_S)
        self.requests[dispatch.key] = request
        self.taken_in.add(dispatch.key)
        self.call(
            dispatch.decode.name,
            "grant",
            dispatch.key,
            self.address.epoch,
            dispatch.decode.epoch,
            on_answer=lambda answer: self._granted(request, answer),
            timeout_s=DEADLINE_S,
        )

    def abort(self, key: Key) -> None:
        self.seen.add(key)
        self._revoke(key)
        self.cancel(key)

    # The request

    def _is_running(self, request: Prefilling) -> bool:
        is_known = self.requests.get(request.dispatch.key) is request
        return is_known and not request.is_cancelled

    def _granted(self, request: Prefilling, answer: Answer) -> None:
        if not self._is_running(request):
            return
        key = request.dispatch.key
        if isinstance(answer, BatonError):
            self.fail(key)
            return
        self.exports.open(key)
        self.leases[key] = Lease([], self.world.now + LEASE.pin_s)
        request.is_granted = True
        request.next_block = answer

    def compute(self, request: Prefilling) -> None:
        """A step of the engine for one prompt: its blocks first, then one block's KV."""
        prompt = request.dispatch.prompt
        if not request.blocks:
            reusable = prompt.hashes[: len(prompt.words) - 1]
            held = self.pool.match_prefix(reusable)
            fresh = self.pool.reserve(held, len(prompt.words) - len(held))
            if fresh is None:
                return
            request.blocks = held + fresh
            request.num_computed = len(held)
            self._pin(request)
            return
        block = request.blocks[request.num_computed]
        self.memory[block] = prompt.content(request.num_computed)
        request.num_computed += 1
        self.cache(prompt, request.blocks, request.num_computed)
        if request.num_computed == len(prompt.words):
            request.is_sequence_alive = False
            self.pool.release(reversed(request.blocks))
        if not request.is_cancelled:
            self._announce(request)

    def _pin(self, request: Prefilling) -> None:
        key = request.dispatch.key
        self.exports.pin(key, request.blocks)
        if (lease := self.leases.get(key)) is not None:
            lease.blocks = list(request.blocks)
            lease.until = self.world.now + LEASE.pin_s

    def _announce(self, request: Prefilling) -> None:
        """What has become final since, with few enough messages on their way."""
        dispatch = request.dispatch
        is_last = not request.is_sequence_alive
        has_news = is_last or request.num_computed > request.next_block
        is_busy = request.num_unanswered == self.max_unanswered
        if request.is_announced or is_busy or not has_news:
            return
        if is_last and dispatch.prompt.ends_at_first_token:
            self._revoke(dispatch.key)
            self.call(dispatch.decode.name, "revoke", dispatch.key)
            self._end(dispatch.key, "finished")
            return
        if is_last and not self._begin_lease(dispatch.key):
            self.fail(dispatch.key)
            return
        end = request.num_computed
        blocks = request.blocks[request.next_block : end]
        news = Announcement(request.sequence, request.next_block, blocks, is_last)
        request.num_unanswered += 1
        request.is_announced = is_last
        request.next_block, request.sequence = end, request.sequence + 1
        self.call(
            dispatch.decode.name,
            "announce",
            dispatch.key,
            news,
            on_answer=lambda answer: self._announced(request, news, answer),
        )

    def _begin_lease(self, key: Key) -> bool:
        is_open = self.exports.announced(key)
        assert is_open == (key in self.leases)
        if is_open:
            now = self.world.now
            self.leases[key] = Lease(
                self.leases[key].blocks, now + LEASE.lease_s, now + LEASE.max_lease_s
            )
        return is_open

    def _announced(self, request: Prefilling, news: Announcement, answer: Answer) -> None:
        if not self._is_running(request):
            return
        request.num_unanswered -= 1
        if isinstance(answer, BatonError):
            self.fail(request.dispatch.key)
        elif news.is_last:
            self._end(request.dispatch.key, "finished")
        elif request.num_computed > 0:
            self._announce(request)

    def cancel(self, key: Key) -> None:
        if key in self.requests:
            self.requests[key].is_cancelled = True

    def fail(self, key: Key) -> None:
        request = self.requests[key]
        self._revoke(key)
        self.call(request.dispatch.decode.name, "revoke", key)
        self._end(key, "failed")

    def _end(self, key: Key, outcome: str) -> None:
        request = self.requests.pop(key)
        if request.is_sequence_alive:
            self.pool.release(reversed(request.blocks))
        assert self.outcomes.setdefault(key, outcome) == outcome

    def _revoke(self, key: Key) -> None:
        assert self.exports.revoke(key) == (key in self.leases)
        self._ended(key, False)

    def _ended(self, key: Key, answer: bool) -> None:
        if self.leases.pop(key, None) is not None:
            self.answers[key] = (answer, self.world.now + LEASE.max_lease_s)

    # What decode says

    def release(self, key: Key) -> bool:
        lease = self.leases.get(key)
        expected, remembered_until = self.answers.get(key, (False, 0.0))
        if lease is not None:
            expected = lease.cap is not None and self.world.now <= lease.until
        answer = self.exports.release(key)
        if answer or lease is not None or self.world.now <= remembered_until:
            assert answer == expected, f"release of {key}"
        if lease is not None:
            self.world.seen["lease held" if answer else "lease lost"] += 1
            if answer:
                self.released_at[key] = self.world.next_moment()
        else:
            self.world.seen["stale release"] += 1
        self._ended(key, answer)
        if not answer:
            self.cancel(key)
        return answer

    def renew(self, key: Key) -> bool:
        lease = self.leases.get(key)
        answer = self.exports.renew(key)
        assert answer == (lease is not None and self.world.now <= lease.until)
        if answer and lease is not None and lease.cap is not None:
            lease.until = min(self.world.now + LEASE.lease_s, lease.cap)
            self.world.seen["renewed"] += 1
        return answer

    # Time

    def reap(self) -> None:
        for export in self.exports.reap():
            assert self.world.now > self.leases[export.key].until, "a lease ended too early"
            self.world.seen["export expired"] += 1
            self._ended(export.key, False)
            self.cancel(export.key)
        for lease in self.leases.values():
            assert self.world.now <= lease.until, "an export outlives its lease"
        for key, request in list(self.requests.items()):
            if self.world.now > request.expires_at:
                self.cancel(key)

    def check(self) -> None:
        super().check()
        assert self.exports.num_open == len(self.leases)
        pinned = sum(len(lease.blocks) for lease in self.leases.values())
        assert self.exports.num_pinned_blocks == pinned
