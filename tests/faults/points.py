"""Named points inside a worker process, at which a test makes something go wrong.

The worker's end of a unix socket: the test arms rules, each for one point; a rule that comes
true is reported, and one that holds waits for the test's word. Lines of JSON both ways:

    test → worker   {"arm": {rule}}   {"disarm": number}   {"go": number}
    worker → test   {"armed": number}   {"disarmed": number}   {"reached": number}
"""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from dataclasses import dataclass, field


@dataclass
class Rule:
    """What happens at one point; `times` 0 is for ever, after `skip` times of nothing."""

    number: int
    point: str
    action: str
    times: int
    skip: int
    seconds: float
    may_go: threading.Event = field(default_factory=threading.Event)
    waiters: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = field(default_factory=list)


class FaultPoints:
    """The rules of this process. `at` and `at_blocking` are called where something may fail."""

    def __init__(self, socket_path: str) -> None:
        self._lock = threading.Lock()
        self._rules: dict[int, Rule] = {}
        self._test = socket.socket(socket.AF_UNIX)
        self._test.connect(socket_path)
        threading.Thread(target=self._listen, name="faults", daemon=True).start()

    async def at(self, point: str) -> str | None:
        """Holds or delays here if a rule says so; the action, which others carry out."""
        rule = self._take(point)
        if rule is None:
            return None
        if rule.action == "hold":
            await self._wait(rule)
        elif rule.action == "delay":
            await asyncio.sleep(rule.seconds)
        return rule.action

    def at_blocking(self, point: str) -> str | None:
        """`at` for a thread that may be held up."""
        rule = self._take(point)
        if rule is None:
            return None
        if rule.action == "hold":
            rule.may_go.wait()
        elif rule.action == "delay":
            rule.may_go.wait(rule.seconds)
        return rule.action

    def _take(self, point: str) -> Rule | None:
        with self._lock:
            rule = next((r for r in self._rules.values() if r.point == point), None)
            if rule is None:
                return None
            if rule.skip > 0:
                rule.skip -= 1
                return None
            rule.times -= 1
            if rule.times == 0:
                del self._rules[rule.number]
        self._say(reached=rule.number)
        return rule

    async def _wait(self, rule: Rule) -> None:
        event = asyncio.Event()
        with self._lock:
            rule.waiters.append((asyncio.get_running_loop(), event))
        if not rule.may_go.is_set():
            await event.wait()

    def _listen(self) -> None:
        rules: dict[int, Rule] = {}
        for line in self._test.makefile():
            message = json.loads(line)
            if "arm" in message:
                rule = Rule(**message["arm"])
                with self._lock:
                    rules[rule.number] = self._rules[rule.number] = rule
                self._say(armed=rule.number)
            elif "disarm" in message:
                with self._lock:
                    self._rules.pop(message["disarm"], None)
                self._say(disarmed=message["disarm"])
            elif "go" in message:
                self._release(rules[message["go"]])

    def _release(self, rule: Rule) -> None:
        with self._lock:
            rule.may_go.set()
            waiters, rule.waiters = rule.waiters, []
        for loop, event in waiters:
            loop.call_soon_threadsafe(event.set)

    def _say(self, **message: int) -> None:
        self._test.sendall(json.dumps(message).encode() + b"\n")
