"""The test's end of a worker's fault points (see points.py)."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

WAIT_S = 30.0
_UCRED = struct.Struct("3i")
"""pid, uid, gid."""


class Fault:
    """One armed rule."""

    def __init__(self, number: int, point: str, worker: WorkerFaults) -> None:
        self.number = number
        self.point = point
        self._worker = worker
        self._reached = 0
        self._changed = threading.Condition()

    @property
    def num_reached(self) -> int:
        """How often it came true, before this was asked."""
        self._worker.catch_up()
        return self._reached

    def wait(self, times: int = 1) -> None:
        """Returns when it has come true so often."""
        with self._changed:
            came = self._changed.wait_for(lambda: self._reached >= times, WAIT_S)
        assert came, f"{self.point} was reached {self._reached} times, not {times}"

    def go(self) -> None:
        """Whoever is held, now or later, goes on."""
        self._worker.send({"go": self.number})

    def disarm(self) -> None:
        """It comes true no more, as soon as the worker has heard of it."""
        self._worker.send({"disarm": self.number})

    def wait_disarmed(self) -> None:
        """Returns when the worker has heard of it, unless it is suspended or gone."""
        self._worker.catch_up()

    def note_reached(self) -> None:
        with self._changed:
            self._reached += 1
            self._changed.notify_all()


class WorkerFaults:
    """Rules of one worker. They end with its life."""

    def __init__(self, socket_path: Path) -> None:
        self._numbers = itertools.count(1)
        self._faults: dict[int, Fault] = {}
        self._answered = threading.Condition()
        self._last_answer: dict[str, int] = {}
        self._is_gone = False
        """Whether the worker's life is over, and the next one has not begun."""
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
        fault = self._faults[number] = Fault(number, point, self)
        rule = {"point": point, "action": action, "times": times, "skip": skip, "seconds": seconds}
        self.send({"arm": {"number": number, **rule}})
        self._until(lambda: self._last_answer.get("armed") == number)
        return fault

    def catch_up(self) -> None:
        """Returns when all that the worker has been told, and has said, is known to both.

        At once if it cannot answer, because it is suspended or gone.
        """
        number = next(self._numbers)
        self.send({"disarm": number})
        self._until(lambda: self._last_answer.get("disarmed") == number or not self._can_answer())

    def _until(self, is_so: Callable[[], bool]) -> None:
        with self._answered:
            assert self._answered.wait_for(is_so, WAIT_S), "the worker does not answer"

    def _can_answer(self) -> bool:
        return not self._is_gone and is_running(self._worker)

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
        """`action` at `point`, every time or so often, while the context lasts and no longer."""
        fault = self.arm(point, action, times, seconds=seconds)
        try:
            yield fault
        finally:
            fault.disarm()
            self.catch_up()

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
                with self._answered:
                    self._worker, self._is_gone = worker, False
                threading.Thread(target=self._read, args=(self._worker,), daemon=True).start()

    def _read(self, worker: socket.socket) -> None:
        with contextlib.suppress(OSError):
            for line in worker.makefile():
                for kind, number in json.loads(line).items():
                    if kind == "reached":
                        self._faults[number].note_reached()
                        continue
                    with self._answered:
                        self._last_answer[kind] = number
                        self._answered.notify_all()
        with self._answered:
            self._is_gone = worker is self._worker
            self._answered.notify_all()

    def send(self, message: dict[str, Any]) -> None:
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


def is_running(worker: socket.socket | None) -> bool:
    """Whether the process at the other end is neither suspended nor gone."""
    if worker is None:
        return False
    try:
        credentials = worker.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        pid, _, _ = _UCRED.unpack(credentials)
        return psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except (OSError, psutil.NoSuchProcess):
        return False


def eventually(holds: Callable[[], bool], timeout_s: float = WAIT_S) -> bool:
    """Whether it comes to hold in time."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
