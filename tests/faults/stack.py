"""A stack of real processes in which a test decides what goes wrong, and when."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from baton.v1 import worker_pb2
from bench.pods import PodStack
from client import Chunk, Completion
from client.launch_plan import UpConfig
from client.processes import ProcessSpec
from tests.e2e.conftest import Reference
from tests.e2e.stack import QUIET
from tests.engine.harness import make_prompt
from tests.faults.control import AnyFault, WorkerFaults, eventually

ROOT = Path(__file__).parents[2]
FAILED = "the workers that served the request have failed; send it again"
"""What a client is told then; the router's log has the reason."""
SILENCE_S = 2.5
"""After so long a suspended worker counts as lost; half of the default, to save time."""
ROUTER_ARGS = (
    *("--worker-silence-s", str(SILENCE_S), "--worker-poll-s", "0.2"),
    # Short prompts are handed off, too: that is what scenarios are about.
    *("--local-prefill-max-tokens", "0"),
)
WORKER_ARGS = ("--dtype", "float32", "--num-gpu-blocks-override", "64")
NUM_NEXT_REQUESTS = 20


class FaultStack(PodStack):
    """A PodStack whose workers have fault points: `faults` by worker id."""

    def __init__(
        self,
        config: UpConfig,
        run_dir: Path,
        reference: Reference,
        extra: Mapping[str, tuple[str, ...]],
        env: Mapping[str, str],
    ) -> None:
        """`extra`: arguments of single workers, by name; `env`: variables of all workers."""
        self.faults: dict[str, WorkerFaults] = {}
        self._env = env
        self._extra = extra
        self.reference = reference
        self._run_dir = run_dir
        self._threads = ThreadPoolExecutor(64)
        self._num_checks = 0
        super().__init__(config, run_dir, self._with_faults)

    def _with_faults(self, spec: ProcessSpec) -> ProcessSpec:
        path = self._run_dir / f"{spec.name}.sock"
        self.faults[spec.name] = WorkerFaults(path)
        module = spec.argv[spec.argv.index("-m") + 1]
        args = (*spec.argv[spec.argv.index("-m") + 2 :], *self._extra.get(spec.name, ()))
        search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        return replace(
            spec,
            argv=(sys.executable, "-m", "tests.faults.worker", str(path), module, *args),
            env={**spec.env, **QUIET, "PYTHONPATH": search, **self._env},
        )

    def close(self) -> None:
        super().close()
        for faults in self.faults.values():
            faults.close()
        self._threads.shutdown()

    @contextmanager
    def hold_any(self, role: str, point: str, skip: int = 0) -> Iterator[AnyFault]:
        """Holds up whoever comes to `point` in any worker of `role`."""
        with ExitStack() as held:
            yield AnyFault(
                {
                    name: held.enter_context(self.faults[name].hold(point, skip=skip))
                    for name in self.workers
                    if name.startswith(role)
                }
            )

    def ask(self, prompt: list[int], num_outputs: int, **options: Any) -> Completion:
        """Greedy tokens unless `options` say otherwise; end tokens are ignored."""
        settings: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True, "timeout_s": 120.0}
        with self.client() as client:
            return client.generate(
                token_ids=prompt, max_tokens=num_outputs, **{**settings, **options}
            )

    def begin(self, prompt: list[int], num_outputs: int, **options: Any) -> Future[Completion]:
        """`ask` in the background."""
        return self._threads.submit(self.ask, prompt, num_outputs, **options)

    def begin_stream(self, prompt: list[int], num_outputs: int) -> Future[list[Chunk]]:
        """Reads every chunk of a greedy stream in the background."""

        def read() -> list[Chunk]:
            with (
                self.client() as client,
                client.stream(
                    token_ids=prompt, max_tokens=num_outputs, temperature=0.0, ignore_eos=True
                ) as stream,
            ):
                return list(stream)

        return self._threads.submit(read)

    def exporter(self) -> str:
        """The prefill worker that holds an export now."""
        found: list[str] = []

        def is_told() -> bool:
            with self.client() as client:
                found.extend(w.id for w in client.status().workers if w.load.exports)
            return bool(found)

        # On a busy machine one may answer too late to be in a status.
        assert eventually(is_told), "nobody exports anything"
        return found[0]

    def worker_status(self, name: str) -> worker_pb2.WorkerStatus:
        """What one worker says of itself now."""
        with self.client() as client:
            return next(worker for worker in client.status().workers if worker.id == name)

    def check_right(self, requests: list[tuple[list[int], int]]) -> None:
        """All of them, at once, get the tokens of an undisturbed run."""
        answers = [self.begin(prompt, num_outputs) for prompt, num_outputs in requests]
        for (prompt, num_outputs), answer in zip(requests, answers, strict=True):
            token_ids, right = answer.result().token_ids, self.reference(prompt, num_outputs)
            assert token_ids == right, f"{token_ids} is not {right}"

    def check_idle(self, timeout_s: float = 30.0) -> None:
        """Everything is back at its idle level on every pod, in time."""
        faults = self.wait_idle(timeout_s)
        assert not faults, faults

    def check_recovered(self) -> None:
        """Everything is idle, and the next requests are right.

        Half of them are new each time, so that they go through prefill and transfer.
        """
        self.check_idle()
        self._num_checks += 1
        half = NUM_NEXT_REQUESTS // 2
        known = [make_prompt(20 + 9 * index) for index in range(half)]
        new = [make_prompt(17 + 7 * index, seed=self._num_checks) for index in range(half)]
        self.check_right([(prompt, 10) for prompt in known + new])
        self.check_idle()


@contextmanager
def fault_stack(
    served: tuple[Path, Reference],
    *,
    extra: Mapping[str, tuple[str, ...]] | None = None,
    unfit: Collection[str] = (),
    env: Mapping[str, str] | None = None,
    **config: Any,
) -> Iterator[FaultStack]:
    """A started FaultStack of the model and the reference in `served`; `config`: UpConfig.

    Workers in `unfit` are not waited for.
    """
    folder, reference = served
    # Paths of unix sockets are short.
    run_dir = Path(tempfile.mkdtemp(prefix="baton-faults-"))
    settings = {"worker_args": WORKER_ARGS, "router_args": ROUTER_ARGS, **config}
    stack = FaultStack(
        UpConfig(str(folder), **settings), run_dir, reference, extra or {}, env or {}
    )
    try:
        stack.start(unfit)
        yield stack
    finally:
        stack.close()
        shutil.rmtree(run_dir)
