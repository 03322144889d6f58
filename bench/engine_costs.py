"""What steps of the engine cost here: the constants of the cost model of `bench.routing`.

A prompt is prefilled in chunks and batches of several sizes are decoded, in this process and
on one thread, in float32; CPU time. Lines fitted through the steps' times, by least squares:

    chunk of n tokens behind c others  = prefill_step_s + n * (prefill_token_s + c * attended_s)
    step of b sequences with t tokens  = decode_step_s + b * sequence_s + t * context_token_s

The checks say how well the lines fit, as the mean error over the mean time.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from bench.report import Reporter, argument_parser
from core.sampling import SamplingParams
from engine.engine import Engine, EngineConfig, load_engine
from engine.fetch_smollm2 import default_folder, fetch
from engine.sequence import Sequence as EngineSequence

CHUNKS = (128, 512)
PROMPT = 2048
BATCHES = (1, 4, 16, 32)
CONTEXTS = (64, 512)
DECODE_STEPS = 4
MAX_NUM_BLOCKS = 2200


def prefill_steps(engine: Engine) -> Iterator[tuple[int, int, float]]:
    """(tokens, tokens before them, seconds) of each chunk of a prompt."""
    yield from ((n, start, seconds) for n, start, _, seconds in _steps(engine, [PROMPT], 1))


def decode_steps(engine: Engine, batch: int, context: int) -> list[float]:
    """Seconds of some steps of `batch` sequences with about `context` tokens each."""
    seconds: list[float] = []
    with closing(_steps(engine, [context] * batch, PROMPT)) as steps:
        for num_tokens, _, is_decode, elapsed_s in steps:
            if is_decode and num_tokens == batch:
                seconds.append(elapsed_s)
            if len(seconds) == DECODE_STEPS:
                break
    return seconds


def _steps(
    engine: Engine, prompts: Sequence[int], num_outputs: int
) -> Generator[tuple[int, int, bool, float], None, None]:
    """(tokens, start of the first sequence, whether all decode, seconds) of each step."""
    draw = random.Random(len(prompts))
    for index, num_tokens in enumerate(prompts):
        ids = [draw.randrange(1, engine.model_config.vocab_size) for _ in range(num_tokens)]
        sampling = SamplingParams(max_tokens=num_outputs, temperature=0.0)
        engine.scheduler.add(EngineSequence(f"r{index}", 1, ids, sampling, b""))
    try:
        while (batch := engine.scheduler.schedule()) is not None:
            began_at = time.process_time()
            result = engine.runner.execute(batch)
            seconds = time.process_time() - began_at
            start = batch.sequences[0].start
            engine.scheduler.postprocess(batch, result)
            yield batch.num_tokens, start, batch.is_decode_only, seconds
    finally:
        for index in range(len(prompts)):
            engine.scheduler.abort((f"r{index}", 1, 0))


def fit(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[list[float], float]:
    """Coefficients of the least squares fit, none below 0, and its relative error."""
    matrix, target = np.array(rows), np.array(seconds)
    columns = list(range(matrix.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, columns], target, rcond=None)
        if found.min() >= 0:
            break
        # What comes out negative cannot be told from nothing.
        columns.pop(int(found.argmin()))
    coefficients = np.zeros(matrix.shape[1])
    coefficients[columns] = found
    error = float(np.abs(matrix @ coefficients - target).mean() / target.mean())
    return [float(value) for value in coefficients], error


def run(reporter: Reporter) -> None:
    folder = fetch(default_folder())
    rows: list[list[float]] = []
    seconds: list[float] = []
    for chunk in CHUNKS:
        engine = _engine(folder, chunk)
        for num_tokens, before, elapsed_s in prefill_steps(engine):
            rows.append([1, num_tokens, num_tokens * before])
            seconds.append(elapsed_s)
    names = ("prefill_step_s", "prefill_token_s", "attended_s")
    _report(reporter, "prefill", names, fit(rows, seconds))
    rows, seconds = [], []
    engine = _engine(folder, 512)
    for batch in BATCHES:
        for context in CONTEXTS:
            times = decode_steps(engine, batch, context)
            rows.append([1, batch, batch * context])
            seconds.append(float(np.median(times)))
    names = ("decode_step_s", "sequence_s", "context_token_s")
    _report(reporter, "decode", names, fit(rows, seconds))


def _engine(folder: Path, chunk: int) -> Engine:
    return load_engine(
        EngineConfig(
            model=folder,
            dtype="float32",
            num_threads=1,
            num_gpu_blocks_override=MAX_NUM_BLOCKS,
            max_model_len=2 * PROMPT,
            max_num_batched_tokens=chunk,
            long_prefill_token_threshold=2 * PROMPT,
        ),
        lambda message: None,
    )


def _report(
    reporter: Reporter, phase: str, names: Sequence[str], fitted: tuple[list[float], float]
) -> None:
    coefficients, error = fitted
    reporter.row(phase=phase, **dict(zip(names, coefficients, strict=True)))
    reporter.check(f"error of the fit, {phase}", error, "of the mean step", "< 0.2")


def main() -> int:
    arguments = argument_parser(__doc__).parse_args()
    reporter = Reporter("engine_costs", arguments.json)
    run(reporter)
    return reporter.finish()


if __name__ == "__main__":
    sys.exit(main())
