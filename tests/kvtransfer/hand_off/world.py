"""Simulated workers and the channel between them; time and chance belong to the test.

A worker's life is an object: a crash replaces it by a new one under the next epoch, with
empty tables, an empty pool and zeroed memory. A message goes to a *name*, so it may reach a
later life than the one it was meant for. Memory holds words in place of KV: what stands in
a block says whose prompt it belongs to. A block has two layers of a byte each.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from core.errors import BatonError, Unreachable
from engine.block_pool import BlockPool

NUM_BLOCKS = 8
NUM_LAYERS = BLOCK_BYTES = 2
LAYERS = range(NUM_LAYERS)
CONTROL_TIMEOUT_S = 10.0
NUM_TRIES = 3
MAX_MESSAGE_AGE_S = 20.0
"""Longer than any answer is awaited, shorter than ends are remembered."""
DEADLINE_S = 90.0

Key = tuple[str, int]
Content = tuple[object, ...]
Answer = Any


@dataclass(frozen=True)
class Address:
    """One life of a worker."""

    name: str
    epoch: int


@dataclass(frozen=True)
class Prompt:
    """One word for each block; equal beginnings are equal KV."""

    words: str
    is_last_full: bool = True
    ends_at_first_token: bool = False

    def content(self, index: int) -> Content:
        """What every layer of block `index` must hold."""
        is_partial = index == len(self.words) - 1 and not self.is_last_full
        return (self.words[: index + 1], "part" if is_partial else "full")

    @cached_property
    def hashes(self) -> list[bytes]:
        """Of the full blocks."""
        num_full = len(self.words) - (not self.is_last_full)
        return [self.words[: index + 1].encode() for index in range(num_full)]


@dataclass(frozen=True)
class Dispatch:
    """What the router tells both workers of one attempt."""

    key: Key
    prompt: Prompt
    prefill: Address
    decode: Address


@dataclass(eq=False)
class Call:
    """A question that `asker` waits for, at most until `expires_at`."""

    asker: Life
    on_answer: Callable[[Answer], None]
    expires_at: float
    is_over: bool = False

    def end(self, answer: Answer) -> None:
        if not self.is_over and self.asker.is_alive:
            self.is_over = True
            self.on_answer(answer)


@dataclass(frozen=True, eq=False)
class Message:
    """`method(*arguments)` for whoever is called `to`; without a method, the answer to `call`."""

    sent_at: float
    to: str = ""
    method: str = ""
    arguments: tuple[Any, ...] = ()
    call: Call | None = None
    answer: Answer = None


class Life(ABC):
    """One life of a worker: what both roles have."""

    def __init__(self, world: World, address: Address) -> None:
        self.world = world
        self.address = address
        self.is_alive = True
        self.pool = BlockPool(NUM_BLOCKS, block_size=1)
        self.memory: list[list[Content]] = [[()] * NUM_LAYERS for _ in range(NUM_BLOCKS)]
        self.seen: set[Key] = set()
        """Dispatches that came or were aborted early; a repetition starts nothing."""
        self.strangers: list[tuple[list[int], Content]] = []
        """Blocks of sequences that have nothing to do with a hand-off, and what is in them."""
        self.outcomes: dict[Key, str] = {}
        """Of every dispatch that was taken."""
        self.taken_in: set[Key] = set()

    def clock(self) -> float:
        """No two workers' clocks agree."""
        return self.world.now + 1000.0 * self.address.epoch

    def ask(
        self,
        to: str,
        method: str,
        *arguments: Any,
        on_answer: Callable[[Answer], None],
        timeout_s: float = CONTROL_TIMEOUT_S,
    ) -> None:
        """Sends a question; `on_answer` gets the answer, or the error that took its place."""
        call = Call(self, on_answer, self.world.now + timeout_s)
        self.world.calls.append(call)
        self.world.send(to, method, *arguments, call=call)

    def tell(
        self,
        to: str,
        method: str,
        *arguments: Any,
        on_answer: Callable[[Answer], None],
        num_tries: int = NUM_TRIES,
    ) -> None:
        """`ask`, and again when the question or its answer may have been lost."""

        def answered(answer: Answer) -> None:
            if isinstance(answer, Unreachable) and num_tries > 1:
                self.world.seen["told again"] += 1
                self.tell(to, method, *arguments, on_answer=on_answer, num_tries=num_tries - 1)
            else:
                on_answer(answer)

        self.ask(to, method, *arguments, on_answer=answered)

    def write(self, block: int, content: Content, layers: range = LAYERS) -> None:
        for layer in layers:
            self.memory[block][layer] = content

    def holds(self, block: int, content: Content) -> bool:
        return all(held == content for held in self.memory[block])

    def occupy(self, count: int) -> None:
        blocks = self.pool.allocate(count)
        if blocks is not None:
            self.taken(blocks)
            self.world.num_strangers += 1
            content = ("stranger", self.world.num_strangers)
            for block in blocks:
                self.write(block, content)
            self.strangers.append((blocks, content))

    def vacate(self) -> None:
        if self.strangers:
            self.pool.release(self.strangers.pop(0)[0])

    def cache(self, prompt: Prompt, blocks: list[int], num_blocks: int) -> None:
        """Makes the first `num_blocks` findable, as far as they are full."""
        for index, block_hash in enumerate(prompt.hashes[:num_blocks]):
            parent = prompt.hashes[index - 1] if index else None
            self.pool.cache(blocks[index], block_hash, parent)

    def may_land(self) -> set[int]:
        """Blocks that a read may still write to."""
        return set()

    def taken(self, blocks: list[int]) -> None:
        """Checks what the pool has just given out."""
        assert not self.may_land() & set(blocks), "given out while a read may land in it"

    def owners(self) -> list[list[int]]:
        """Block lists, one reference each."""
        return [blocks for blocks, _ in self.strangers]

    @property
    @abstractmethod
    def num_open(self) -> int:
        """Hand-offs and requests that are not over."""

    @abstractmethod
    def keys(self) -> list[Key]:
        """Of the requests that run."""

    @abstractmethod
    def knows(self, key: Key) -> bool:
        """Whether a message about this attempt may change anything."""

    @abstractmethod
    def cancel(self, key: Key) -> None:
        """Ends a request when its task runs next, if it is known."""

    @abstractmethod
    def cancelled(self) -> list[Key]:
        """Requests whose tasks have not heard of it yet."""

    @abstractmethod
    def fail(self, key: Key) -> None:
        """The request's task raises, or hears that it is cancelled."""

    @abstractmethod
    def reap(self) -> None:
        """Ends what is over by this worker's clock, and only that."""

    def snapshot(self) -> object:
        """What a stale message must not change."""
        references = [self.pool.num_references(block) for block in range(NUM_BLOCKS)]
        return (references, self.pool.stats(), self.num_open, len(self.outcomes))

    def check(self) -> None:
        """What holds after every step."""
        assert self.pool.audit() == []
        references = Counter(block for blocks in self.owners() for block in blocks)
        for block in range(NUM_BLOCKS):
            assert self.pool.num_references(block) == references[block], f"owners of {block}"
        for blocks, content in self.strangers:
            assert all(self.holds(block, content) for block in blocks)
        for prompt in self.world.prompts:
            for index, block in enumerate(self.pool.match_prefix(prompt.hashes)):
                assert self.holds(block, prompt.content(index)), "the prefix cache is wrong"


