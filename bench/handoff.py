"""What handing a prompt's KV from prefill to decode costs a client, over a whole stack.

The exposed hand-off time is (second token - first token) - median ITL, measured at the client's
stream: what the second token takes beyond a usual one. For SmolLM2 and for a random model with
64 KiB of KV a token, both in float32, a core for prefill and one for decode:

- over shared memory (nixl), and over a link of 1 Gbit/s (tcp through a relay that paces bytes)
- with and without overlap (`--kv-overlap`), and with and without digests (`--kv-verify`)

`serial_ms` is what the transfer takes alone, in one piece and with nothing else running;
`hidden` is the share of it by which the exposed time is shorter. All stacks of a comparison run
at the same time and are asked one after the other in random order, each prompt being new.
Two stacks with the same flags differ by some per cent, each for as long as it lives, so every
comparison is made by several lives of its stacks. Figures are medians; intervals are
bootstrapped from the ratios within one round.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from statistics import median

from bench.handoff_stacks import GIGABIT, SHARED_MEMORY, Link, Model, serial_transfer_s, serving
from bench.report import Reporter, argument_parser
from bench.timing import Estimate, Timing, timed_request
from bench.wide_model import wide_model
from client import AsyncBatonClient
from engine.fetch_smollm2 import default_folder, fetch

NUM_OUTPUTS = 16
WARM_UP_TOKENS = (256, 512, 768)
"""Lengths of prompts from which the workers learn the speeds of link and computation."""
NUM_LIVES = 4
"""How often each comparison's stacks are started anew."""
REPETITIONS = {64: 3, 256: 3, 1024: 2, 4096: 1}
"""Rounds in each life, by the prompt's length."""
QUICK_REPETITIONS = {256: 3, 1024: 3}
LINKS = {"shared-memory": SHARED_MEMORY, "1gbit": GIGABIT}
LONG = 1024
"""Tokens from which on overlap has to hide the transfer."""


@dataclass(frozen=True)
class Variant:
    """One way to run the workers."""

    overlap: bool = True
    digests: bool = True

    @property
    def flags(self) -> tuple[str, ...]:
        verify = "always" if self.digests else "off"
        return ("--kv-overlap" if self.overlap else "--no-kv-overlap", "--kv-verify", verify)


OVERLAP, IN_ONE_PIECE, UNVERIFIED = Variant(), Variant(overlap=False), Variant(digests=False)
Timings = Mapping[Variant, list[Timing]]
"""The i-th timings of all variants belong to one round."""


