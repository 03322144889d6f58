"""What becomes of each class when three times as much is asked as can be served.

One prefill and one decode worker with a small random model. First the capacity is measured,
with clients that wait for their answers; then requests of three classes come at random, each
class with as many a second as the whole stack can serve, for `--seconds`. Limits of the time
to the first token are set by what a request takes alone: 30, 60 and 120 times as long for gold,
silver and bronze (with fewer than about eight requests' worth, arrivals by chance leave gold's
line empty too often for its share), and gold has 70 % of the capacity, silver 30 %, bronze what
is left.

Checked: who is admitted gets the first token within its class's limit (19 of 20; bronze, which
has no guarantee, counts only among all), who is refused hears it at once and when to come back,
gold gets its share, nothing is held by anybody afterwards, and a request that comes after the
load is served as if there had been none.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.overload_load import Load, Shot, median, quantile
from bench.pods import PodStack, pod_stack
from bench.random_model import write_random_model
from bench.report import Reporter, argument_parser
from client.launch_plan import UpConfig
from core.errors import BatonError
from core.rpc import open_channel
from router.tenant_file import POLL_S

SHARES = {"gold": 0.7, "silver": 0.3, "bronze": 0.0}
LIMIT_FACTORS = {"gold": 30, "silver": 60, "bronze": 120}
MIN_ALONE_S = 0.05
"""Limits below this times their factor are within the machine's own noise."""
NUM_BLOCKS = 512
MODEL: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
}
WARM_UP = 0.25
"""Part of the load's time after which shares are counted: first the queue fills."""
RECOVERY_S = 5.0


@dataclass(frozen=True)
class Capacity:
    """What the stack can do when it is not overloaded."""

    alone_s: float
    """Time to the first token of a request that is alone."""
    requests_per_s: float

    def limit_s(self, class_name: str) -> float:
        return LIMIT_FACTORS[class_name] * max(MIN_ALONE_S, self.alone_s)


def tenants(limits: dict[str, float] | None = None) -> str:
    """The file of tenants: one of each class, whose key is its name."""
    lines = ["classes:"]
    for name, share in SHARES.items():
        limit = f", ttft_limit_s: {limits[name]:.3f}" if limits else ""
        lines.append(f"  {name}: {{share: {share}{limit}}}")
    lines.append("tenants:")
    lines += [f"  {name}: {{class: {name}, keys: [{name}]}}" for name in SHARES]
    return "\n".join([*lines, "default: {}"])


async def measure_capacity(load: Load, seconds: float) -> Capacity:
    for _ in range(3):
        await load.shoot("silver")
    alone = [await load.shoot("silver") for _ in range(10)]
    shots = await load.saturate(num_clients=12, seconds=seconds)
    ended = [shot for shot in shots if shot.error is None]
    last = max(shot.at + (shot.total_s or 0.0) for shot in shots)
    return Capacity(median(shot.ttft_s or 0.0 for shot in alone), len(ended) / last)


async def recovery_s(load: Load, capacity: Capacity) -> float:
    """How long after the load a request is served about as fast as one that is alone."""
    began_at = time.perf_counter()
    while (since_s := time.perf_counter() - began_at) < 4 * RECOVERY_S:
        shot = await load.shoot("bronze")
        if shot.ttft_s is not None and shot.ttft_s < 3 * max(MIN_ALONE_S, capacity.alone_s):
            return since_s
        await asyncio.sleep(0.1)
    return float("inf")


