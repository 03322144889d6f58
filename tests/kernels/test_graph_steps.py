"""The decoder of the GPU path in a whole engine, with every graph mode, in the interpreter.

Instead of being recorded, a graph's work is run again: it reads the same buffers, and sees what
padding and what an earlier step left in them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu_model import RunAgain
from engine.attention.triton import TritonAttention, TritonSettings
from engine.batch import StepResult
from engine.engine import Engine
from engine.gpu_runner import make_gpu_runner, measure_graph_bytes, run_largest_step
from engine.graphs import GraphMode, GraphOptions
from engine.runner import ModelRunner
from engine.triton_decoder import TritonDecoder
from engine.triton_graphs import GraphModel
from tests import tiny_models
from tests.engine.harness import make_engine, make_prompt, make_sequence, run

PROMPTS = [make_prompt(length) for length in (3, 11, 17)]


def triton_model(engine: Engine) -> GraphModel:
    decoder = engine.runner.decoder
    attention = TritonAttention(engine.kv_cache, TritonSettings(decoder.config.num_heads, 8))
    return GraphModel(TritonDecoder(decoder.config, decoder.weights), attention, 512)


def triton_runner(engine: Engine, mode: GraphMode, sizes: tuple[int, ...]) -> ModelRunner:
    options = GraphOptions(mode, sizes)
    return make_gpu_runner(triton_model(engine), options, 4, RunAgain(), lambda _: None)


def outputs(
    engine: Engine, runner: ModelRunner | None = None, *, is_async: bool = False
) -> list[list[int]]:
    """Some greedy, some drawn; one needs the host's sampler, and while it runs, all steps wait."""
    if runner is not None:
        object.__setattr__(engine, "runner", runner)
    settings: list[dict[str, object]] = [
        {},
        {"temperature": 0.8, "top_p": 0.9, "seed": 3},
        {"repetition_penalty": 1.3},
    ]
    return run(
        engine,
        [
            make_sequence(prompt, 2 + number // 2, str(number), **setting)
            for number, (prompt, setting) in enumerate(zip(PROMPTS, settings, strict=True))
        ],
        is_async=is_async,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.build(tmp_path_factory.mktemp("model"), "qwen3-layer-types")


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return outputs(make_engine(folder, max_num_batched_tokens=8, max_num_seqs=4))


@pytest.mark.parametrize("mode", list(GraphMode))
def test_every_mode_gives_the_tokens_of_the_reference(
    folder: Path, expected: list[list[int]], mode: GraphMode
) -> None:
    engine = make_engine(folder, max_num_batched_tokens=8, max_num_seqs=4)
    engine.kv_cache.data.fill_(float("nan"))
    assert outputs(engine, triton_runner(engine, mode, (2, 8))) == expected


@pytest.mark.parametrize("mode", [GraphMode.NONE, GraphMode.FULL_AND_PIECEWISE])
def test_steps_planned_ahead_give_the_tokens_of_the_reference(
    folder: Path, expected: list[list[int]], mode: GraphMode
) -> None:
    engine = make_engine(folder, max_num_batched_tokens=8, max_num_seqs=4)
    assert outputs(engine, triton_runner(engine, mode, (2, 8)), is_async=True) == expected


def test_a_device_that_chooses_all_tokens_yields_them_late(folder: Path) -> None:
    engine = make_engine(folder)
    runner = triton_runner(engine, GraphMode.FULL_DECODE_ONLY, (4,))
    engine.scheduler.add(make_sequence(PROMPTS[0], 3))
    first = engine.scheduler.schedule()
    second = engine.scheduler.schedule_ahead()
    assert first is not None and second is not None
    late = [runner.launch(batch) for batch in (first, second)]
    assert not any(isinstance(each, StepResult) for each in late)
    engine.scheduler.postprocess(first, late[0].wait())
    engine.scheduler.postprocess(second, late[1].wait())
    expected = run(make_engine(folder), [make_sequence(PROMPTS[0], 2)])
    assert [first.sequences[0].sequence.output_token_ids] == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", list(tiny_models.VARIANTS))
def test_every_architecture_gives_the_tokens_of_the_reference(tmp_path: Path, name: str) -> None:
    folder = tiny_models.build(tmp_path, name)
    expected = outputs(make_engine(folder, max_num_batched_tokens=8, max_num_seqs=4))
    engine = make_engine(folder, max_num_batched_tokens=8, max_num_seqs=4)
    assert outputs(engine, triton_runner(engine, GraphMode.FULL_DECODE_ONLY, (4,))) == expected


def test_pieces_tell_of_every_layer(folder: Path) -> None:
    engine = make_engine(folder)
    runner = triton_runner(engine, GraphMode.PIECEWISE, (4,))
    engine.scheduler.add(make_sequence(PROMPTS[0]))
    batch = engine.scheduler.schedule()
    assert batch is not None
    layers: list[int] = []
    runner.execute(batch, layers.append)
    assert layers == [1, 2, 3]


def test_logits_that_are_not_finite_give_no_token(folder: Path) -> None:
    engine = make_engine(folder)
    runner = triton_runner(engine, GraphMode.NONE, (4,))
    engine.runner.decoder.weights.final_norm.fill_(float("nan"))
    engine.scheduler.add(make_sequence(PROMPTS[0]))
    batch = engine.scheduler.schedule()
    assert batch is not None
    assert runner.execute(batch).tokens == (None,)


def test_graphs_take_what_the_largest_takes_and_for_each_other_what_the_second_adds(
    folder: Path,
) -> None:
    model = triton_model(make_engine(folder))
    free = iter([1000, 900, 893])
    options = GraphOptions(GraphMode.FULL_DECODE_ONLY, (1, 2, 4, 8))
    assert measure_graph_bytes(model, options, RunAgain(), lambda: next(free)) == 100 + 3 * 7


def test_the_largest_step_writes_no_kv(folder: Path) -> None:
    engine = make_engine(folder)
    run_largest_step(triton_model(engine), 40, 4)
    assert engine.kv_cache.data.count_nonzero() == 0


def test_no_graphs_take_no_memory(folder: Path) -> None:
    model = triton_model(make_engine(folder))
    assert measure_graph_bytes(model, GraphOptions(GraphMode.NONE, (4,)), RunAgain(), int) == 0