class Comparison:
    """The variants of one model over one link."""

    def __init__(self, reporter: Reporter, model: Model, link: Link) -> None:
        self._reporter = reporter
        self._model = model
        self._link = link
        self._name = f"{model.name}, {link.name}"
        self._draw = random.Random(0)
        self._variants = [OVERLAP, IN_ONE_PIECE]
        if link is SHARED_MEMORY:
            self._variants.append(UNVERIFIED)

    async def run(self, repetitions: Mapping[int, int], num_lives: int) -> None:
        """Measures and reports each of the prompt lengths, so many times in each life."""
        serial_s = {n: serial_transfer_s(self._model, self._link, n) for n in repetitions}
        rounds: dict[int, list[dict[Variant, Timing]]] = {n: [] for n in repetitions}
        for _ in range(num_lives):
            for num_tokens, timings in await self._life(repetitions):
                rounds[num_tokens].append(timings)
        for num_tokens, found in rounds.items():
            by_variant = {v: [timing[v] for timing in found] for v in self._variants}
            self._report(num_tokens, serial_s[num_tokens], by_variant)
            self._check(num_tokens, serial_s[num_tokens], by_variant)

    async def _life(
        self, repetitions: Mapping[int, int]
    ) -> list[tuple[int, dict[Variant, Timing]]]:
        """One life of the stacks: lengths and timings of its rounds."""
        async with AsyncExitStack() as stack:
            clients = {}
            for variant in self._draw.sample(self._variants, len(self._variants)):
                served = serving(self._model, self._link, variant.flags)
                clients[variant] = await stack.enter_async_context(served)
            for num_tokens in WARM_UP_TOKENS:
                await self._round(clients, num_tokens)
            return [
                (num_tokens, await self._round(clients, num_tokens))
                for num_tokens, num_rounds in repetitions.items()
                for _ in range(num_rounds)
            ]

    async def _round(
        self, clients: Mapping[Variant, AsyncBatonClient], num_tokens: int
    ) -> dict[Variant, Timing]:
        timings = {}
        for variant in self._draw.sample(self._variants, len(self._variants)):
            prompt = [self._draw.randrange(1, self._model.vocab_size) for _ in range(num_tokens)]
            timing, route = await timed_request(clients[variant], prompt, NUM_OUTPUTS)
            assert route.cached_tokens == 0 and route.attempts == 1, f"disturbed: {route}"
            timings[variant] = timing
        return timings

    def _report(self, num_tokens: int, serial_s: float, timings: Timings) -> None:
        for variant, values in timings.items():
            exposed_s = median(timing.exposed_s for timing in values)
            ttft_s = median(timing.ttft_s for timing in values)
            self._reporter.row(
                model=self._model.name,
                link=self._link.name,
                overlap=variant.overlap,
                digests=variant.digests,
                prompt=num_tokens,
                ttft_ms=ttft_s * 1e3,
                itl_ms=median(timing.itl_s for timing in values) * 1e3,
                exposed_ms=exposed_s * 1e3,
                of_ttft=exposed_s / ttft_s,
                serial_ms=serial_s * 1e3,
                hidden=1 - exposed_s / serial_s if self._link is GIGABIT else None,
                total_ms=median(timing.total_s for timing in values) * 1e3,
            )

    def _check(self, num_tokens: int, serial_s: float, timings: Timings) -> None:
        overlapped = timings[OVERLAP]
        prompt = f"{self._name}, {num_tokens} tokens"
        total = Estimate.of(
            [
                own.total_s / other.total_s
                for own, other in zip(overlapped, timings[IN_ONE_PIECE], strict=True)
            ]
        )
        self._reporter.check(
            f"latency with overlap, {prompt} ({total})", total.median, "of without", "<= 1.02"
        )
        if num_tokens < LONG:
            return
        if self._link is GIGABIT:
            hidden = 1 - median(timing.exposed_s for timing in overlapped) / serial_s
            self._reporter.check(f"hidden, {prompt}", hidden, "of serial transfer", ">= 0.7")
            return
        exposed = median(timing.exposed_s / timing.ttft_s for timing in overlapped)
        self._reporter.check(f"exposed, {prompt}", exposed, "of TTFT", "< 0.03")
        if num_tokens == LONG:
            self._check_digests(prompt, timings)

    def _check_digests(self, prompt: str, timings: Timings) -> None:
        """What digests add until the second token, the first that they can hold up."""
        cost = Estimate.of(
            [
                (own.ttft_s + own.second_gap_s - other.ttft_s - other.second_gap_s) / other.ttft_s
                for own, other in zip(timings[OVERLAP], timings[UNVERIFIED], strict=True)
            ]
        )
        self._reporter.check(f"digests, {prompt} ({cost})", cost.median, "of TTFT", "< 0.03")


async def run(reporter: Reporter, arguments: argparse.Namespace) -> None:
    models = {"wide": lambda: Model("random, 64 KiB a token", wide_model())}
    models["smollm2"] = lambda: Model("SmolLM2", fetch(default_folder()))
    repetitions = QUICK_REPETITIONS if arguments.quick else REPETITIONS
    num_lives = 1 if arguments.quick else NUM_LIVES
    names = ["wide"] if arguments.quick and not arguments.model else arguments.model or models
    for name in names:
        model = await asyncio.to_thread(models[name])
        for link_name in arguments.link or LINKS:
            comparison = Comparison(reporter, model, LINKS[link_name])
            await comparison.run(repetitions, num_lives)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="wide model, short prompts, few repetitions"
    )
    parser.add_argument("--model", action="append", choices=["wide", "smollm2"], help="[both]")
    parser.add_argument("--link", action="append", choices=[*LINKS], help="[both]")
    arguments = parser.parse_args()
    reporter = Reporter("handoff", arguments.json)
    asyncio.run(run(reporter, arguments))
    return reporter.finish()


if __name__ == "__main__":
    sys.exit(main())
