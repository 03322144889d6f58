"""The shape of a benchmark's output is a contract with whoever reads it."""

from __future__ import annotations

import json
import math

import pytest

from bench.report import Reporter, machine, table


def test_json_is_one_object_a_line_and_last_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter("copy", as_json=True)
    reporter.row(by="memcpy", gb_per_s=10.5)
    reporter.check("memcpy", 0.9, "of itself", ">= 0.7")
    assert reporter.finish() == 0
    row, summary = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert row == {"by": "memcpy", "gb_per_s": 10.5}
    assert summary["bench"] == "copy" and summary["ok"] is True
    assert summary["checks"] == [
        {"name": "memcpy", "value": 0.9, "unit": "of itself", "goal": ">= 0.7", "ok": True}
    ]


def test_people_get_a_table_and_the_verdicts(capsys: pytest.CaptureFixture[str]) -> None:
    reporter = Reporter("copy", as_json=False)
    reporter.row(by="memcpy", gb_per_s=10.56789)
    reporter.check("memcpy", 0.5, "of itself", ">= 0.7")
    assert reporter.finish() == 1
    out = capsys.readouterr().out
    assert "by      gb_per_s\nmemcpy  10.57\n" in out
    assert "FAIL memcpy: 0.5 of itself (>= 0.7)" in out


@pytest.mark.parametrize(
    ("value", "goal", "holds"),
    [
        (0.7, ">= 0.7", True),
        (0.69, ">= 0.7", False),
        (2.0, "< 3", True),
        (0.0, "== 0", True),
        (math.nan, "<= 1", False),
    ],
)
def test_a_check_holds_or_not(value: float, goal: str, holds: bool) -> None:
    assert Reporter("copy", as_json=True).check("x", value, "", goal) is holds


@pytest.mark.parametrize("goal", ["0.7", "about 3", ">=0.7", ">= x"])
def test_a_goal_of_another_form_is_refused(goal: str) -> None:
    with pytest.raises(ValueError):
        Reporter("copy", as_json=True).check("x", 1.0, "", goal)


def test_rows_with_other_fields_share_one_table() -> None:
    assert table([{"a": 1}, {"b": True}]) == "a  b\n1  -\n-  True\n"


def test_the_machine_is_named() -> None:
    fields = machine()
    assert fields["cpu"] and fields["memory_gib"] and fields["num_cores"]
