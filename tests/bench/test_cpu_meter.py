"""CPU time of a process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time

import pytest

from bench.cpu_meter import cpu_s


def test_it_counts_threads_that_have_ended() -> None:
    def work() -> None:
        until = time.thread_time() + 0.05
        while time.thread_time() < until:
            pass

    before_s = cpu_s(os.getpid())
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert cpu_s(os.getpid()) - before_s >= 0.05


def test_a_process_that_is_gone_is_an_error() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    with pytest.raises(OSError):
        cpu_s(process.pid)
