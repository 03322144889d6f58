"""What quantized weights cost in accuracy: `python -m bench.quantization [--json] [--tokens N]`.

SmolLM2 reads the beginning of its own documentation. Compared with the unquantized model in
float32, at every position: the Kullback-Leibler divergence of the next token's distribution, and
how often the likeliest token is the same. Checkpoints are rounded to the nearest code without
calibration, which AWQ and GPTQ would do better.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from bench.prompt_logits import divergence, prompt_logits
from bench.quantized_checkpoints import GptqOptions, Recipe, awq, fp8, gptq, packed, write_quantized
from bench.report import Reporter, argument_parser
from core.model_folder import ModelFolder
from core.tokenizer import Tokenizer
from engine.fetch_smollm2 import default_folder, fetch
from engine.quantization.schemes import SCHEMES

TEXT = Path(__file__).parents[1] / "docs" / "architecture.md"
# About twice what was found.
SCHEME_GOALS: Mapping[str, str] = {"int8": "<= 0.01", "fp8": "<= 0.05"}
RECIPES: Mapping[str, tuple[Recipe, str]] = {
    "awq, groups of 64": (awq(64), "<= 0.5"),
    "gptq, groups of 64": (gptq(GptqOptions(group_size=64)), "<= 0.5"),
    "gptq, 8 bits": (gptq(GptqOptions(num_bits=8, group_size=64)), "<= 0.01"),
    "compressed-tensors, groups of 64": (packed(group_size=64), "<= 1.0"),
    "fp8, one scale": (fp8(), "<= 0.05"),
    "fp8, blocks of 128": (fp8((128, 128)), "<= 0.05"),
}


def run(reporter: Reporter, num_tokens: int) -> None:
    folder = fetch(default_folder())
    ids = Tokenizer(ModelFolder.load(folder)).encode(TEXT.read_text())[:num_tokens]
    exact = prompt_logits(folder, ids, "auto", torch.float32)

    def report(name: str, logits: torch.Tensor, goal: str) -> None:
        found = divergence(logits, exact)
        same = float((logits.argmax(-1) == exact.argmax(-1)).float().mean())
        reporter.row(weights=name, tokens=len(ids), divergence=found, same_token=same)
        reporter.check(f"divergence of {name}", found, "nats", goal)

    report("bfloat16", prompt_logits(folder, ids, "auto", torch.bfloat16), "<= 0.01")
    for name, goal in SCHEME_GOALS.items():
        logits = prompt_logits(folder, ids, "auto", torch.bfloat16, SCHEMES[name])
        report(name, logits, goal)
    for name, (recipe, goal) in RECIPES.items():
        with tempfile.TemporaryDirectory() as scratch:
            write_quantized(folder, Path(scratch) / "model", recipe)
            logits = prompt_logits(Path(scratch) / "model", ids, "auto", torch.bfloat16)
        report(name, logits, goal)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=512, help="of the text that is read")
    arguments = parser.parse_args()
    reporter = Reporter("quantization", arguments.json)
    run(reporter, arguments.tokens)
    return reporter.finish()


if __name__ == "__main__":
    sys.exit(main())
