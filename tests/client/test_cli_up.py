"""`baton up` as a process of its own, over fake services."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time

import psutil
import pytest

from client.cli import main

PATIENCE_S = 60
READY = "ready grpc=127.0.0.1:"
NEVER_READY = "--never-ready"


@contextlib.contextmanager
def up(tmp_path, *flags, router="--router-of 1", worker="--chatty"):
    """A running `baton up` with pipes; whatever is left of it at the end is killed."""
    command = [sys.executable, "-m", "tests.client.fake_up", str(tmp_path), router, worker, *flags]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def children_of(process, at_least):
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        children = psutil.Process(process.pid).children(recursive=True)
        if len(children) >= at_least:
            return children
        time.sleep(0.02)
    raise AssertionError("the children have not come")


def assert_all_gone(children, timeout_s):
    _, alive = psutil.wait_procs(children, timeout=timeout_s)
    assert alive == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_everything_and_ends_with_0(tmp_path, number):
    with up(tmp_path) as process:
        line = process.stdout.readline()
        assert line.startswith(READY) and line.endswith(" prefill=1 decode=0 model=tiny\n")
        children = children_of(process, at_least=2)
        process.send_signal(number)
        rest, _ = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, rest) == (0, "")
        assert_all_gone(children, 0)


def test_the_ready_line_tells_where_the_http_api_listens(tmp_path):
    with up(tmp_path, router="--router-of 1 --http http=127.0.0.1:8000") as process:
        line = process.stdout.readline()
    assert " http=127.0.0.1:8000 prefill=1 decode=0 model=tiny\n" in line


def test_ctrl_c_before_it_is_ready_ends_with_130(tmp_path):
    with up(tmp_path, router=NEVER_READY) as process:
        children = children_of(process, at_least=2)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=PATIENCE_S) == ("", "")
        assert process.returncode == 130
        assert_all_gone(children, 0)


def test_sigkill_of_the_launcher_leaves_no_process(tmp_path):
    with up(tmp_path, worker="--ignores-sigterm") as process:
        assert process.stdout.readline().startswith(READY)
        children = children_of(process, at_least=2)
        process.kill()
        assert_all_gone(children, PATIENCE_S)


def test_a_service_that_cannot_start_is_one_line_and_exit_code_1(tmp_path):
    worker = "--say 'error: no room for a block' --exit-code 1"
    with up(tmp_path, worker=worker, router=NEVER_READY) as process:
        out, error = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, out) == (1, "")
        assert error == "error: prefill-0: no room for a block\n"


def test_the_death_of_the_router_ends_with_1(tmp_path):
    with up(tmp_path) as process:
        assert process.stdout.readline().startswith(READY)
        children = children_of(process, at_least=2)
        (router,) = (child for child in children if "--router-of" in child.cmdline())
        router.kill()
        _, error = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1
        assert error.splitlines()[-1].startswith("error: router killed by SIGKILL")


def test_once_prints_the_first_answer_and_ends_with_0(tmp_path):
    with up(tmp_path, "--ask", "The capital?", "--once") as process:
        out, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        assert out.splitlines()[1:] == ["> The capital?", "Paris."]


def test_a_missing_model_is_one_line(capsys):
    assert main(["up", "--model", "/does/not/exist"]) == 1
    error = capsys.readouterr().err
    assert "/does/not/exist" in error and error.count("\n") == 1


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1", "localhost"])
def test_a_given_redis_that_is_not_there_is_one_line(tmp_path, capsys, url):
    assert main(["up", "--model", str(tmp_path), "--redis", url]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and url in error and error.count("\n") == 1
