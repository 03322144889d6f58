"""The Dockerfile: what its steps install, checked without building an image."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib

import pytest

from tests.helm.rendering import ROOT, render

TEXT = (ROOT / "Dockerfile").read_text()


def stages():
    """Instructions of each stage, as (keyword, rest), continued lines joined."""
    lines = re.sub(r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", TEXT)).splitlines()
    found = {}
    for line in filter(None, lines):
        keyword, _, rest = line.partition(" ")
        if keyword == "FROM":
            base, _, name = rest.partition(" AS ")
            found[name] = {"base": base, "steps": []}
        elif found:
            found[name]["steps"].append((keyword, rest))
    return found


def steps(stage):
    """Those of a stage and all that it is made from."""
    found = stages()
    if stage not in found:
        return []
    return [*steps(found[stage]["base"]), *found[stage]["steps"]]


def copied():
    """What is taken from the repository."""
    return [
        source
        for keyword, rest in steps("build-router")
        if keyword == "COPY" and not rest.startswith("--from")
        for source in rest.split()[:-1]
    ]


@pytest.mark.parametrize("target", ["router", "worker", "worker-cpu"])
def test_an_image_runs_as_the_user_that_the_chart_asks_for(target):
    user = dict(steps(target))["USER"]
    security = render().pod("router")["securityContext"]
    assert user == f"{security['runAsUser']}:{security['runAsGroup']}" == "10001:10001"


@pytest.mark.parametrize("target", ["router", "worker", "worker-cpu"])
def test_signals_arrive_while_a_process_still_starts(target):
    assert dict(steps(target))["ENTRYPOINT"].startswith('["tini"')
    # `command` would replace the image's entry point.
    for component in ("router", "decode", "adapter"):
        assert "command" not in render().container(component)


def test_every_package_is_copied():
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"][
        "packages"
    ]
    top = {"proto" if name.startswith("baton") else name.split(".")[0] for name in packages}
    assert top <= set(copied())


def test_the_builder_is_sent_what_is_copied_and_nothing_else():
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert [line[1:] for line in lines if line.startswith("!")] == copied()


def test_every_install_is_pinned():
    installs = [
        rest for _, rest in steps("worker") + steps("build-worker") if "pip install" in rest
    ]
    assert len(installs) == 3
    assert all("constraints.txt" in install for install in installs)
    assert re.search(r"^ARG PYTHON_IMAGE=python:3\.11\.\d+-slim-bookworm$", TEXT, re.MULTILINE)


def test_every_stage_comes_from_the_one_image_that_can_be_pinned_by_digest():
    found = stages()
    outside = {stage["base"] for stage in found.values()} - found.keys()
    assert outside == {"${PYTHON_IMAGE}"}


def test_the_router_image_has_no_torch():
    assert "torch" not in " ".join(rest for _, rest in steps("build-router"))


@pytest.mark.parametrize("stage", ["build-router", "build-worker", "build-worker-cpu"])
def test_every_image_can_send_traces(stage):
    installed = [rest for _, rest in stages()[stage]["steps"] if "--no-build-isolation" in rest]
    assert [re.search(r"otel\]'$", command) is not None for command in installed] == [True]


def install(stage, folder):
    """Runs the steps of a build stage in clean folders; needs the package index.

    Returns what runs a program of the installed environment.
    """
    source, target = folder / "src", folder / "baton"
    source.mkdir()
    for keyword, rest in steps(stage):
        if keyword == "COPY":
            names = copied() if rest.startswith("--from=build-router") else rest.split()[:-1]
            for name in names:
                if (ROOT / name).is_dir():
                    shutil.copytree(ROOT / name, source / name, dirs_exist_ok=True)
                else:
                    shutil.copy(ROOT / name, source / name)
        elif keyword == "RUN":
            command = rest.replace("/opt/baton", str(target))
            command = re.sub(r"^python ", f"{sys.executable} ", command)
            environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "PIP_ARGS": ""}
            subprocess.run(command, shell=True, check=True, cwd=source, env=environment)

    def run(*command):
        arguments = [target / "bin" / command[0], *command[1:]]
        return subprocess.run(arguments, cwd="/", capture_output=True, text=True, check=False)

    return run


@pytest.mark.slow
def test_the_routers_steps_install_a_router_that_starts(tmp_path):
    run = install("build-router", tmp_path)
    assert run("python", "-m", "router", "--help").returncode == 0
    assert run("baton", "generate", "--help").returncode == 0
    assert "torch" not in run("pip", "list").stdout
    assert run("python", "-m", "router", "--model", "/none").stderr.startswith("error: ")


@pytest.mark.slow
def test_the_cpu_workers_steps_install_workers_that_start(tmp_path):
    run = install("build-worker-cpu", tmp_path)
    for role in ("prefill_svc", "decode_svc"):
        assert run("python", "-m", role, "--help").returncode == 0
        wrong = run("python", "-m", role, "--worker-id", "w", "--model", "/none")
        assert "error: " in wrong.stderr
    assert run("python", "-c", "import engine.native.library, nixl_cu12").returncode == 0