@dataclass
class World:
    """All lives, all messages, one time."""

    prompts: list[Prompt]
    now: float = 0.0
    messages: list[Message] = field(default_factory=list)
    """On their way."""
    delivered: list[Message] = field(default_factory=list)
    """Young enough to come again."""
    calls: list[Call] = field(default_factory=list)
    lives: dict[str, Life] = field(default_factory=dict)
    all_lives: dict[Address, Life] = field(default_factory=dict)
    num_strangers: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    """How often something worth seeing happened."""

    num_moments: int = 0

    def next_moment(self) -> int:
        """Numbers that say what came before what."""
        self.num_moments += 1
        return self.num_moments

    def add(self, life: Life) -> None:
        """A new life; the one before under this name is over."""
        before = self.lives.get(life.address.name)
        if before is not None:
            before.is_alive = False
        self.lives[life.address.name] = life
        self.all_lives[life.address] = life

    def send(self, to: str, method: str, *arguments: Any, call: Call | None = None) -> None:
        self.messages.append(Message(self.now, to, method, arguments, call))

    def deliver(self, message: Message) -> None:
        if not message.method:
            assert message.call is not None
            message.call.end(message.answer)
            return
        life = self.lives[message.to]
        try:
            answer = getattr(life, message.method)(*message.arguments)
        except BatonError as error:
            self.seen["refused"] += 1
            answer = error
        if isinstance(answer, Later):
            answer.calls.append(message.call)
        else:
            self.reply(message.call, answer)

    def reply(self, call: Call | None, answer: Answer) -> None:
        if call is not None:
            self.messages.append(Message(self.now, call=call, answer=answer))

    def advance(self, seconds: float) -> None:
        """Time passes: old messages are lost, calls without an answer fail."""
        self.now += seconds
        oldest = self.now - MAX_MESSAGE_AGE_S
        self.messages = [message for message in self.messages if message.sent_at >= oldest]
        self.delivered = [message for message in self.delivered if message.sent_at >= oldest]
        late = [call for call in self.calls if call.expires_at < self.now]
        for call in late:
            call.end(Unreachable("no answer came in time"))
        self.calls = [call for call in self.calls if not call.is_over and call.asker.is_alive]


@dataclass
class Later:
    """An answer that is given later, to all who have asked by then."""

    calls: list[Call | None] = field(default_factory=list)
