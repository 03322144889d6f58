"""How a router finds, keeps and drops workers."""

import asyncio
from unittest.mock import Mock, patch

import pytest

from baton.v1 import inference_pb2, types_pb2, worker_pb2
from core.errors import Unavailable
from core.fingerprint import hash_scope
from core.hashing import block_hashes
from core.model_folder import model_digest
from core.prefix_index import PrefixIndexReader, PrefixIndexWriter
from core.registry import Registry
from router import prefix_hints
from router.app import Router
from router.attach import WorkerLink
from router.service import worker_status
from router.settings import RouterSettings
from router.workers import choose_fingerprint
from tests.model_folder import MODEL_DIGEST, byte_tokenizer, write_model_folder
from tests.router.fakes import FINGERPRINT, FakeWorker, Script
from tests.router.stack import prompt, stack, wait_for

PREFILL, DECODE = types_pb2.ROLE_PREFILL, types_pb2.ROLE_DECODE


@pytest.fixture
def serve(tmp_path, redis_server):
    return lambda **options: stack(tmp_path / "tiny", redis_server.url, **options)


async def statuses(s):
    reply = await s.stub.GetStatus(inference_pb2.GetStatusRequest())
    return {worker.id: types_pb2.WorkerState.Name(worker.state) for worker in reply.workers}


async def test_generation_goes_on_when_redis_dies(serve, redis_server):
    async with serve() as s:
        redis_server.kill()
        await wait_for(lambda: not s.router._pool.is_registry_ok)
        for _ in range(3):
            assert (await s.ask(prompt())).text == "Paris, of course."
        reply = await s.stub.GetStatus(inference_pb2.GetStatusRequest())
    assert not reply.router.redis_ok
    assert len(reply.workers) == 2


