"""docs/tuning.md speaks of flags and metrics that exist, and of the defaults that they have."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.serve import make_parser
from client import cli_up
from core.tls import TlsSettings
from router.settings import RouterSettings
from worker.settings import WorkerSettings

DOCS = Path(__file__).parents[1] / "docs"
TEXT = (DOCS / "tuning.md").read_text()
ROWS = re.findall(r"^\| `--([a-z-]+)` \| (worker|router) \| (.*?) \|", TEXT, re.MULTILINE)
SETTINGS: dict[str, type[TlsSettings]] = {"worker": WorkerSettings, "router": RouterSettings}


def field_name(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")


def default_of(settings: type[TlsSettings], flag: str) -> object:
    return settings.model_fields[field_name(flag)].default


def test_the_tables_are_found():
    assert len(ROWS) == len(re.findall(r"^\| `--", TEXT, re.MULTILINE)) > 20


@pytest.mark.parametrize(("flag", "service", "default"), ROWS)
def test_an_option_has_the_default_that_its_row_says(flag, service, default):
    actual = default_of(SETTINGS[service], flag)
    if actual is None:
        assert not default.isdigit(), "it has no fixed one"
    else:
        assert default == ("on" if actual is True else str(actual))


def test_every_flag_in_the_text_exists():
    known = {f"--{name.replace('_', '-')}" for s in SETTINGS.values() for name in s.model_fields}
    known |= {f"--{role}-args" for role in ("prefill", "decode", "router")} | {"--audit"}
    known |= set(make_parser().format_help().split())
    assert set(re.findall(r"--[a-z][a-z-]+", TEXT)) - known == set()


def test_every_metric_in_the_text_exists():
    listed = set(re.findall(r"`(baton_\w+)`", (DOCS / "metrics.md").read_text()))
    assert set(re.findall(r"`(baton_\w+)`", TEXT)) - listed == set()


def test_what_up_hands_on_is_a_setting_of_workers():
    flags = {field_name(flag) for flag, *_ in cli_up.WORKER_FLAGS}
    assert flags - WorkerSettings.model_fields.keys() == set()
    assert {"device", "graph_mode", "capture_sizes", "gpu_memory_utilization"} <= flags
