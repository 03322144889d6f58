"""The workers that this router knows: found in the registry, held by their streams."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.v1 import types_pb2
from core.errors import Unavailable
from core.fingerprint import mismatches
from core.logs import event
from core.registry import Registry
from core.tls import Tls
from router.attach import WorkerLink

logger = logging.getLogger(__name__)

_FORGET_AFTER_S = 30.0
"""An unreachable worker is shown for so long after the registry has forgotten it."""


_ROLES = (types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE)


@dataclass(frozen=True)
class PoolConfig:
    """`model`: what the digest of the workers' model must begin with; that is all of it where
    this router has the weights, too."""

    router_id: str
    silence_s: float
    poll_s: float
    model: str = ""
    tls: Tls | None = None


class WorkerObserver(Protocol):
    """Hears at once what changes. Must not raise."""

    def on_workers(self) -> None:
        """The set of usable workers may have changed."""

    def on_load(self, worker_id: str, load: types_pb2.Load) -> None:
        """A worker has reported its load."""


class WorkerPool:
    """Keeps one link for each worker. An empty registry, or none, removes no live worker."""

    def __init__(self, registry: Registry, config: PoolConfig) -> None:
        self._registry = registry
        self._config = config
        self._links: dict[str, WorkerLink] = {}
        self._tasks: dict[WorkerLink, asyncio.Task[None]] = {}
        self._changed = asyncio.Event()
        self._observers: list[WorkerObserver] = []
        self._reported_unfit: set[tuple[str, int]] = set()
        self._usable: dict[types_pb2.Role.ValueType, tuple[WorkerLink, ...]] = {}
        """Made anew at each change: requests ask for it again and again."""
        self.max_model_len: int | None = None
        """The least of all usable workers; None without one."""
        self.fingerprint: types_pb2.Fingerprint | None = None
        self._model: str | None = None
        """Digest of the model that is served, once a worker has told."""
        self.is_registry_ok: bool | None = None
        """None before the registry has been asked."""

    @property
    def links(self) -> list[WorkerLink]:
        """Every known worker, reachable or not, by worker id."""
        return [self._links[worker_id] for worker_id in sorted(self._links)]

    def usable(self, role: types_pb2.Role.ValueType) -> Sequence[WorkerLink]:
        """Workers of `role` that take requests and fit the deployment's fingerprint."""
        return self._usable.get(role, ())

    @property
    def is_ready(self) -> bool:
        """Whether there is a usable worker of each role."""
        return all(self.usable(role) for role in _ROLES)

    def observe(self, observer: WorkerObserver) -> None:
        """Tells `observer` from now on."""
        self._observers.append(observer)

    async def wait_changed(self) -> None:
        """Returns after the next change of any worker's reachability or state."""
        await self._changed.wait()
        self._changed.clear()

    async def run(self) -> None:
        """Reads the registry again and again; lets go of every worker when cancelled."""
        try:
            while True:
                await self._poll()
                await asyncio.sleep(self._config.poll_s)
        finally:
            for link in self.links:
                self._drop(link)
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _poll(self) -> None:
        try:
            records = await self._registry.list()
        except Unavailable as error:
            if self.is_registry_ok is not False:
                event(logger, logging.WARNING, "registry_away", error=error.message)
            self.is_registry_ok = False
            return
        if not self.is_registry_ok:
            event(logger, logging.INFO, "registry_reached", num_workers=len(records))
        self.is_registry_ok = True
        own = self._of_one_model([record for record in records if self._has_our_model(record)])
        for record in own:
            self._meet(record)
        self._forget_gone({record.worker_id for record in own})

    def _has_our_model(self, record: types_pb2.WorkerRecord) -> bool:
        """Workers of other models in the same Redis belong to other routers."""
        has_it = record.fingerprint.model.startswith(self._config.model)
        if not has_it:
            self._report_once(record, "it serves another model than this router")
        return has_it

    def _of_one_model(self, records: list[types_pb2.WorkerRecord]) -> list[types_pb2.WorkerRecord]:
        """A router without weights knows its model by the config, which others may have, too.

        It stays with the model that it has met while a worker of that is left; before, it takes
        none of several.
        """
        models = {record.fingerprint.model for record in records}
        if len(models) == 1:
            (self._model,) = models
        if len(models) <= 1:
            return records
        for record in records:
            if record.fingerprint.model != self._model:
                self._report_once(record, "another model with this router's config is there, too")
        return [record for record in records if record.fingerprint.model == self._model]

    def _meet(self, record: types_pb2.WorkerRecord) -> None:
        known = self._links.get(record.worker_id)
        if known is not None and known.epoch == record.epoch:
            if not known.is_attached:
                known.state = record.state
            return
        if known is not None and known.is_attached and record.epoch < known.epoch:
            self._report_once(record, "a later life of it is attached")
            return
        if known is not None:
            self._drop(known)
        link = WorkerLink(
            record,
            self._config.router_id,
            self._config.silence_s,
            self._note_change,
            self._note_load,
            self._config.tls,
        )
        event(logger, logging.INFO, "worker_found", worker_id=record.worker_id, epoch=record.epoch)
        self._links[record.worker_id] = link
        task = asyncio.get_running_loop().create_task(link.run())
        self._tasks[link] = task
        task.add_done_callback(lambda _: self._tasks.pop(link, None))

    def _forget_gone(self, listed: set[str]) -> None:
        now = time.monotonic()
        for link in self.links:
            if link.is_attached or link.worker_id in listed:
                continue
            said_goodbye = link.state == types_pb2.WORKER_STATE_DRAINING
            if said_goodbye or now - link.lost_at > _FORGET_AFTER_S:
                event(logger, logging.INFO, "worker_forgotten", worker_id=link.worker_id)
                self._drop(link)

    def _drop(self, link: WorkerLink) -> None:
        del self._links[link.worker_id]
        task = self._tasks.get(link)
        if task is not None:
            task.cancel()
        self._note_change()

    def _note_change(self) -> None:
        ready = [link for link in self.links if link.is_ready]
        chosen = choose_fingerprint(
            self.fingerprint, [(link.record.role, link.record.fingerprint) for link in ready]
        )
        if chosen is not None:
            self.fingerprint = chosen
            self._report_unfit(ready, chosen)
        fit = [link for link in ready if link.record.fingerprint == self.fingerprint]
        self._usable = {
            role: tuple(link for link in fit if link.record.role == role) for role in _ROLES
        }
        lengths = [link.record.max_model_len for link in fit if link.record.max_model_len > 0]
        self.max_model_len = min(lengths, default=None)
        self._changed.set()
        for observer in self._observers:
            observer.on_workers()

    def _note_load(self, worker_id: str, load: types_pb2.Load) -> None:
        for observer in self._observers:
            observer.on_load(worker_id, load)

    def _report_unfit(self, ready: Iterable[WorkerLink], chosen: types_pb2.Fingerprint) -> None:
        for link in ready:
            differences = mismatches(chosen, link.record.fingerprint)
            if differences:
                self._report_once(link.record, f"fingerprint differs: {'; '.join(differences)}")

    def _report_once(self, record: types_pb2.WorkerRecord, reason: str) -> None:
        life = (record.worker_id, record.epoch)
        if life not in self._reported_unfit:
            self._reported_unfit.add(life)
            event(
                logger,
                logging.ERROR,
                "worker_not_used",
                worker_id=record.worker_id,
                reason=reason,
            )


def choose_fingerprint(
    current: types_pb2.Fingerprint | None,
    workers: Iterable[tuple[types_pb2.Role.ValueType, types_pb2.Fingerprint]],
) -> types_pb2.Fingerprint | None:
    """The fingerprint to serve: one with both roles, then the current one, then the commonest.

    None when there is no worker.
    """
    groups: dict[bytes, list[tuple[types_pb2.Role.ValueType, types_pb2.Fingerprint]]] = {}
    for role, fingerprint in workers:
        key = fingerprint.SerializeToString(deterministic=True)
        groups.setdefault(key, []).append((role, fingerprint))
    if not groups:
        return None

    def rank(
        group: list[tuple[types_pb2.Role.ValueType, types_pb2.Fingerprint]],
    ) -> tuple[int, bool, int]:
        return len({role for role, _ in group}), group[0][1] == current, len(group)

    return max(groups.values(), key=rank)[0][1]
