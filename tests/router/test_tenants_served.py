"""Keys, quotas, cache scopes and the line, through a real router and fake workers."""

import asyncio

import pytest

from core.errors import ResourceExhausted, Unauthenticated, Unavailable
from tests.router.fakes import Script
from tests.router.stack import REPLY, prompt, stack, wait_for

FILE = """
tenants:
  acme: {keys: [sk-acme], class: gold, max_concurrent: 1}
  zeta: {keys: [sk-zeta]}
"""


@pytest.fixture
def serve(tmp_path, redis_server):
    """`async with serve(...) as s`: a stack with tenants."""
    path = tmp_path / "tenants.yaml"
    path.write_text(FILE)
    return lambda **options: stack(tmp_path / "tiny", redis_server.url, tenants=path, **options)


def bearer(key):
    return (("authorization", f"Bearer {key}"),)


async def fill_decode(s):
    """The decode worker reports that it has no room, and the router has heard it."""
    s.decodes[0].load.blocks.free = 0
    s.decodes[0].load.running = 1
    (link,) = (link for link in s.router._pool.links if link.worker_id == "decode-0")
    await wait_for(lambda: link.load.running == 1)


def metric(s, name, labels):
    """A figure that the router gives Prometheus."""
    return s.router._table._shared.metrics.registry.get_sample_value(name, labels)


async def test_a_call_needs_a_known_key(serve):
    async with serve() as s:
        with pytest.raises(Unauthenticated, match="an API key is needed"):
            await s.ask(prompt())
        with pytest.raises(Unauthenticated, match="is not valid"):
            await s.ask(prompt(), metadata=bearer("sk-other"))
        assert (await s.ask(prompt(), metadata=bearer("sk-acme"))).token_ids == REPLY


async def test_each_tenant_has_a_cache_scope_of_its_own(serve):
    async with serve() as s:
        for key in ("sk-acme", "sk-zeta"):
            await s.ask(prompt(), metadata=bearer(key))
        assert [dispatch.hash_salt for dispatch in s.prefills[0].dispatches] == ["acme", "zeta"]


async def test_tenants_may_use_the_same_request_id(serve):
    async with serve() as s:
        for key, text in (("sk-acme", "one"), ("sk-zeta", "two")):
            request = prompt(text)
            request.request_id = "mine"
            assert (await s.ask(request, metadata=bearer(key))).token_ids == REPLY
        assert len(s.decodes[0].dispatches) == 2


async def test_over_its_quota_a_tenant_is_told_which_and_others_are_served(serve):
    async with serve(script=Script(reply=list(REPLY), num_decode_tokens=2)) as s:
        call = s.stub.Generate(prompt(), metadata=bearer("sk-acme"))
        await call.read()
        with pytest.raises(ResourceExhausted) as caught:
            await s.ask(prompt(), metadata=bearer("sk-acme"))
        assert (caught.value.field, caught.value.retry_after_s) == ("max_concurrent", 1.0)
        refused = metric(s, "baton_requests_refused_total", {"reason": "max_concurrent"})
        assert refused == 1
        other = s.stub.Generate(prompt(), metadata=bearer("sk-zeta"))
        await other.read()
        call.cancel()
        await wait_for(lambda: not s.router._quotas._in_flight)
        again = s.stub.Generate(prompt(), metadata=bearer("sk-acme"))
        await again.read()


async def test_a_changed_file_counts_for_the_next_request(serve, tmp_path, monkeypatch):
    monkeypatch.setattr("router.tenant_file.POLL_S", 0.05)
    async with serve() as s:
        (tmp_path / "tenants.yaml").write_text("default: {}")
        await wait_for(lambda: s.router._tenants.current.has_default)
        assert (await s.ask(prompt())).token_ids == REPLY


async def test_requests_wait_in_the_router_while_decode_has_no_room(serve):
    script = Script(reply=list(REPLY), num_decode_tokens=2)
    async with serve(script=script) as s:
        await fill_decode(s)
        first = s.stub.Generate(prompt(), metadata=bearer("sk-zeta"))
        await first.read()
        asking = asyncio.create_task(s.ask(prompt(), metadata=bearer("sk-zeta")))
        await wait_for(lambda: s.router._admission.gate.num_waiting_for_decode == 1)
        assert len(s.prefills[0].dispatches) == 1
        assert metric(s, "baton_queued_requests", {"class": "silver"}) == 1
        assert metric(s, "baton_requests_waiting_for", {"role": "decode"}) == 1
        script.num_decode_tokens = 1000
        s.decodes[0].load.blocks.free = 100
        assert (await asking).token_ids == REPLY
        first.cancel()


async def test_a_waiting_request_whose_client_leaves_is_never_sent(serve):
    script = Script(reply=list(REPLY), num_decode_tokens=2)
    async with serve(script=script) as s:
        await fill_decode(s)
        first = s.stub.Generate(prompt(), metadata=bearer("sk-zeta"))
        await first.read()
        second = s.stub.Generate(prompt(), metadata=bearer("sk-zeta"))
        await wait_for(lambda: s.router._admission.gate.num_waiting_for_decode == 1)
        second.cancel()
        await wait_for(lambda: s.router._admission.gate.num_waiting_for_decode == 0)
        first.cancel()
        await wait_for(lambda: s.router._admission.ledger.num_inflight == 0)
        assert len(s.prefills[0].dispatches) == 1


async def test_a_worker_that_fails_every_request_gets_no_more_of_them(
    tmp_path, redis_server, caplog, monkeypatch
):
    monkeypatch.setattr("router.breaker.FIRST_EJECTION_S", 600.0)
    async with stack(tmp_path / "tiny", redis_server.url, num_decode=2) as s:
        s.decodes[1].refusal = Unavailable("broken")
        while "worker_ejected" not in caplog.text:
            assert (await s.ask(prompt())).last.route.decode_worker == "decode-0"
        for _ in range(10):
            assert (await s.ask(prompt())).last.route.decode_worker == "decode-0"
        assert caplog.text.count("worker_ejected worker_id=decode-1") == 1
        assert caplog.text.count("attempt_failed") == 3
