"""Drives a whole engine synchronously, and asks transformers for the tokens it should give."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

from bench.drive import drive
from core.sampling import SamplingParams
from engine.batch import SampledToken
from engine.engine import Engine, EngineConfig, load_engine
from engine.sequence import Sequence

SCOPE = bytes(16)


def make_engine(folder: Path, **settings: object) -> Engine:
    """A float32 engine of 64 blocks on one thread; `settings` override."""
    defaults: dict[str, object] = {
        "dtype": "float32",
        "num_gpu_blocks_override": 64,
        "num_threads": 1,
    }
    config = EngineConfig(model=folder, **{**defaults, **settings})  # type: ignore[arg-type]
    return load_engine(config, progress=lambda _: None)


def make_prompt(length: int, seed: int = 0) -> list[int]:
    """`length` random byte tokens."""
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(0, 256, (length,), generator=generator).tolist()


def make_sequence(
    prompt: list[int], num_outputs: int = 12, name: str = "r", **sampling: object
) -> Sequence:
    params = SamplingParams(max_tokens=num_outputs, **sampling)  # type: ignore[arg-type]
    return Sequence(name, 0, list(prompt), params, SCOPE)


def run(engine: Engine, sequences: list[Sequence], *, is_async: bool = False) -> list[list[int]]:
    """Output tokens of each sequence, all started together."""
    for sequence in sequences:
        engine.scheduler.add(sequence)
    drive(engine, is_async=is_async)
    assert engine.scheduler.audit() == []
    assert all(sequence.is_finished for sequence in sequences)
    return [sequence.output_token_ids for sequence in sequences]


def run_prompts(
    engine: Engine, prompts: list[list[int]], num_outputs: int = 12, *, is_async: bool = False
) -> list[list[int]]:
    """Greedy outputs of each prompt, all started together."""
    return run(
        engine,
        [make_sequence(prompt, num_outputs, str(index)) for index, prompt in enumerate(prompts)],
        is_async=is_async,
    )


def run_with_logprobs(engine: Engine, sequence: Sequence) -> list[SampledToken]:
    """Every sampled token of one sequence alone."""
    tokens: list[SampledToken] = []
    engine.scheduler.add(sequence)
    while (batch := engine.scheduler.schedule()) is not None:
        for update in engine.scheduler.postprocess(batch, engine.runner.execute(batch)):
            if update.token is not None:
                tokens.append(update.token)
    return tokens


def reference_logprobs(model: transformers.PreTrainedModel, prompt: list[int]) -> torch.Tensor:
    """What transformers gives the token after each of `prompt`: [tokens - 1, vocab_size]."""
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)


def reference_tokens(
    model: transformers.PreTrainedModel, prompt: list[int], num_outputs: int = 12
) -> list[int]:
    """What transformers' own greedy `generate` gives, end tokens ignored."""
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    inputs = torch.tensor([prompt])
    output = model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        do_sample=False,
        max_new_tokens=num_outputs,
    )
    return output[0, len(prompt) :].tolist()
