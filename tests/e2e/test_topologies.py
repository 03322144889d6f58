"""Every architecture through real processes: both transports, one and two workers a role."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import tiny_models
from tests.e2e.conftest import Reference
from tests.e2e.stack import RunningStack, running_stack
from tests.engine.harness import make_prompt

pytestmark = pytest.mark.e2e

LENGTHS = (1, 15, 16, 17, 33, 64, 65, 100, 150)
NUM_OUTPUTS = 12

SMALL_DECODE_POOL = "--decode-args=--num-gpu-blocks-override 24"
# Sequences of more than 60 tokens that decode must evict go back to prefill.
HANDING_BACK = f"{SMALL_DECODE_POOL} --max-recompute-tokens 60"
SMALL_STEPS = ("--max-num-batched-tokens", "64")


def check(stack: RunningStack, reference: Reference) -> set[tuple[str, str]]:
    """Alone, repeated and sixteen at a time; returns the pairs of workers that served."""
    prompts = [make_prompt(length) for length in LENGTHS]
    routes = set()
    for _ in range(2):
        for prompt in prompts:
            answer = stack.greedy(prompt, NUM_OUTPUTS)
            assert answer.token_ids == reference(prompt, NUM_OUTPUTS)
            routes.add((answer.route.prefill_worker, answer.route.decode_worker))
    crowd = [make_prompt(length, seed) for seed in range(4) for length in (9, 40, 70, 120)]
    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(lambda prompt: stack.greedy(prompt, 40), crowd))
    for prompt, answer in zip(crowd, answers, strict=True):
        assert answer.token_ids == reference(prompt, 40)
        routes.add((answer.route.prefill_worker, answer.route.decode_worker))
    stack.wait_until_idle()
    return routes


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("llama-tied", ("--kv-transport", "nixl", SMALL_DECODE_POOL)),
        ("mistral-window", ("--kv-transport", "tcp", "--prefill", "2", "--decode", "2")),
        ("qwen2", ("--kv-transport", "ucxx", "--prefill", "2", "--decode", "2")),
        ("qwen3", ("--kv-transport", "tcp", HANDING_BACK)),
    ],
)
def test_tokens_equal_those_of_transformers(tiny, name: str, args: tuple[str, ...]) -> None:  # type: ignore[no-untyped-def]
    folder, reference = tiny(name)
    with running_stack(folder, "--dtype", "float32", *SMALL_STEPS, *args) as stack:
        routes = check(stack, reference)
    if "--prefill" in args:
        assert {prefill for prefill, _ in routes} == {"prefill-0", "prefill-1"}
        assert {decode for _, decode in routes} == {"decode-0", "decode-1"}


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["nixl", "ucxx", "tcp"])
@pytest.mark.parametrize("name", tiny_models.VARIANTS)
def test_every_variation_is_exact(tiny, name: str, transport: str) -> None:  # type: ignore[no-untyped-def]
    folder, reference = tiny(name)
    args = ("--dtype", "float32", *SMALL_STEPS, SMALL_DECODE_POOL)
    with running_stack(folder, "--kv-transport", transport, *args) as stack:
        check(stack, reference)


def test_a_sharded_checkpoint_is_served(tmp_path: Path, tiny) -> None:  # type: ignore[no-untyped-def]
    _, reference = tiny("llama")
    folder = tiny_models.build(tmp_path / "sharded", "llama", max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    with running_stack(folder, "--kv-transport", "tcp") as stack:
        prompt = make_prompt(40)
        assert stack.greedy(prompt, NUM_OUTPUTS).token_ids == reference(prompt, NUM_OUTPUTS)
