"""Steps that wait for the test, and time that does not: so that no test must be in a hurry."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from engine.batch import StepBatch
from tests.worker.pair import Worker


def hold_steps(of: Worker, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """No further step of this worker is computed until what this returns is called."""
    may_run = threading.Event()
    runner = of.host.engine.runner
    real_launch = runner.launch

    def launch(batch: StepBatch, after_layer: Any = None) -> Any:
        assert may_run.wait(60), "the test has forgotten the device"
        return real_launch(batch, after_layer)

    monkeypatch.setattr(runner, "launch", launch)
    return may_run.set


class StepsSince:
    """Counts the steps that a worker begins once `method` of `owner` has been called."""

    def __init__(
        self, owner: object, method: str, of: Worker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        self.has_begun = False
        self.count = 0
        runner = of.host.engine.runner
        real_launch, real_method = runner.launch, getattr(owner, method)

        def launch(batch: StepBatch, after_layer: Any = None) -> Any:
            self.count += self.has_begun
            return real_launch(batch, after_layer)

        def begin(*args: Any) -> Any:
            self.has_begun = True
            return real_method(*args)

        monkeypatch.setattr(runner, "launch", launch)
        monkeypatch.setattr(owner, method, begin)


def let_time_pass(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """What waits in this event loop for so long or less has waited long enough."""
    loop = asyncio.get_running_loop()
    real_time = loop.time
    monkeypatch.setattr(loop, "time", lambda: real_time() + seconds)
