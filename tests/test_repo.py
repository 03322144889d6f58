"""The repository agrees with itself: generated files, package list, pins."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from client import cli_reference
from router import metrics_reference as router_metrics
from worker import metrics_reference as worker_metrics

ROOT = Path(__file__).parents[1]
PROTO = ROOT / "proto"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_stubs_match_the_protos(tmp_path):
    protos = sorted(PROTO.glob("baton/v1/*.proto"))
    outputs = [
        f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")
    ]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{PROTO}", *outputs, *map(str, protos)]
    # protoc finds the generator of type stubs on PATH.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(command, check=True, env={**os.environ, "PATH": path})

    generated = {file.name: file.read_text() for file in tmp_path.glob("baton/v1/*_pb2*")}
    committed = {file.name: file.read_text() for file in PROTO.glob("baton/v1/*_pb2*")}
    different = [name for name in generated if generated[name] != committed.get(name)]
    assert different == [], "run `make proto`"
    assert committed.keys() == generated.keys()


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="argparse lays out help anew")
def test_the_command_reference_matches_the_help():
    assert (ROOT / "docs/cli.md").read_text() == cli_reference.render(), "run `make docs`"


def test_the_list_of_metrics_matches_the_code():
    listed = router_metrics.render() + worker_metrics.render()
    assert (ROOT / "docs/metrics.md").read_text() == listed, "run `make docs`"


def test_every_package_is_in_the_package_list():
    found = {
        ".".join(init.parent.relative_to(ROOT).parts)
        for init in ROOT.glob("[a-z]*/**/__init__.py")
        if init.relative_to(ROOT).parts[0] not in ("proto", "tests", "build")
    }
    assert found | {"baton", "baton.v1"} == set(PYPROJECT["tool"]["setuptools"]["packages"])


def test_every_dependency_is_pinned():
    def normalized(name: str) -> str:
        return re.sub(r"[-_.]+", "-", name).lower()

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {normalized(line.split("==")[0]) for line in lines if "==" in line}
    project = PYPROJECT["project"]
    asked = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        asked += extra
    names = {normalized(name) for name in asked if not name.startswith("baton-serving[")}
    assert names - pinned == set()


def test_readme_is_under_two_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 100