def report_classes(
    reporter: Reporter, shots: list[Shot], capacity: Capacity, seconds: float
) -> None:
    """What each class got, and whether in time."""
    admitted = [shot for shot in shots if not shot.is_refused]
    num_late = 0
    for name in SHARES:
        asked = sum(shot.class_name == name for shot in shots)
        own = [shot for shot in admitted if shot.class_name == name]
        ttfts = [shot.ttft_s for shot in own if shot.ttft_s is not None]
        limit_s = capacity.limit_s(name)
        reporter.row(
            tenant=name,
            asked=asked,
            admitted=len(own),
            ttft_p50_s=quantile(ttfts, 0.5),
            ttft_p95_s=quantile(ttfts, 0.95),
            ttft_limit_s=limit_s,
        )
        late = sum(ttft > limit_s for ttft in ttfts)
        num_late += late
        if SHARES[name]:
            in_time = 1.0 - late / max(1, len(ttfts))
            reporter.check(f"{name}: admitted and in time", in_time, "part", ">= 0.95")
    in_time = 1.0 - num_late / max(1, len(admitted))
    reporter.check("all: admitted and in time", in_time, "part", ">= 0.95")
    failed = [shot for shot in admitted if shot.error is not None]
    reporter.check("admitted and not served", len(failed), "requests", "== 0")
    counted = [shot.class_name for shot in admitted if shot.at >= WARM_UP * seconds]
    share = counted.count("gold") / len(counted)
    reporter.check("gold's part of what was served", share, "part", f">= {0.9 * SHARES['gold']}")


def report_refusals(reporter: Reporter, refused: list[Shot], bare_s: list[float]) -> None:
    """How fast they were; on a busy machine even a call that asks for nothing takes its time."""
    waits = [shot.total_s or 0.0 for shot in refused]
    errors = [shot.error for shot in refused if isinstance(shot.error, BatonError)]
    beyond_ms = 1000 * (quantile(waits, 0.95) - quantile(bare_s, 0.95))
    for name, times in (("refused", waits), ("bare call", bare_s)):
        p50_ms, p95_ms = (1000 * quantile(times, q) for q in (0.5, 0.95))
        reporter.row(tenant=name, asked=len(times), p50_ms=p50_ms, p95_ms=p95_ms)
    reporter.check("refused within, p95, beyond a bare call", beyond_ms, "ms", "<= 50")
    told = sum(error.retry_after_s > 0 for error in errors) / max(1, len(errors))
    reporter.check("refused with a time to come back", told, "part", "== 1.0")


async def measure(stack: PodStack, path: Path, reporter: Reporter, seconds: float) -> None:
    async with open_channel(stack.address) as channel:
        load = Load(channel, random.Random(0))
        capacity = await measure_capacity(load, seconds / 2)
        reporter.row(
            tenant="capacity", alone_s=capacity.alone_s, requests_per_s=capacity.requests_per_s
        )
        limits = {name: capacity.limit_s(name) for name in SHARES}
        await asyncio.to_thread(path.write_text, tenants(limits))
        await asyncio.sleep(3 * POLL_S)
        rates = dict.fromkeys(SHARES, capacity.requests_per_s)
        calling = asyncio.create_task(load.bare_calls())
        shots = await load.offer(rates, seconds)
        calling.cancel()
        recovered_s = await recovery_s(load, capacity)
        report_classes(reporter, shots, capacity, seconds)
        report_refusals(reporter, [s for s in shots if s.is_refused], await calling)
        reporter.check("recovered after the load within", recovered_s, "s", f"<= {RECOVERY_S}")


def main() -> int:
    parser = argument_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of the load [20]")
    args = parser.parse_args()
    reporter = Reporter("overload", args.json)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "tenants.yaml"
        path.write_text(tenants())
        model = Path(scratch) / "model"
        model.mkdir()
        write_random_model(model, MODEL, seed=0)
        config = UpConfig(
            model=str(model),
            worker_args=("--num-gpu-blocks-override", str(NUM_BLOCKS)),
            router_args=("--tenants", str(path)),
        )
        with pod_stack(config, Path(scratch)) as stack:
            asyncio.run(measure(stack, path, reporter, args.seconds))
            faults = stack.wait_idle()
    for fault in faults:
        reporter.row(tenant=fault)
    reporter.check("what is held when all have gone", len(faults), "things", "== 0")
    return reporter.finish()


if __name__ == "__main__":
    sys.exit(main())
