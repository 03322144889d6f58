"""Renders the chart with the real Helm, for tests that look at the objects."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.helm.fetch_tools import HELMS, Helm

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "baton"
EXAMPLES = tuple(sorted((ROOT / "examples").glob("*.yaml")))
HELM_3, HELM_4 = HELMS
NAMESPACE = "serving"

Manifest = dict[str, Any]


def helm_path(helm: Helm) -> str:
    """The binary that `make` has fetched; skips the test without it."""
    folder = os.environ.get("BATON_HELM_TOOLS") or Path(sys.prefix) / "helm-tools"
    path = helm.path(Path(folder))
    if not path.is_file():
        pytest.skip(f"no Helm {helm.version} in {folder}: run `make helm-tools`")
    return str(path)


def run_helm(helm: Helm, *args: str) -> subprocess.CompletedProcess[str]:
    """Runs `helm` with `args`; it knows no cluster, and its caches are gone afterwards."""
    command = [helm_path(helm), *args]
    with tempfile.TemporaryDirectory() as home:
        env = {"PATH": os.environ["PATH"], "HOME": home, "KUBECONFIG": os.devnull}
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@cache
def _template(helm: Helm, args: tuple[str, ...]) -> str:
    finished = run_helm(helm, "template", "chat", str(CHART), "--namespace", NAMESPACE, *args)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@dataclass(frozen=True)
class Rendering:
    """The objects of one rendering of the release `chat`."""

    manifests: tuple[Manifest, ...]

    def all(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def names(self, kind: str) -> list[str]:
        return sorted(manifest["metadata"]["name"] for manifest in self.all(kind))

    def get(self, kind: str, name: str) -> Manifest:
        (found,) = (one for one in self.all(kind) if one["metadata"]["name"] == name)
        return found

    def pod(self, component: str, kind: str = "Deployment") -> Manifest:
        """The spec of a component's pods."""
        spec: Manifest = self.get(kind, f"chat-baton-{component}")["spec"]["template"]["spec"]
        return spec

    def container(self, component: str, name: str | None = None) -> Manifest:
        """A container of a component's pods: the only one, or the one called `name`."""
        containers = self.pod(component)["containers"]
        (found,) = (one for one in containers if name in (None, one["name"]))
        return dict(found)

    def settings(self, component: str) -> dict[str, str]:
        """A component's settings that are the same in all of its pods."""
        data: dict[str, str] = self.get("ConfigMap", f"chat-baton-{component}")["data"]
        return data


def render(
    *values: str, files: Iterable[Path] = (), helm: Helm = HELM_4, kubernetes: str = "1.34"
) -> Rendering:
    """The chart with `values` (KEY=VALUE) on top of `files`. Fails the test if Helm refuses."""
    args = [*_set(values), "--kube-version", kubernetes]
    for file in files:
        args += ["--values", str(file)]
    documents = yaml.load_all(_template(helm, tuple(args)), yaml.CSafeLoader)
    return Rendering(tuple(document for document in documents if document))


def _set(values: Iterable[str]) -> list[str]:
    args: list[str] = []
    for value in values:
        # To `--set` a number with a fraction is a string.
        is_json = value.endswith(("}", "]", "null")) or re.search(r"=\d+\.\d+$", value)
        args += ["--set-json" if is_json else "--set", value]
    return args


def refusal(*values: str, helm: Helm = HELM_4, kubernetes: str = "1.34") -> str:
    """What Helm says to `values`. Fails the test if it takes them."""
    args = [*_set(values), "--kube-version", kubernetes]
    finished = run_helm(helm, "template", "chat", str(CHART), *args)
    assert finished.returncode != 0, f"{values} were taken"
    return finished.stderr


def environment(container: Manifest) -> dict[str, Any]:
    """Variables of a container: the value, or where it is from."""
    return {one["name"]: one.get("value", one.get("valueFrom")) for one in container["env"]}
