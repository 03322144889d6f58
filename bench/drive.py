"""Drives a whole engine without a worker around it."""

from __future__ import annotations

from engine.batch import StepResult
from engine.engine import Engine


def drive(engine: Engine, *, is_async: bool = False) -> int:
    """Computes all that there is; the number of steps that were planned ahead."""
    scheduler, runner = engine.scheduler, engine.runner
    num_ahead = 0
    batch = scheduler.schedule()
    launched = runner.launch(batch) if batch is not None else None
    while batch is not None and launched is not None:
        ahead = scheduler.schedule_ahead() if is_async else None
        launched_ahead = runner.launch(ahead) if ahead is not None else None
        num_ahead += ahead is not None
        result = launched if isinstance(launched, StepResult) else launched.wait()
        scheduler.postprocess(batch, result)
        batch, launched = ahead, launched_ahead
        if batch is None and (batch := scheduler.schedule()) is not None:
            launched = runner.launch(batch)
    return num_ahead
