"""vLLM's engine behind a pipe: the peer's half of `bench.engine_peer`, run by the peer's Python.

    PYTHON vllm_steps.py FOLDER DTYPE elapsed|cpu

Reads one JSON object a line, {"phase", "prompts", "num_steps"}, and answers {"seconds"}. The
engine lives in this process, as Baton's does in its own: nothing is measured but its steps.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any, TextIO

BLOCK_SIZE = 32  # What its kernels for CPUs ask for.
MAX_MODEL_LEN = 4096


def main() -> None:
    folder, dtype, clock_name = sys.argv[1:]
    # What the engine prints must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    from vllm import LLM

    llm = LLM(
        model=folder,
        dtype=dtype,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=MAX_MODEL_LEN,
        disable_log_stats=True,
    )
    _serve(Steps(llm.llm_engine, clock_name), answers)


def _serve(steps: Steps, answers: TextIO) -> None:
    print(json.dumps({"ready": True}), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        if request["phase"] == "prefill":
            seconds = steps.prefill_s(request["prompts"])
        else:
            seconds = steps.decode_s(request["prompts"], request["num_steps"])
        print(json.dumps({"seconds": seconds}), file=answers)


class Steps:
    """Single kinds of steps, timed as `bench.engine_steps` times Baton's."""

    def __init__(self, engine: Any, clock_name: str) -> None:
        self._engine = engine
        self._clock = time.process_time if clock_name == "cpu" else time.perf_counter
        self._num_requests = 0

    def prefill_s(self, prompts: list[list[int]]) -> float:
        """Seconds until each prompt has its first token."""
        self._add(prompts, max_tokens=1)
        began_at = self._clock()
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return self._clock() - began_at

    def decode_s(self, prompts: list[list[int]], num_steps: int) -> float:
        """Median seconds of a step in which every prompt's sequence gets a token."""
        # Prompts take turns to be computed: the first ones decode meanwhile.
        names = self._add(prompts, max_tokens=num_steps + len(prompts) + 2)
        started: set[str] = set()
        while len(started) < len(names):
            started |= {output.request_id for output in self._engine.step()}
        self._engine.step()
        times = []
        for _ in range(num_steps):
            began_at = self._clock()
            outputs = self._engine.step()
            times.append(self._clock() - began_at)
            assert len(outputs) == len(names), "not every sequence got a token"
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return statistics.median(times)

    def _add(self, prompts: list[list[int]], max_tokens: int) -> list[str]:
        from vllm import SamplingParams
        from vllm.inputs import TokensPrompt

        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        names = []
        for prompt in prompts:
            names.append(f"r{self._num_requests}")
            self._num_requests += 1
            self._engine.add_request(names[-1], TokensPrompt(prompt_token_ids=prompt), sampling)
        return names


if __name__ == "__main__":
    main()
