"""What the garbage collector would have to find.

It seldom looks at old objects (core.rpc.settle_heap). One that waits for it keeps whatever it knows
of: texts, tokens, prompts. With many requests that is gigabytes, so nothing may hold itself, by
whatever way.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Awaitable, Callable

import pytest

_NUM_TIMES = 8
_MOST_S = 3.0


async def left_behind(
    work: Callable[[], Awaitable[None]],
    modules: tuple[str, ...],
    caplog: pytest.LogCaptureFixture,
    remembered: tuple[type, ...] = (),
) -> list[type]:
    """Does `work` several times. Classes of `modules` (how their names begin) of which it leaves
    an object each time, for as long as nobody looks for garbage, besides what is `remembered`."""
    await work()
    gc.collect()
    gc.freeze()  # what is there already is not looked at
    gc.disable()
    try:
        for _ in range(_NUM_TIMES):
            await work()
        for _ in range(round(_MOST_S / 0.1)):
            caplog.clear()  # or it would keep tracebacks
            counts = _num_of(modules)
            left = [each for each in counts if counts[each] >= _NUM_TIMES]
            left = [each for each in left if each not in remembered]
            if not left:
                break
            await asyncio.sleep(0.1)
        return left
    finally:
        gc.enable()
        gc.unfreeze()


def _num_of(modules: tuple[str, ...]) -> Counter[type]:
    # By type(): isinstance would ask every object of the process for its __class__, and some
    # answer with a warning.
    classes = (type(each) for each in gc.get_objects())
    return Counter(each for each in classes if str(each.__module__).startswith(modules))
