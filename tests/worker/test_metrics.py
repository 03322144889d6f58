"""A worker's figures as Prometheus reads them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from core.http_server import HttpServer
from tests.engine.harness import make_prompt
from tests.worker.pace import hold_steps
from tests.worker.pair import Pair, Worker, pair
from worker.metrics import WorkerFigures, metrics_app


async def scrape(subject: Worker) -> dict[str, float]:
    """Values by name, with the values of its labels, in order of their names."""
    server = HttpServer(metrics_app(subject.host.figures), "127.0.0.1", 0)
    address = await server.start()
    async with httpx2.AsyncClient() as http:
        text = (await http.get(f"http://{address}/metrics")).text
    await server.stop()
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {" ".join([s.name, *filter(None, s.labels.values())]): s.value for s in samples}


async def test_links_are_told_by_route_and_by_peer() -> None:
    figures = WorkerFigures(kv_routes=("rc_mlx5/mlx5_0:1",), link_bytes_per_s={"p0": 2e9})
    server = HttpServer(metrics_app(lambda: figures), "127.0.0.1", 0)
    address = await server.start()
    async with httpx2.AsyncClient() as http:
        lines = (await http.get(f"http://{address}/metrics")).text.splitlines()
    await server.stop()
    assert 'baton_kv_transport_info{link="rdma",route="rc_mlx5/mlx5_0:1"} 1.0' in lines
    assert 'baton_kv_link_bytes_per_second{peer="p0"} 2e+09' in lines


async def hand_off(both: Pair) -> None:
    """Twice the same prompt of 40 tokens, two full blocks and a half, with 8 outputs."""
    for name in ("first", "again"):
        await both.generate(make_prompt(40), name, max_tokens=8)
    await both.until_idle()


async def test_prefill_counts_what_it_computes_finds_and_exports(folder: Path) -> None:
    async with pair(folder) as both:
        await hand_off(both)
        found = await scrape(both.prefill)
        assert found["baton_prefix_cache_queries_total"] == 80
        assert found["baton_prefix_cache_hits_total"] == 32
        assert found["baton_step_tokens_total"] == 40 + 8
        assert found["baton_sampled_tokens_total"] == 2
        assert found["baton_steps_total"] == 2
        assert found["baton_exports_opened_total"] == 2
        assert found["baton_exports_expired_total"] == 0
        assert found["baton_kv_blocks cached"] == 2
        assert found["baton_ready"] == 1


async def test_decode_counts_what_it_reads_and_generates(folder: Path) -> None:
    async with pair(folder) as both:
        await hand_off(both)
        found = await scrape(both.decode)
        block_bytes = both.decode.host.engine.kv_cache.block_bytes
        # Three blocks at first; then the two full ones are in its own cache.
        assert found["baton_kv_read_bytes_total"] == (3 + 1) * block_bytes
        assert found["baton_kv_read_seconds_total"] > 0
        assert found["baton_kv_exposed_seconds_total"] > 0
        assert found["baton_sampled_tokens_total"] == 2 * 7
        assert found["baton_prefix_cache_hits_total"] == 32
        assert found["baton_num_preemptions_total"] == 0


async def test_steps_count_by_how_they_ran(folder: Path) -> None:
    prefill = {"graph_mode": "PIECEWISE", "capture_sizes": [16, 24]}
    decode = {"graph_mode": "FULL_DECODE_ONLY", "capture_sizes": [2, 4]}
    async with pair(folder, prefill=prefill, decode=decode) as both:
        await hand_off(both)
        found = await scrape(both.prefill)
        assert found["baton_graph_dispatches_total NONE"] == 1  # 40 tokens
        assert found["baton_graph_dispatches_total 16 PIECEWISE"] == 1
        found = await scrape(both.decode)
        assert found["baton_graph_dispatches_total 2 FULL"] == 2 * 7


async def test_a_prompt_that_decode_computes_counts_in_its_prefix_cache(folder: Path) -> None:
    async with pair(folder) as both:
        for name in ("first", "again"):
            result = await both.send_local(both.dispatch(make_prompt(40), name))
            async with asyncio.timeout(30):
                await result.ended.wait()
        found = await scrape(both.decode)
        assert found["baton_prefix_cache_queries_total"] == 80
        assert found["baton_prefix_cache_hits_total"] == 32


async def test_blocks_in_use_show_while_a_sequence_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(folder) as both:
        go_on = hold_steps(both.decode, monkeypatch)
        await both.send(both.dispatch(make_prompt(40), "runs"))
        await both.until_decoding()
        found = await scrape(both.decode)
        assert found["baton_num_requests"] == found["baton_num_requests_running"] == 1
        assert found["baton_kv_cache_usage_perc"] == found["baton_kv_blocks referenced"] / 64
        go_on()


async def test_a_draining_worker_is_not_healthy_and_goes_on_to_answer(folder: Path) -> None:
    async with pair(folder) as both:
        server = HttpServer(metrics_app(both.decode.host.figures), "127.0.0.1", 0)
        address = await server.start()
        async with httpx2.AsyncClient(base_url=f"http://{address}") as http:
            assert (await http.get("/health")).status_code == 200
            await both.decode.host.begin_draining()
            assert (await http.get("/health")).status_code == 503
            assert (await http.get("/metrics")).status_code == 200
        await server.stop()
