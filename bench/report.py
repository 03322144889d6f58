"""The shape that every benchmark shares: `python -m bench.NAME [--json]`.

For people it prints a table of rows and a list of checks. With --json it prints one object a
line, each row as it is measured, and last a summary:

    {"bench": …, "machine": {…}, "checks": [{"name", "value", "unit", "goal", "ok"}], "ok": …}

A check compares a figure with a goal such as ">= 0.7"; figures worth a goal are ratios of two
things measured in the same run, since absolute times mean nothing on shared machines. The exit
code is 0 when every check holds, else 1.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import operator
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
}

Field = str | int | float | bool | None


@dataclass(frozen=True)
class Check:
    """One figure against its goal."""

    name: str
    value: float
    unit: str
    goal: str
    ok: bool


class Reporter:
    """Collects what one run of a benchmark measured and prints it to standard output."""

    def __init__(self, name: str, as_json: bool) -> None:
        self._name = name
        self._as_json = as_json
        self._rows: list[dict[str, Field]] = []
        self._checks: list[Check] = []

    def row(self, **fields: Field) -> None:
        """One measurement. Units stand in the names; floats are shown with four digits."""
        self._rows.append(fields)
        if self._as_json:
            print(json.dumps(fields), flush=True)

    def check(self, name: str, value: float, unit: str, goal: str) -> bool:
        """Compares `value` with `goal`, a comparison and a number: ">= 0.7". Returns whether
        it holds; a NaN never does. Raises ValueError for a goal of another form."""
        comparison, _, bound = goal.partition(" ")
        if comparison not in _COMPARISONS:
            raise ValueError(f"goal {goal!r} is not like '>= 0.7'")
        ok = _COMPARISONS[comparison](value, float(bound))
        self._checks.append(Check(name, value, unit, goal, ok))
        return ok

    def finish(self) -> int:
        """Prints the table or the summary. Returns the exit code."""
        ok = all(check.ok for check in self._checks)
        if self._as_json:
            checks = [asdict(check) for check in self._checks]
            print(
                json.dumps({"bench": self._name, "machine": machine(), "checks": checks, "ok": ok})
            )
        else:
            print(f"{self._name} on {', '.join(f'{k} {v}' for k, v in machine().items())}\n")
            print(table(self._rows))
            for check in self._checks:
                verdict = "ok  " if check.ok else "FAIL"
                print(f"{verdict} {check.name}: {check.value:.4g} {check.unit} ({check.goal})")
        return 0 if ok else 1


def argument_parser(description: str | None) -> argparse.ArgumentParser:
    """A parser that knows --json; pass the benchmark's `__doc__`."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    return parser


def table(rows: list[dict[str, Field]]) -> str:
    """`rows` as aligned columns, in the order in which fields first occur."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [columns, *([_shown(row.get(name)) for name in columns] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        + "\n"
        for line in lines
    )


def machine() -> dict[str, Field]:
    """What the figures were measured on. Importing torch is left to who needs it."""
    try:
        torch_version: str | None = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch_version = None
    return {
        "cpu": _proc_field("cpuinfo", "model name") or platform.machine(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_gib": int((_proc_field("meminfo", "MemTotal") or "0 kB").split()[0]) >> 20,
        "python": platform.python_version(),
        "torch": torch_version,
    }


def _proc_field(file: str, name: str) -> str | None:
    for line in (Path("/proc") / file).read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


def _shown(value: Field) -> str:
    if value is None:
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed; NaN of nothing."""
    if not values:
        return math.nan
    return sorted(values)[min(len(values) - 1, math.ceil(share * len(values)) - 1)]
