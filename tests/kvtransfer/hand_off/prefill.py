"""A prefill worker around a real export table, step by step as prefill_svc/service.py does it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from core.errors import BatonError, Unreachable
from engine.batch import SampledToken
from kvtransfer.exports import ExportTable, LeaseConfig
from kvtransfer.imports import Announcement
from prefill_svc.progress import Pieces, Progress
from tests.kvtransfer.hand_off.world import (
    BLOCK_BYTES,
    DEADLINE_S,
    NUM_LAYERS,
    Address,
    Answer,
    Dispatch,
    Key,
    Life,
    World,
)
from worker.first_tokens import FirstToken

FIRST_TOKENS = (FirstToken(0, SampledToken(0), None),)
LEASE = LeaseConfig(lease_s=4.0, max_lease_s=7.0, pin_s=25.0)


@dataclass(eq=False)
class Prefilling:
    """One request."""

    dispatch: Dispatch
    expires_at: float
    pieces: Pieces | None = None
    """What to announce; set with the grant."""
    progress: deque[Progress] = field(default_factory=deque)
    blocks: list[int] = field(default_factory=list)
    """The export's and, until the first token, the sequence's."""
    is_sequence_alive: bool = True
    num_computed: int = 0
    has_half_a_block: bool = False
    """The first layer of the next block is computed."""
    num_unanswered: int = 0
    """Announcements on their way."""
    is_released: bool = False
    """Decode has read everything under the lease."""
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
        self.ask(
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
        request.pieces = Pieces(answer, NUM_LAYERS, BLOCK_BYTES)

    def can_compute(self, request: Prefilling) -> bool:
        return request.pieces is not None and request.is_sequence_alive

    def compute(self, request: Prefilling, num_layers: int) -> None:
        """A step of the engine for one prompt, or half of it: its blocks first, then KV."""
        prompt = request.dispatch.prompt
        if not request.blocks:
            self._allocate(request)
            return
        done = int(request.has_half_a_block)
        num_layers = max(done + 1, num_layers)
        content = prompt.content(request.num_computed)
        self.write(request.blocks[request.num_computed], content, range(done, num_layers))
        request.has_half_a_block = num_layers < NUM_LAYERS
        end, firsts = request.num_computed + 1, ()
        if not request.has_half_a_block:
            request.num_computed = end
            self.cache(prompt, request.blocks, end)
            if end == len(prompt.words):
                firsts = FIRST_TOKENS
                request.is_sequence_alive = False
                self.pool.release(reversed(request.blocks))
        request.progress.append(Progress(end, num_layers, firsts))
        if not request.is_cancelled:
            self._announce(request)

    def _allocate(self, request: Prefilling) -> None:
        words, hashes = request.dispatch.prompt.words, request.dispatch.prompt.hashes
        held = self.pool.match_prefix(hashes[: len(words) - 1])
        fresh = self.pool.reserve(held, len(words) - len(held))
        if fresh is not None:
            request.blocks = held + fresh
            request.num_computed = len(held)
            self._pin(request)

    def _pin(self, request: Prefilling) -> None:
        key = request.dispatch.key
        self.exports.pin(key, request.blocks)
        if (lease := self.leases.get(key)) is not None:
            lease.blocks = list(request.blocks)
            lease.until = self.world.now + LEASE.pin_s

    def _announce(self, request: Prefilling) -> None:
        """What has become final since, with few enough messages on their way."""
        dispatch = request.dispatch
        while request.progress and request.num_unanswered < self.max_unanswered:
            progress = request.progress.popleft()
            is_last = bool(progress.first_tokens)
            if is_last and dispatch.prompt.ends_at_first_token:
                self._revoke(dispatch.key)
                self.world.send(dispatch.decode.name, "revoke", dispatch.key, self.address.epoch)
                self._end(dispatch.key, "finished")
                return
            assert request.pieces is not None
            piece = request.pieces.due(progress)
            if piece is None:
                continue
            if is_last and not self._begin_lease(dispatch.key):
                self.fail(dispatch.key)
                return
            blocks = request.blocks[piece.first : piece.end]
            news = Announcement(piece.sequence, piece.first, blocks, is_last, piece.part)
            self._send(request, news)

    def _send(self, request: Prefilling, news: Announcement) -> None:
        request.num_unanswered += 1
        self.tell(
            request.dispatch.decode.name,
            "announce",
            request.dispatch.key,
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
        is_heard = request.is_released and isinstance(answer, Unreachable)
        if isinstance(answer, BatonError) and not is_heard:
            self.fail(request.dispatch.key)
        elif news.is_last:
            self._end(request.dispatch.key, "finished")
        else:
            self._announce(request)

    def cancel(self, key: Key) -> None:
        if key in self.requests:
            self.requests[key].is_cancelled = True

    def fail(self, key: Key) -> None:
        request = self.requests[key]
        self._revoke(key)
        if not request.is_released:
            self.world.send(request.dispatch.decode.name, "revoke", key, self.address.epoch)
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

    def release(self, key: Key, first_damaged: int | None = None) -> bool:
        lease = self.leases.get(key)
        trusted = self.exports.trusted_blocks(key)
        is_trusted = lease is not None and self.world.now <= lease.until
        assert trusted == (lease.blocks if lease is not None and is_trusted else [])
        if first_damaged is not None:
            self.pool.drop_blocks(trusted[first_damaged:])
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
        request = self.requests.get(key)
        if request is not None and not request.is_released:
            request.is_released = answer
            request.is_cancelled |= not answer
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
