"""A decode worker around a real import table, step by step as decode_svc does it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from core.errors import BatonError, TransferError, Unavailable
from kvtransfer.base import BlockCopy, BlockPart
from kvtransfer.imports import Announcement, ImportTable, PoolActions
from tests.kvtransfer.hand_off.prefill import PrefillLife
from tests.kvtransfer.hand_off.world import (
    BLOCK_BYTES,
    DEADLINE_S,
    Address,
    Answer,
    Content,
    Dispatch,
    Key,
    Later,
    Life,
    World,
)

IMPORT_TIMEOUT_S = 30.0


@dataclass(eq=False)
class Read:
    """One read in flight. Each block is sampled at one moment and lands at a later one."""

    key: Key
    copies: list[BlockCopy]
    layers: range
    source: Life
    sampled: dict[BlockCopy, list[Content]] = field(default_factory=dict)
    landed: set[BlockCopy] = field(default_factory=set)
    is_given_up: bool = False


@dataclass(eq=False)
class Decoding:
    """One request."""

    dispatch: Dispatch
    expires_at: float
    later: Later = field(default_factory=Later)
    """Who asked for the grant."""
    held: list[int] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    """With `held`: of the open import."""
    is_granted: bool = False
    heard_at: float = 0.0
    news: deque[tuple[list[BlockCopy], range]] = field(default_factory=deque)
    has_last_news: bool = False
    announced: dict[int, Announcement] = field(default_factory=dict)
    asked_at: int | None = None
    """When, in world order, it began to ask whether the lease held."""
    is_released: bool = False
    block_table: list[int] | None = None
    """Once committed."""
    expected: list[Content] = field(default_factory=list)
    """Contents of `block_table`."""
    is_cancelled: bool = False
    """Its task ends as soon as it runs; until then the request can be found."""


class DecodeLife(Life):
    """One life of a decode worker."""

    def __init__(self, world: World, address: Address, num_parallel_reads: int) -> None:
        super().__init__(world, address)
        actions = PoolActions(self.pool.release, self.pool.quarantine, self.pool.settle)
        self.imports = ImportTable(IMPORT_TIMEOUT_S, BLOCK_BYTES, self.clock, actions)
        self.num_parallel_reads = num_parallel_reads
        self.requests: dict[Key, Decoding] = {}
        self.line: dict[Key, Decoding] = {}
        self.reads: list[Read] = []
        """All that have not settled."""
        self.quarantined: dict[Key, list[int]] = {}
        self.committed_news: dict[Key, dict[int, Announcement]] = {}

    @property
    def committed(self) -> list[Decoding]:
        return [r for r in self.requests.values() if r.block_table is not None]

    @property
    def num_open(self) -> int:
        return self.imports.num_open + len(self.requests)

    def keys(self) -> list[Key]:
        return list(self.requests)

    def knows(self, key: Key) -> bool:
        return key in self.requests

    def owners(self) -> list[list[int]]:
        tables = [r.held + r.fresh for r in self.requests.values() if r.is_granted]
        return super().owners() + tables + [r.block_table or [] for r in self.committed]

    def cancelled(self) -> list[Key]:
        return [key for key, request in self.requests.items() if request.is_cancelled]

    def may_land(self) -> set[int]:
        return {copy.destination for read in self.reads for copy in read.copies}

    # What the router says

    def decode(self, dispatch: Dispatch) -> None:
        if dispatch.key in self.seen:
            return
        self.seen.add(dispatch.key)
        self.taken_in.add(dispatch.key)
        self.requests[dispatch.key] = Decoding(dispatch, self.world.now + DEADLINE_S)

    def abort(self, key: Key) -> None:
        self.seen.add(key)
        self.cancel(key)

    # What prefill says

    def _require(self, key: Key) -> Decoding:
        if key not in self.requests:
            raise TransferError("unknown")
        return self.requests[key]

    def grant(self, key: Key, prefill_epoch: int, decode_epoch: int) -> int | Later:
        request = self._require(key)
        if (request.dispatch.prefill.epoch, self.address.epoch) != (prefill_epoch, decode_epoch):
            raise Unavailable("another life")
        if self.imports.has_ended(key):
            raise TransferError("it had its room")
        entry = self.imports.get(key)
        assert (entry is not None) == request.is_granted
        if entry is not None:
            assert (entry.held, entry.fresh) == (request.held, request.fresh)
            return len(entry.held)
        self.line.setdefault(key, request)
        return request.later

    def make_room(self) -> None:
        """Grants from the head of the line."""
        while self.line:
            key, request = next(iter(self.line.items()))
            prompt = request.dispatch.prompt
            held = self.pool.match_prefix(prompt.hashes)
            fresh = self.pool.reserve(held, len(prompt.words) - len(held))
            if fresh is None:
                return
            self.taken(fresh)
            del self.line[key]
            self.imports.grant(key, held, fresh)
            request.held, request.fresh, request.is_granted = list(held), list(fresh), True
            request.heard_at = self.world.now
            self._answer(request, len(held))

    def announce(self, key: Key, news: Announcement) -> None:
        request = self.requests.get(key)
        is_open = request is not None and request.is_granted
        announced = request.announced if is_open else self.committed_news.get(key, {})
        is_repeated = announced.get(news.sequence) == news
        try:
            copies = self.imports.announce(key, news)
        except BatonError:
            assert not is_repeated, "the repetition got another answer"
            raise
        assert (copies is None) == is_repeated
        if copies is None:
            self.world.seen["repeated announcement"] += 1
            return
        assert request is not None and is_open, "an announcement for an import that is over"
        request.announced[news.sequence] = news
        request.heard_at = self.world.now
        self.world.seen["announced in parts"] += news.part is not None
        part = news.part or BlockPart(0, BLOCK_BYTES)
        request.news.append((copies, range(part.offset, part.offset + part.num_bytes)))
        request.has_last_news = news.is_last
        if not request.is_cancelled:
            self.go_on(request)

    def revoke(self, key: Key, prefill_epoch: int) -> None:
        request = self.requests.get(key)
        if request is not None and request.dispatch.prefill.epoch == prefill_epoch:
            assert request.block_table is None, "prefill ends what decode has made its own"
            request.is_released = True
            self.cancel(key)

    # Reading

    def go_on(self, request: Decoding) -> None:
        """Begins what can begin: reads, then the release."""
        key = request.dispatch.key
        own = [read for read in self.reads if read.key == key]
        while request.news and len(own) < self.num_parallel_reads:
            copies, layers = request.news.popleft()
            if copies:
                self.imports.begin_read(key)
                source = self.world.all_lives[request.dispatch.prefill]
                own.append(Read(key, copies, layers, source))
                self.reads.append(own[-1])
        if request.has_last_news and not own and not request.news and request.asked_at is None:
            request.asked_at = self.world.next_moment()
            self.imports.begin_release(key)
            self.tell(
                request.dispatch.prefill.name,
                "release",
                key,
                on_answer=lambda answer: self._released(request, answer),
            )

    def sample(self, read: Read, copy: BlockCopy) -> None:
        """The transport takes what stands at the source now, if it is still there."""
        if read.source.is_alive and copy not in read.sampled:
            held = read.source.memory[copy.source]
            read.sampled[copy] = [held[layer] for layer in read.layers]

    def land(self, read: Read, copy: BlockCopy) -> None:
        if copy in read.sampled and copy not in read.landed:
            read.landed.add(copy)
            for layer, content in zip(read.layers, read.sampled[copy], strict=True):
                self.memory[copy.destination][layer] = content

    def move(self, read: Read) -> None:
        """The next thing that happens to a read which goes well."""
        for copy in read.copies:
            if copy not in read.landed and read.source.is_alive and not read.is_given_up:
                step = self.land if copy in read.sampled else self.sample
                step(read, copy)
                return
        self.end_read(read)

    def end_read(self, read: Read) -> None:
        """To its end, if it can come to one: all lands, or the peer's death is noticed.

        Nothing of a given-up read can land any more after this.
        """
        if read.is_given_up:
            self._settle(read)
            return
        if self.requests[read.key].is_cancelled:
            return
        for copy in read.copies:
            self.sample(read, copy)
            self.land(read, copy)
        if len(read.landed) < len(read.copies):
            self.fail(read.key)
            return
        self.reads.remove(read)
        self.imports.end_read(read.key, len(read.copies))
        self.go_on(self.requests[read.key])

    def _settle(self, read: Read) -> None:
        self.reads.remove(read)
        self.imports.end_read(read.key, 0)
        if all(other.key != read.key for other in self.reads):
            del self.quarantined[read.key]
        self.world.seen["settled"] += 1

    def renew(self) -> None:
        for key, request in self.requests.items():
            if request.is_granted and not request.is_released:
                self.world.send(request.dispatch.prefill.name, "renew", key)

    def _released(self, request: Decoding, answer: Answer) -> None:
        key = request.dispatch.key
        if self.requests.get(key) is not request or request.is_cancelled:
            return
        if isinstance(answer, BatonError):
            self.fail(key)
            return
        request.is_released = True
        blocks = self.imports.commit(key, answer)
        assert (blocks is not None) == answer
        request.is_granted = False
        if blocks is None:
            self.fail(key)
            return
        self._check_lease(request)
        self._commit(request, blocks.block_table)

    def _check_lease(self, request: Decoding) -> None:
        """The lease must have ended unbroken, and only after everything was read."""
        source = self.world.all_lives[request.dispatch.prefill]
        assert isinstance(source, PrefillLife)
        released_at = source.released_at.get(request.dispatch.key, 0)
        assert request.asked_at is not None
        assert released_at > request.asked_at, "what was read after the lease is accepted"

    def _commit(self, request: Decoding, block_table: list[int]) -> None:
        prompt = request.dispatch.prompt
        assert block_table == request.held + request.fresh
        request.block_table = block_table
        self.committed_news[request.dispatch.key] = request.announced
        request.expected = [prompt.content(index) for index in range(len(prompt.words))]
        self._check_content(request)
        self.cache(prompt, block_table, len(prompt.words))
        self.world.seen["committed"] += 1

    # Decoding

    def grow(self, request: Decoding) -> None:
        """The next token's KV, into the last block or one more."""
        assert request.block_table is not None
        if request.expected[-1][-1] != "part":
            fresh = self.pool.allocate(1)
            if fresh is None:
                return
            self.taken(fresh)
            request.block_table += fresh
            request.expected.append(())
        request.expected[-1] = (request.dispatch.key, len(request.expected))
        self.write(request.block_table[-1], request.expected[-1])

    def finish(self, request: Decoding) -> None:
        self.pool.release(reversed(request.block_table or []))
        self._end(request, "finished")

    def cancel(self, key: Key) -> None:
        if key in self.requests:
            self.requests[key].is_cancelled = True

    def fail(self, key: Key) -> None:
        request = self.requests[key]
        self.line.pop(key, None)
        self.imports.abort(key)
        self._given_up(request)
        self.pool.release(reversed(request.block_table or []))
        if not request.is_released:
            self.world.send(request.dispatch.prefill.name, "release", key)
        self._end(request, "failed")

    def report_damage(self, key: Key) -> None:
        """A digest differs: prefill hears of it with the release, and the request fails."""
        request = self.requests[key]
        self.world.send(request.dispatch.prefill.name, "release", key, 0)
        request.is_released = True
        self.fail(key)

    def _given_up(self, request: Decoding) -> None:
        """Notes what the import's end does to the blocks."""
        if not request.is_granted:
            return
        request.is_granted = False
        for read in self.reads:
            if read.key == request.dispatch.key:
                read.is_given_up = True
                self.quarantined[read.key] = request.fresh
                self.world.seen["given up in a read"] += 1

    def _end(self, request: Decoding, outcome: str) -> None:
        key = request.dispatch.key
        del self.requests[key]
        assert self.outcomes.setdefault(key, outcome) == outcome
        self._answer(request, TransferError("over"))

    def _answer(self, request: Decoding, answer: Answer) -> None:
        """To all who asked for the grant and still wait."""
        for call in request.later.calls:
            self.world.reply(call, answer)
        request.later.calls.clear()

    # Time

    def reap(self) -> None:
        for key in self.imports.reap():
            request = self.requests[key]
            assert self.world.now > request.heard_at + IMPORT_TIMEOUT_S, "an import ended too early"
            self.world.seen["import expired"] += 1
            self._given_up(request)
            self.cancel(key)
        for key, request in self.requests.items():
            is_late = request.is_granted and self.world.now > request.heard_at + IMPORT_TIMEOUT_S
            assert not is_late, "an import outlives the silence of its prefill"
            if self.world.now > request.expires_at:
                self.cancel(key)

    def check(self) -> None:
        super().check()
        stats = self.pool.stats()
        assert stats.quarantined == sum(map(len, self.quarantined.values()))
        num_granted = sum(request.is_granted for request in self.requests.values())
        assert self.imports.num_open == num_granted + len(self.quarantined)
        for request in self.committed:
            self._check_content(request)
        for read in self.reads:
            self._check_destinations(read)

    def _check_content(self, request: Decoding) -> None:
        table = request.block_table or []
        assert len(table) == len(request.expected)
        is_right = all(map(self.holds, table, request.expected))
        assert is_right, f"{request.dispatch.key} decodes on wrong KV"

    def _check_destinations(self, read: Read) -> None:
        request = self.requests.get(read.key)
        is_import = request is not None and request.is_granted
        owned = request.fresh if request and is_import else self.quarantined[read.key]
        assert {copy.destination for copy in read.copies} <= set(owned)
