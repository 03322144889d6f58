"""What handing a prompt's KV from prefill to decode costs a client, over a whole stack.

The exposed hand-off time is (second token - first token) - median ITL, measured at the client's
stream: what the second token takes beyond a usual one. For SmolLM2 and for a random model with
64 KiB of KV a token, both in float32, a core for prefill and one for decode:

- over shared memory (nixl), and over a link of 1 Gbit/s (tcp through a relay that paces bytes)
- with and without overlap (`--kv-overlap`), and with and without digests (`--kv-verify`)

`serial_ms` is what the transfer takes alone, in one piece and with nothing else running;
`hidden` is the share of it by which the exposed time is shorter. All stacks of a comparison run
at the same time and are asked one after the other in random order, each prompt being new.
Figures are medians; intervals are bootstrapped from the ratios within one round.
"""

from __future__ import annotations

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
REPETITIONS = {64: 11, 256: 9, 1024: 7, 4096: 3}
QUICK_REPETITIONS = {256: 3, 1024: 3}
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

    async def run(self, repetitions: Mapping[int, int]) -> None:
        """Measures and reports each of the prompt lengths so many times."""
        serial_s = {n: serial_transfer_s(self._model, self._link, n) for n in repetitions}
        async with AsyncExitStack() as stack:
            clients = {}
            for variant in self._variants:
                served = serving(self._model, self._link, variant.flags)
                clients[variant] = await stack.enter_async_context(served)
            for num_tokens in WARM_UP_TOKENS:
                await self._round(clients, num_tokens)
            for num_tokens, num_rounds in repetitions.items():
                rounds = [await self._round(clients, num_tokens) for _ in range(num_rounds)]
                timings = {v: [timing[v] for timing in rounds] for v in self._variants}
                self._report(num_tokens, serial_s[num_tokens], timings)
                self._check(num_tokens, serial_s[num_tokens], timings)

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


async def run(reporter: Reporter, is_quick: bool) -> None:
    models = [Model("random, 64 KiB a token", await asyncio.to_thread(wide_model))]
    if not is_quick:
        models.append(Model("SmolLM2", await asyncio.to_thread(fetch, default_folder())))
    repetitions = QUICK_REPETITIONS if is_quick else REPETITIONS
    for model in models:
        for link in (SHARED_MEMORY, GIGABIT):
            await Comparison(reporter, model, link).run(repetitions)


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="random model, short prompts, few repetitions"
    )
    arguments = parser.parse_args()
    reporter = Reporter("handoff", arguments.json)
    asyncio.run(run(reporter, arguments.quick))
    return reporter.finish()


if __name__ == "__main__":
    sys.exit(main())
