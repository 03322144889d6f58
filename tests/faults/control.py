"""The test's end of a worker's fault points (see points.py)."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WAIT_S = 30.0


class Fault:
    """One armed rule."""

    def __init__(self, number: int, point: str, send: Callable[[dict[str, Any]], None]) -> None:
        self.number = number
        self.point = point
        self._send = send
        self._reached = 0
        self._is_disarmed = False
        self._changed = threading.Condition()

    @property
    def num_reached(self) -> int:
        """How often it came true."""
        return self._reached

    def wait(self, times: int = 1) -> None:
        """Returns when it has come true so often."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._reached >= times, WAIT_S)
        assert came, f"{self.point} was reached {self._reached} times, not {times}"

    def go(self) -> None:
        """Whoever is held, now or later, goes on."""
        self._send({"go": self.number})

    def disarm(self) -> None:
        """It comes true no more, as soon as the worker has heard of it."""
        self._send({"disarm": self.number})

    def wait_disarmed(self) -> None:
        """Returns when the worker has heard of it."""
        with self._changed:
            is_disarmed = self._changed.wait_for(lambda: self._is_disarmed, WAIT_S)
        assert is_disarmed, f"{self.point}: the worker does not answer"

    def note_reached(self) -> None:
        with self._changed:
            self._reached += 1
            self._changed.notify_all()

    def note_disarmed(self) -> None:
        with self._changed:
            self._is_disarmed = True
            self._changed.notify_all()


class WorkerFaults:
    """Rules of one worker. They end with its life."""

    def __init__(self, socket_path: Path) -> None:
        self._numbers = itertools.count(1)
        self._faults: dict[int, Fault] = {}
        self._answered = threading.Condition()
        self._last_answer: dict[str, int] = {}
        self._worker: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(socket_path))
        self._listener.listen()
        threading.Thread(target=self._accept, name="faults", daemon=True).start()

    def arm(
        self,
        point: str,
        action: str = "hold",
        times: int = 1,
        skip: int = 0,
        seconds: float = 0.0,
    ) -> Fault:
        """A rule for `point` (points.Rule says what is what); in force when this returns."""
        number = next(self._numbers)
        fault = self._faults[number] = Fault(number, point, self._send)
        rule = {"point": point, "action": action, "times": times, "skip": skip, "seconds": seconds}
        self._send({"arm": {"number": number, **rule}})
        with self._answered:
            is_armed = self._answered.wait_for(
                lambda: self._last_answer.get("armed", 0) >= number, WAIT_S
            )
        assert is_armed, f"{point}: the worker does not answer"
        return fault

    @contextmanager
    def hold(self, point: str, *, times: int = 1, skip: int = 0) -> Iterator[Fault]:
        """Holds up whoever comes to `point` while the context lasts."""
        fault = self.arm(point, "hold", times, skip)
        try:
            yield fault
        finally:
            fault.disarm()
            fault.go()

    @contextmanager
    def rule(
        self, point: str, action: str, *, times: int = 0, seconds: float = 0
    ) -> Iterator[Fault]:
        """`action` at `point`, every time or so often, while the context lasts."""
        fault = self.arm(point, action, times, seconds=seconds)
        try:
            yield fault
        finally:
            fault.disarm()

    def close(self) -> None:
        self._listener.close()
        if self._worker is not None:
            self._worker.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                worker, _ = self._listener.accept()
                if self._worker is not None:
                    self._worker.close()
                self._worker = worker
                threading.Thread(target=self._read, args=(self._worker,), daemon=True).start()

    def _read(self, worker: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for line in worker.makefile():
                for kind, number in json.loads(line).items():
                    if kind == "reached":
                        self._faults[number].note_reached()
                        continue
                    if kind == "disarmed":
                        self._faults[number].note_disarmed()
                    with self._answered:
                        self._last_answer[kind] = number
                        self._answered.notify_all()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._worker is not None, "the worker has not started"
        # A worker that is gone has no rules.
        with contextlib.suppress(OSError):
            self._worker.sendall(json.dumps(message).encode() + b"\n")


class AnyFault:
    """The same rule in several workers."""

    def __init__(self, faults: dict[str, Fault]) -> None:
        self.faults = faults

    def wait(self) -> str:
        """The worker in which it has come true; it will not in the others."""
        assert eventually(lambda: any(f.num_reached for f in self.faults.values())), "not reached"
        found = next(name for name, fault in self.faults.items() if fault.num_reached)
        others = [fault for name, fault in self.faults.items() if name != found]
        for fault in others:
            fault.disarm()
        for fault in others:
            fault.wait_disarmed()
        return found


def eventually(holds: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
    """Whether it comes to hold in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
