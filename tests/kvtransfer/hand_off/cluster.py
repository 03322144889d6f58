"""Two prefill and two decode workers, a router of no manners, and what can happen to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from core.errors import Unreachable
from tests.kvtransfer.hand_off.decode import DecodeLife, Read
from tests.kvtransfer.hand_off.prefill import PrefillLife
from tests.kvtransfer.hand_off.world import (
    DEADLINE_S,
    NUM_BLOCKS,
    NUM_LAYERS,
    Address,
    Call,
    Dispatch,
    Message,
    Prompt,
    World,
)

PREFILLS, DECODES = ("p0", "p1"), ("d0", "d1")
WORKERS = PREFILLS + DECODES


class Cluster:
    """A world with workers in it. Every method is one thing that happens."""

    def __init__(self, prompts: list[Prompt], num_parallel: int) -> None:
        """`num_parallel`: announcements and reads that one request may have in flight."""
        self.world = World(prompts)
        self._num_parallel = num_parallel
        self.dispatches: list[Dispatch] = []
        for name in WORKERS:
            self._begin_life(Address(name, epoch=1))

    def _begin_life(self, address: Address) -> None:
        if address.name in PREFILLS:
            self.world.add(PrefillLife(self.world, address, self._num_parallel))
        else:
            self.world.add(DecodeLife(self.world, address, self._num_parallel))

    @property
    def prefills(self) -> list[PrefillLife]:
        return [life for life in self.world.lives.values() if isinstance(life, PrefillLife)]

    @property
    def decodes(self) -> list[DecodeLife]:
        return [life for life in self.world.lives.values() if isinstance(life, DecodeLife)]

    @property
    def reads(self) -> list[tuple[DecodeLife, Read]]:
        return [(life, read) for life in self.decodes for read in life.reads]

    # The router

    def submit(self, prompt: Prompt, prefill: str, decode: str) -> None:
        self._dispatch((f"r{len(self.dispatches)}", 1), prompt, prefill, decode)

    def try_again(self, dispatch: Dispatch, prefill: str, decode: str) -> None:
        """Under a new attempt, whatever has become of the others."""
        request_id = dispatch.key[0]
        attempts = [other.key[1] for other in self.dispatches if other.key[0] == request_id]
        self._dispatch((request_id, max(attempts) + 1), dispatch.prompt, prefill, decode)

    def _dispatch(self, key: tuple[str, int], prompt: Prompt, prefill: str, decode: str) -> None:
        lives = self.world.lives
        dispatch = Dispatch(key, prompt, lives[prefill].address, lives[decode].address)
        self.dispatches.append(dispatch)
        self.world.send(decode, "decode", dispatch)
        self.world.send(prefill, "prefill", dispatch)

    def abort(self, dispatch: Dispatch) -> None:
        for address in (dispatch.prefill, dispatch.decode):
            self.world.send(address.name, "abort", dispatch.key)

    # The channel

    def deliver(self, message: Message) -> None:
        self.world.messages.remove(message)
        self.world.delivered.append(message)
        self.repeat(message)

    def repeat(self, message: Message) -> None:
        """Delivers it, for the first time or again. One that is stale must change nothing."""
        life = self.world.lives.get(message.to)
        is_about_a_request = message.method in ("grant", "announce", "revoke", "release", "renew")
        if life is None or not is_about_a_request or life.knows(message.arguments[0]):
            self.world.deliver(message)
            return
        before = life.snapshot()
        self.world.deliver(message)
        assert life.snapshot() == before, f"a stale {message.method} changed something"
        self.world.seen["stale message"] += 1

    def replay(self, name: str) -> None:
        """Everything that was said to a worker of late, once more and in order."""
        for message in self.world.delivered[:]:
            if message.to == name:
                self.repeat(message)
                self.make_room()

    def break_call(self, index: int) -> None:
        """The asker hears of an error, whatever has become of the question."""
        self.world.calls[index].end(Unreachable("the connection broke"))

    def cut_off(self, name: str) -> None:
        """One worker gets no more answers, however often it asks."""
        calls = self.world.calls
        while (call := next((c for c in calls if self._is_open(c, name)), None)) is not None:
            call.end(Unreachable("the network is away"))

    def _is_open(self, call: Call, name: str) -> bool:
        return call.asker is self.world.lives[name] and not call.is_over

    # Workers

    def crash(self, name: str) -> None:
        """All that it held and knew is gone; it comes back at once."""
        address = self.world.lives[name].address
        self._begin_life(replace(address, epoch=address.epoch + 1))
        self.world.seen["crash"] += 1

    def stall(self, seconds: int, is_renewing: bool) -> None:
        """A while in which nothing gets on; decode renews the leases, or cannot even do that."""
        for _ in range(seconds):
            self.world.advance(1.0)
            if is_renewing:
                self._renew()

    def _renew(self) -> None:
        num_before = len(self.world.messages)
        for life in self.decodes:
            life.renew()
        for message in self.world.messages[num_before:]:
            self.deliver(message)

    def make_room(self) -> None:
        for life in self.decodes:
            life.make_room()

    def computations(self, num_layers: int = NUM_LAYERS) -> list[Callable[[], None]]:
        """Every step that an engine of prefill could make, or only its first layers."""
        return [
            lambda life=life, request=request: life.compute(request, num_layers)  # type: ignore[misc]
            for life in self.prefills
            for request in life.requests.values()
            if life.can_compute(request)
        ]

    def burials(self) -> list[Callable[[], None]]:
        """Tasks that have been cancelled and run now."""
        return [
            lambda life=life, key=key: life.fail(key)  # type: ignore[misc]
            for life in self.world.lives.values()
            for key in life.cancelled()
        ]

    def natural_actions(self) -> list[Callable[[], None]]:
        """Everything that brings the hand-offs on, in the order that it would come about."""
        deliveries = [
            lambda message=message: self.deliver(message) for message in self.world.messages
        ]
        reads = [lambda life=life, read=read: life.move(read) for life, read in self.reads]
        steps = [*self.computations(num_layers=1), *self.computations()]
        return [*deliveries, *steps, *reads, *self.burials()]

    def go_well(self, choices: list[int]) -> None:
        """A while without a fault: of what could happen next, what each choice says."""
        for choice in choices:
            actions = self.natural_actions()
            if actions:
                actions[choice % len(actions)]()
                self.make_room()

    # What must hold

    def check(self) -> None:
        for life in self.world.lives.values():
            life.check()

    def check_end(self) -> None:
        """Silences the channel; then everything must come to an end in bounded time."""
        for life in self.world.lives.values():
            while life.strangers:
                life.vacate()
        seconds = 0
        while any(life.num_open for life in self.world.lives.values()):
            assert seconds <= DEADLINE_S, "a request has no outcome"
            self._pass_a_silent_second()
            seconds += 1
        self.check()
        for life in self.world.lives.values():
            assert life.outcomes.keys() == life.taken_in, "a request has no outcome"
            stats = life.pool.stats()
            assert stats.referenced == stats.quarantined == 0, "blocks have leaked"
            assert life.pool.num_available == NUM_BLOCKS

    def _pass_a_silent_second(self) -> None:
        self.world.messages.clear()
        self.world.advance(1.0)
        for action in self.computations():
            action()
        for life, read in self.reads:
            life.end_read(read)
        for life in self.decodes:
            for request in life.committed:
                life.finish(request)
        for worker in self.world.lives.values():
            worker.reap()
        for action in self.burials():
            action()
        self.make_room()