async def test_a_paused_redis_delays_a_request_once(serve, redis_server, monkeypatch):
    monkeypatch.setattr(prefix_hints, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(prefix_hints, "_PAUSE_S", 600.0)
    num_lookups = 0

    async def count(reader, *asked):
        nonlocal num_lookups
        num_lookups += 1
        return await lookup(reader, *asked)

    lookup = PrefixIndexReader.lookup
    monkeypatch.setattr(PrefixIndexReader, "lookup", count)
    async with serve() as s:
        redis_server.pause()
        async with asyncio.timeout(20):  # less than this router's patience with Redis
            for _ in range(5):
                await s.ask(prompt())
        redis_server.kill()
    assert num_lookups == 1


async def test_an_empty_registry_removes_no_worker_that_lives(serve, redis):
    async with serve() as s:
        await redis.flushall()
        await asyncio.sleep(0.3)
        assert (await s.ask(prompt())).text == "Paris, of course."


async def test_a_worker_that_comes_later_is_found(serve):
    async with serve() as s:
        late = FakeWorker("prefill-1", PREFILL, s.script)
        await late.start(s.registry)
        await wait_for(lambda: len(s.router._pool.usable(PREFILL)) == 2)
        await late.stop()


async def test_a_worker_that_drains_and_leaves_is_forgotten(serve):
    async with serve(num_prefill=2) as s:
        leaver = s.prefills[1]
        leaver.record.state = types_pb2.WORKER_STATE_DRAINING
        await wait_for(lambda: len(s.router._pool.usable(PREFILL)) == 1)
        await s.registry.remove("prefill-1", epoch=1)
        await leaver.stop()
        await wait_for(lambda: len(s.router._pool.links) == 2)


async def test_a_worker_that_is_let_go_while_it_is_asked_is_shown_as_unreachable(serve):
    async with serve() as s:
        s.decodes[0].may_tell_status.clear()
        asking = asyncio.create_task(statuses(s))
        await s.decodes[0].is_asked_for_status.wait()
        s.router._pool._drop(s.router._pool._links["decode-0"])
        assert await asking == {
            "prefill-0": "WORKER_STATE_READY",
            "decode-0": "WORKER_STATE_UNREACHABLE",
        }


@pytest.mark.parametrize(
    ("is_attached", "heard", "shown"),
    [
        (True, "READY", "READY"),
        (True, "STARTING", "STARTING"),
        (True, "DRAINING", "DRAINING"),
        (False, "READY", "UNREACHABLE"),
    ],
)
async def test_a_worker_is_shown_as_ready_only_where_requests_can_go_there(
    is_attached, heard, shown
):
    class Worker:
        async def GetWorkerStatus(self, request, timeout):
            return worker_pb2.WorkerStatus(id="d0", state=types_pb2.WORKER_STATE_READY)

    link = WorkerLink(types_pb2.WorkerRecord(worker_id="d0"), "r", 1.0, Mock(), Mock())
    link.state = types_pb2.WorkerState.Value(f"WORKER_STATE_{heard}")
    link.is_attached = is_attached
    with patch.object(WorkerLink, "worker", Worker()):
        status = await worker_status(link, audit=False)
    assert types_pb2.WorkerState.Name(status.state) == f"WORKER_STATE_{shown}"


async def test_a_killed_worker_is_shown_as_unreachable(serve):
    async with serve(worker_wait_s=0.0) as s:
        await s.decodes[0].stop()
        await wait_for(lambda: not s.router._pool.usable(DECODE))
        assert await statuses(s) == {
            "prefill-0": "WORKER_STATE_READY",
            "decode-0": "WORKER_STATE_UNREACHABLE",
        }
        with pytest.raises(Unavailable, match="no decode worker is ready"):
            await s.ask(prompt())


async def test_a_new_life_of_a_worker_replaces_the_old_one(serve):
    async with serve() as s:
        await s.decodes[0].stop()
        reborn = FakeWorker("decode-0", DECODE, s.script)
        reborn.record.epoch = 2
        await reborn.start(s.registry)
        await wait_for(lambda: [link.epoch for link in s.router._pool.usable(DECODE)] == [2])
        assert (await s.ask(prompt())).text == "Paris, of course."
        await reborn.stop()


async def test_a_worker_with_another_fingerprint_is_not_used(serve, caplog):
    async with serve() as s:
        other = FakeWorker("decode-1", DECODE, s.script)
        other.record.fingerprint.dtype = "bfloat16"
        await other.start(s.registry)
        await wait_for(lambda: "worker_not_used" in caplog.text)
        for _ in range(5):
            assert (await s.ask(prompt())).last.route.decode_worker == "decode-0"
        assert "dtype: own 'float32', peer 'bfloat16'" in caplog.text
        assert caplog.text.count("worker_not_used") == 1
        await other.stop()


@pytest.mark.parametrize(
    "model", ["0" * 64, MODEL_DIGEST], ids=["another config", "the same config, other weights"]
)
async def test_workers_of_another_model_are_none_of_the_routers_business(
    tmp_path, redis_server, redis, caplog, model
):
    folder = write_model_folder(tmp_path / "tiny")
    ours = types_pb2.Fingerprint()
    ours.CopyFrom(FINGERPRINT)
    # With weights of its own, the router tells those of others, too.
    if model == MODEL_DIGEST:
        (folder / "model.safetensors").write_bytes(b"weights")
        ours.model = model_digest(folder)
    stranger = FakeWorker("stranger", DECODE, Script(reply=[]))
    stranger.record.fingerprint.model = model
    await stranger.start(Registry(redis, lease_s=600))
    async with stack(folder, redis_server.url, fingerprint=ours, worker_wait_s=0.5) as s:
        assert await statuses(s) == {
            "prefill-0": "WORKER_STATE_READY",
            "decode-0": "WORKER_STATE_READY",
        }
        for worker in (*s.prefills, *s.decodes):
            await worker.stop()
        with pytest.raises(Unavailable, match="worker is ready"):
            await s.ask(prompt())
    assert caplog.text.count("worker_id=stranger reason=it serves another model") == 1
    await stranger.stop()


async def test_without_weights_a_router_stays_with_the_model_that_it_has_met(serve, caplog):
    async with serve() as s:
        strangers = [FakeWorker(f"x-{role}", role, Script(reply=[])) for role in (PREFILL, DECODE)]
        for stranger in strangers:
            stranger.record.fingerprint.model = f"{MODEL_DIGEST[:32]}of-other-weights"
            await stranger.start(s.registry)
        await wait_for(lambda: caplog.text.count("another model with this router's config") == 2)
        assert set(await statuses(s)) == {"prefill-0", "decode-0"}
        for worker in (*s.prefills, *s.decodes):
            await worker.stop()
            await s.registry.remove(worker.record.worker_id, worker.record.epoch)
        async with asyncio.timeout(60):
            while not {"x-1", "x-2"} <= set(await statuses(s)):
                await asyncio.sleep(0.05)
        for stranger in strangers:
            await stranger.stop()


async def test_a_former_life_that_still_publishes_does_not_replace_the_attached_one(serve, caplog):
    async with serve() as s:
        zombie = FakeWorker("decode-0", DECODE, s.script)
        zombie.record.epoch = 0
        await zombie.start(s.registry)
        await wait_for(lambda: "a later life of it is attached" in caplog.text)
        assert (await s.ask(prompt())).text == "Paris, of course."
        assert zombie.dispatches == []
        await zombie.stop()


async def test_a_redis_that_was_never_there_is_reported(redis_server, caplog, tmp_path):
    redis_server.kill()
    router = Router(
        RouterSettings(
            model=str(write_model_folder(tmp_path / "tiny")), redis_url=redis_server.url, port=0
        )
    )
    await router.start()
    await wait_for(lambda: "registry_away" in caplog.text)
    await router.stop()


async def test_the_worker_with_the_longest_held_prefix_gets_the_prompt(serve, redis):
    text = "x" * 40
    hashes = block_hashes(byte_tokenizer().encode(text).ids, 4, hash_scope(FINGERPRINT))
    writer = PrefixIndexWriter(redis, "prefill-1", 1, lambda: hashes[:6])
    async with serve(num_prefill=3) as s:
        writing = asyncio.create_task(writer.run())
        reader = PrefixIndexReader(redis)
        while await reader.lookup(hashes, {"prefill-1": 1}) != {"prefill-1": 6}:
            await asyncio.sleep(0.01)
        for _ in range(8):
            assert (await s.ask(prompt(text))).last.route.prefill_worker == "prefill-1"
        writing.cancel()
        await asyncio.gather(writing, return_exceptions=True)


async def test_the_model_and_its_limits_are_told(serve):
    async with serve(served_model_name="my-model") as s:
        model = await s.stub.GetModel(inference_pb2.GetModelRequest())
    assert model == inference_pb2.ModelInfo(
        name="my-model",
        architecture="LlamaForCausalLM",
        vocab_size=300,
        max_model_len=128,
        block_size=4,
        eos_token_ids=[256],
        dtype="float32",
    )


async def test_an_audit_is_asked_of_every_worker(serve):
    async with serve() as s:
        reply = await s.stub.GetStatus(inference_pb2.GetStatusRequest(audit=True))
    assert [worker.audit.ok for worker in reply.workers] == [True, True]


def other_fingerprint():
    other = types_pb2.Fingerprint()
    other.CopyFrom(FINGERPRINT)
    other.dtype = "bfloat16"
    return other


def test_the_fingerprint_with_both_roles_is_chosen():
    other = other_fingerprint()
    workers = [(PREFILL, FINGERPRINT), (PREFILL, FINGERPRINT), (PREFILL, other), (DECODE, other)]
    assert choose_fingerprint(FINGERPRINT, workers) == other


def test_the_current_fingerprint_stays_while_it_has_both_roles():
    other = other_fingerprint()
    workers = [(PREFILL, FINGERPRINT), (DECODE, FINGERPRINT)]
    workers += [(PREFILL, other), (DECODE, other), (DECODE, other)]
    assert choose_fingerprint(FINGERPRINT, workers) == FINGERPRINT
    assert choose_fingerprint(None, workers) == other


def test_without_workers_there_is_no_fingerprint():
    assert choose_fingerprint(FINGERPRINT, []) is None
