"""Circuit breakers: workers on which attempts fail again and again get no more, for a while.

A worker is ejected when several attempts in a row fail on it. When its time is over it gets
requests again, the next when the one before has had its first output; with the first that ends
well it is back, with one that fails it is ejected for twice as long. When more than half of a
role would be ejected the fault lies elsewhere, and nobody is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from core.errors import (
    AlreadyExists,
    BatonError,
    Cancelled,
    DeadlineExceeded,
    InvalidArgument,
    ResourceExhausted,
)
from core.logs import event
from router.attach import WorkerLink
from router.dispatch import AttemptFailed

logger = logging.getLogger(__name__)

MAX_FAILURES = 3
FIRST_EJECTION_S = 1.0
MAX_EJECTION_S = 60.0
MAX_EJECTED_SHARE = 0.5

_NO_FAULT_OF_WORKERS = (
    InvalidArgument,
    AlreadyExists,
    Cancelled,
    DeadlineExceeded,
    ResourceExhausted,
)


@dataclass
class _Circuit:
    epoch: int
    num_failures: int = 0
    """In a row."""
    ejection_s: float = 0.0
    """Of the latest ejection; 0: the circuit is closed."""
    until: float = 0.0
    is_probed: bool = False

    def takes_requests(self, now: float) -> bool:
        return not self.ejection_s or (now >= self.until and not self.is_probed)


class Trial:
    """One attempt's part in the circuits of its workers."""

    def __init__(self, circuits: dict[str, _Circuit]) -> None:
        self._circuits = circuits
        self._began_with = {name: circuit.until for name, circuit in circuits.items()}
        self._probed = {name for name, circuit in circuits.items() if circuit.ejection_s}
        for name in self._probed:
            circuits[name].is_probed = True

    def works(self, link: WorkerLink) -> None:
        """The worker has had an output: another request may try it."""
        if link.worker_id in self._probed:
            self._probed.discard(link.worker_id)
            self._circuits[link.worker_id].is_probed = False

    def current(self) -> list[tuple[str, _Circuit]]:
        """Circuits that were not opened since: those know already what it could tell."""
        began_with = self._began_with
        return [(name, c) for name, c in self._circuits.items() if c.until == began_with[name]]

    def end(self) -> None:
        for name in self._probed:
            self._circuits[name].is_probed = False


class Breaker:
    """The circuits of all workers. `clock` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._circuits: dict[str, _Circuit] = {}

    def allowed(self, links: Sequence[WorkerLink]) -> list[WorkerLink]:
        """Those of one role's `links` that may get a request."""
        if not any(circuit.ejection_s for circuit in self._circuits.values()):
            return list(links)
        now = self._clock()
        allowed = [link for link in links if self._circuit(link).takes_requests(now)]
        is_panic = len(allowed) < (1 - MAX_EJECTED_SHARE) * len(links)
        return list(links) if is_panic else allowed

    @contextmanager
    def attempt(self, links: Iterable[WorkerLink]) -> Iterator[Trial]:
        """Around one attempt on these workers: learns from how it ends."""
        trial = Trial({link.worker_id: self._circuit(link) for link in links})
        try:
            yield trial
        except AttemptFailed as failure:
            if is_fault(failure.error):
                for name, circuit in trial.current():
                    if name in failure.suspects:
                        self._failed(name, circuit)
            raise
        else:
            for _, circuit in trial.current():
                circuit.num_failures, circuit.ejection_s = 0, 0.0
        finally:
            trial.end()

    def forget_all_but(self, worker_ids: Iterable[str]) -> None:
        """Forgets whom the router has forgotten."""
        for name in self._circuits.keys() - set(worker_ids):
            del self._circuits[name]

    def _circuit(self, link: WorkerLink) -> _Circuit:
        """A new life of a worker is not judged by the former."""
        circuit = self._circuits.get(link.worker_id)
        if circuit is None or circuit.epoch != link.epoch:
            circuit = self._circuits[link.worker_id] = _Circuit(link.epoch)
        return circuit

    def _failed(self, worker_id: str, circuit: _Circuit) -> None:
        circuit.num_failures += 1
        if circuit.num_failures < MAX_FAILURES:
            return
        doubled = max(FIRST_EJECTION_S, 2 * circuit.ejection_s)
        circuit.ejection_s = min(doubled, MAX_EJECTION_S)
        circuit.until = self._clock() + circuit.ejection_s
        event(
            logger,
            logging.WARNING,
            "worker_ejected",
            worker_id=worker_id,
            num_failures=circuit.num_failures,
            duration_s=circuit.ejection_s,
        )


def is_fault(error: BatonError) -> bool:
    """Whether an attempt's failure speaks against the workers, not against the request."""
    return not isinstance(error, _NO_FAULT_OF_WORKERS)
