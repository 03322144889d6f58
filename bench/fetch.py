"""Fetching a prefix from another prefill worker, against computing it: time to the first token.

Two prefill workers and a decode worker in processes of their own, and the router's link to each.
A prompt is computed by one prefill worker; then the other one is given the same prompt, with the
first as the source of its prefix, and another prompt of the same length, which it computes. Lengths
take turns, and figures are medians. Which of the two ways a worker takes in service it decides by
its own measurements (docs/hand-off.md).
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from time import perf_counter

from baton.v1 import worker_pb2
from bench.pods import PodStack, pod_stack
from bench.report import Reporter, argument_parser
from bench.wide_model import CONFIG, wide_model
from client.launch_plan import UpConfig
from core.errors import BatonError, from_detail
from core.redis_client import connect_redis
from core.registry import Registry
from core.sampling import SamplingParams
from router.attach import WorkerLink
from router.routing import Work

ROUTER_ID = "bench"
LENGTHS = (512, 2048)
BLOCK = 16
MAX_RATIO = 0.5
"""Of the longest prompt: fetching must be clearly worth it where the link is memory."""
TIMEOUT_S = 120.0


class FirstToken:
    """Waits for prefill's first token of one dispatch."""

    def __init__(self, prefill: WorkerLink) -> None:
        self._prefill = prefill
        self.output: asyncio.Future[worker_pb2.SequenceOutput] = (
            asyncio.get_running_loop().create_future()
        )

    def on_output(self, link: WorkerLink, output: worker_pb2.SequenceOutput) -> None:
        if output.HasField("error"):
            self._fail(from_detail(output.error))
        elif output.token_ids and link is self._prefill and not self.output.done():
            self.output.set_result(output)

    def on_lost(self, link: WorkerLink, error: BatonError) -> None:
        self._fail(error)

    def _fail(self, error: BatonError) -> None:
        if not self.output.done():
            self.output.set_exception(error)


class Bench:
    """Links to the workers, by id."""

    def __init__(self, links: dict[str, WorkerLink], seed: int) -> None:
        self._links = links
        self._draw = random.Random(seed)
        self._num_sent = 0

    def prompt(self, length: int) -> list[int]:
        """One that no worker has seen."""
        return [self._draw.randrange(1, CONFIG["vocab_size"]) for _ in range(length)]

    async def first_token(
        self, worker_id: str, prompt: list[int], source: str | None = None
    ) -> tuple[float, int]:
        """Seconds from telling a prefill worker to its first token, and how many it had cached."""
        prefill, decode = self._links[worker_id], self._links["decode-0"]
        self._num_sent += 1
        dispatch = worker_pb2.Dispatch(
            request_id=f"{ROUTER_ID}/{self._num_sent}",
            attempt=1,
            router_id=ROUTER_ID,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=1, seed=0).to_proto(),
            timeout_s=TIMEOUT_S,
            stream_id=self._num_sent,
        )
        sink = FirstToken(prefill)
        held = None if source is None else self._links[source].prefix(len(prompt) // BLOCK)
        try:
            for link in (prefill, decode):
                link.subscribe(dispatch, sink, Work())
            decode.assign(dispatch, prefill)
            began_at = perf_counter()
            prefill.assign(dispatch, decode, held)
            output = await sink.output
            return perf_counter() - began_at, output.cached_tokens
        finally:
            for link in (prefill, decode):
                link.abort((dispatch.request_id, dispatch.attempt))
                link.unsubscribe(dispatch)


@asynccontextmanager
async def linked(stack: PodStack) -> AsyncIterator[dict[str, WorkerLink]]:
    """Links to all workers of `stack`, attached."""
    redis = connect_redis(stack.redis_url)
    records = await Registry(redis).list()
    await redis.aclose()
    changed = asyncio.Event()
    links = {
        record.worker_id: WorkerLink(
            record, ROUTER_ID, TIMEOUT_S, changed.set, lambda worker_id, load: None
        )
        for record in records
    }
    tasks = [asyncio.create_task(link.run()) for link in links.values()]
    try:
        while not all(link.is_ready for link in links.values()):
            await changed.wait()
            changed.clear()
        yield links
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def measure(stack: PodStack, reporter: Reporter, num_rounds: int, seed: int) -> None:
    fetched: dict[int, list[float]] = {length: [] for length in LENGTHS}
    computed: dict[int, list[float]] = {length: [] for length in LENGTHS}
    num_fetched = dict.fromkeys(LENGTHS, 0)
    async with linked(stack) as links:
        bench = Bench(links, seed)
        # The first of each way opens connections and measures the worker's speed and its link.
        for number in range(num_rounds + 1):
            for length in LENGTHS:
                prompt = bench.prompt(length)
                await bench.first_token("prefill-0", prompt)
                fetch_s, cached = await bench.first_token("prefill-1", prompt, "prefill-0")
                compute_s, _ = await bench.first_token("prefill-1", bench.prompt(length))
                if number:
                    fetched[length].append(fetch_s)
                    computed[length].append(compute_s)
                    num_fetched[length] += cached > 0
    for length in LENGTHS:
        reporter.row(
            prompt_tokens=length,
            fetch_ms=1e3 * median(fetched[length]),
            compute_ms=1e3 * median(computed[length]),
            ratio=median(fetched[length]) / median(computed[length]),
            fetched=num_fetched[length] / num_rounds,
        )
    longest = max(LENGTHS)
    ratio = median(fetched[longest]) / median(computed[longest])
    reporter.check(
        f"first token of {longest} fetched tokens", ratio, "of computing", f"<= {MAX_RATIO}"
    )
    share = num_fetched[longest] / num_rounds
    reporter.check("prefixes that were fetched", share, "of those offered", ">= 0.9")


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="of each length and way [7]")
    parser.add_argument("--kv-transport", default="auto", help="as of `baton up` [auto]")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts [0]")
    args = parser.parse_args()
    reporter = Reporter("fetch", args.json)
    with tempfile.TemporaryDirectory() as scratch:
        config = UpConfig(
            model=str(wide_model()),
            num_prefill=2,
            worker_args=("--num-gpu-blocks-override", "1024", "--kv-transport", args.kv_transport),
        )
        with pod_stack(config, Path(scratch)) as stack:
            asyncio.run(measure(stack, reporter, args.rounds, args.seed))
    return reporter.finish()


if __name__ == "__main__":
    sys.exit(main())
