"""What a migration changes: KV that decode steps wrote is computed again by a prefill.

The two round in different orders. The bounds on log-probabilities that docs/hand-off.md states
are held here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.batch import SampledToken
from tests import tiny_models
from tests.engine.harness import make_engine, make_prompt, make_sequence, run_with_logprobs

BOUNDS = {"float32": 1e-4, "bfloat16": 0.25}
NUM_OUTPUTS = 18


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", ["llama", "mistral-window", "qwen2", "qwen3"])
def test_log_probabilities_after_a_migration_stay_within_the_stated_bound(
    tmp_path: Path, name: str, dtype: str
) -> None:
    folder = tiny_models.build(tmp_path / "model", name)
    engine = make_engine(folder, dtype=dtype, num_gpu_blocks_override=128)
    prompt = make_prompt(40)
    sequence = make_sequence(prompt, NUM_OUTPUTS, "undisturbed", logprobs=5)
    undisturbed = run_with_logprobs(engine, sequence)
    for num_prior in range(1, NUM_OUTPUTS, 4):
        moved = make_sequence(prompt, NUM_OUTPUTS, f"moved-{num_prior}", logprobs=5)
        moved.output_token_ids = [token.token_id for token in undisturbed[:num_prior]]
        moved.num_prior_outputs = num_prior
        # Another scope: nothing that the undisturbed run has cached is taken over.
        moved.scope = bytes([num_prior]) * 16
        first = run_with_logprobs(engine, moved)[0]
        assert _difference(undisturbed[num_prior], first) <= BOUNDS[dtype]


def _difference(one: SampledToken, other: SampledToken) -> float:
    """The largest over the likeliest tokens that both list."""
    assert one.logprobs is not None and other.logprobs is not None
    left, right = dict(one.logprobs.top), dict(other.logprobs.top)
    common = left.keys() & right.keys()
    assert len(common) >= 4
    return max(abs(left[token] - right[token]) for token in common)
