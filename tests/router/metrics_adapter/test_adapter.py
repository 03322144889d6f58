"""The adapter over real TLS, as the API server's front proxy and others reach it."""

import asyncio
import contextlib
import datetime
import ssl

import httpx2
import pytest

from baton.v1 import types_pb2
from core.errors import StartupError
from core.registry import Registry
from router import demand_sampler
from router.demand import DemandAverage
from router.demand_board import DemandBoard
from router.metrics_adapter.certificate import make_certificate
from router.metrics_adapter.server import Adapter
from router.metrics_adapter.settings import AdapterSettings
from tests.router.metrics_adapter.pki import Authority
from tests.router.test_demand import router, workers

ROOT = "/apis/external.metrics.k8s.io/v1beta1"
NAME = "adapter.baton.svc"


class Served:
    """A running adapter whose own certificate is of a CA that only the client here trusts."""

    def __init__(self, url, ca, front_proxy):
        self.url, self._ca, self.front_proxy = url, ca, front_proxy

    @contextlib.asynccontextmanager
    async def client(self, certificate):
        context = ssl.create_default_context(cadata=self._ca.decode())
        context.check_hostname = False
        if certificate is not None:
            context.load_cert_chain(certificate)
        async with httpx2.AsyncClient(base_url=self.url, verify=context, timeout=30) as http:
            yield http

    async def get(self, path, certificate=None, **params):
        certificate = certificate or self.front_proxy.issue("front-proxy-client")
        async with self.client(certificate) as http:
            return await http.get(path, params=params)


@pytest.fixture
async def served(tmp_path, redis_server):
    own = make_certificate([NAME], datetime.datetime.now(datetime.UTC))
    (tmp_path / "cert.pem").write_bytes(own.certificate)
    (tmp_path / "key.pem").write_bytes(own.key)
    front_proxy = Authority(tmp_path, "front-proxy-ca")
    adapter = Adapter(
        AdapterSettings(
            host="127.0.0.1",
            port=0,
            redis_url=f"{redis_server.url}?socket_timeout=30&socket_connect_timeout=30",
            namespace="ns",
            tls_cert_file=tmp_path / "cert.pem",
            tls_key_file=tmp_path / "key.pem",
            requestheader_client_ca_file=front_proxy.file,
            requestheader_allowed_names=["front-proxy-client"],
        )
    )
    yield Served(f"https://{await adapter.start()}", own.ca, front_proxy)
    await adapter.stop()


@pytest.fixture
async def demand(redis):
    """One router and its two workers, and a router of another model without any."""
    board, registry = DemandBoard(redis, lease_s=600), Registry(redis, lease_s=600)
    await board.publish(router("r0", prefill_prompts=1.5, decode_blocks=7))
    absent = {"model_digest": "none", "num_prefill": 0, "num_decode": 0}
    await board.publish(router("r1", model="org/other", decode_blocks=9, **absent))
    for record in workers(queue_depth=2):
        await registry.publish(record)


def values(response):
    assert response.status_code == 200, response.text
    return [(item["metricLabels"]["model"], item["value"]) for item in response.json()["items"]]


async def test_the_group_is_discovered(served):
    version = {"groupVersion": "external.metrics.k8s.io/v1beta1", "version": "v1beta1"}
    group = (await served.get("/apis/external.metrics.k8s.io")).json()
    assert (group["kind"], group["name"]) == ("APIGroup", "external.metrics.k8s.io")
    assert (group["versions"], group["preferredVersion"]) == ([version], version)
    groups = (await served.get("/apis")).json()
    assert groups["kind"] == "APIGroupList"
    assert [item["name"] for item in groups["groups"]] == ["external.metrics.k8s.io"]


async def test_the_metrics_are_discovered_as_resources(served):
    listed = (await served.get(ROOT)).json()
    assert (listed["kind"], listed["groupVersion"]) == (
        "APIResourceList",
        "external.metrics.k8s.io/v1beta1",
    )
    assert [(item["name"], item["namespaced"], item["verbs"]) for item in listed["resources"]] == [
        ("baton_prefill_prompts", True, ["get"]),
        ("baton_prefill_queued_tokens", True, ["get"]),
        ("baton_decode_sequences", True, ["get"]),
        ("baton_decode_blocks", True, ["get"]),
    ]


async def test_values_are_sums_of_routers_and_workers(served, demand):
    response = await served.get(f"{ROOT}/namespaces/ns/baton_prefill_prompts")
    body = response.json()
    assert (body["kind"], body["apiVersion"]) == (
        "ExternalMetricValueList",
        "external.metrics.k8s.io/v1beta1",
    )
    assert values(response) == [("m", "3500m"), ("org_other", "0")]
    item = body["items"][0]
    assert item["metricName"] == "baton_prefill_prompts"
    assert item["metricLabels"] == {"release": "baton", "model": "m"}
    datetime.datetime.strptime(item["timestamp"], "%Y-%m-%dT%H:%M:%S%z")


@pytest.mark.parametrize(
    ("selector", "found"),
    [
        ("", ["7", "9"]),
        ("model=m,release=baton", ["7"]),
        ("model==org_other", ["9"]),
        ("release=other", []),
        ("model in (m,x)", ["7"]),
        ("model notin (m)", ["9"]),
        ("model!=m", ["9"]),
        ("model,!zone", ["7", "9"]),
        ("zone", []),
    ],
)
async def test_a_label_selector_picks_values(served, demand, selector, found):
    response = await served.get(f"{ROOT}/namespaces/ns/baton_decode_blocks", labelSelector=selector)
    assert [value for _, value in values(response)] == found


@pytest.mark.parametrize("selector", ["model=", "a b", "model in m", "=m"])
async def test_an_odd_selector_picks_nothing_or_is_refused(served, demand, selector):
    response = await served.get(f"{ROOT}/namespaces/ns/baton_decode_blocks", labelSelector=selector)
    if selector == "model=":
        assert values(response) == []
    else:
        assert (response.status_code, response.json()["reason"]) == (400, "BadRequest")


async def test_another_namespace_is_told_nothing(served, demand):
    response = await served.get(f"{ROOT}/namespaces/theirs/baton_decode_blocks")
    assert values(response) == []


async def test_an_unknown_metric_is_not_found(served, demand):
    response = await served.get(f"{ROOT}/namespaces/ns/baton_prompts")
    assert (response.status_code, response.json()["kind"]) == (404, "Status")
    assert (await served.get("/apis/metrics.k8s.io")).status_code == 404


async def test_without_a_certificate_only_probes_are_answered(served):
    async with served.client(None) as http:
        assert (await http.get("/healthz")).status_code == 200
        for path in ("/apis", ROOT, f"{ROOT}/namespaces/ns/baton_decode_blocks"):
            response = await http.get(path, headers={"X-Remote-User": "admin"})
            assert (response.status_code, response.json()["reason"]) == (401, "Unauthorized")


async def test_another_client_of_the_same_ca_is_refused(served):
    response = await served.get(ROOT, served.front_proxy.issue("kubelet"))
    assert (response.status_code, response.json()["reason"]) == (403, "Forbidden")


async def test_a_certificate_of_another_ca_does_not_connect(served, tmp_path):
    forged = Authority(tmp_path, "other-ca").issue("front-proxy-client")
    with pytest.raises(httpx2.TransportError):
        await served.get(ROOT, forged)


async def test_no_router_is_unavailable_rather_than_nothing_to_do(served):
    response = await served.get(f"{ROOT}/namespaces/ns/baton_decode_blocks")
    assert (response.status_code, response.json()["reason"]) == (503, "ServiceUnavailable")


async def test_what_is_left_of_dead_routers_is_not_told(served, redis):
    await DemandBoard(redis, lease_s=0.01).publish(router("r0"))
    await asyncio.sleep(0.05)
    response = await served.get(f"{ROOT}/namespaces/ns/baton_decode_blocks")
    assert response.status_code == 503


async def test_routers_without_the_reports_of_their_workers_are_unavailable(served, redis):
    await DemandBoard(redis, lease_s=600).publish(router("r0"))
    response = await served.get(f"{ROOT}/namespaces/ns/baton_decode_blocks")
    assert response.status_code == 503
    assert "workers of baton have not reported" in response.json()["message"]


async def test_a_value_is_an_average_over_the_last_seconds(served, demand, redis, monkeypatch):
    # Of many seconds here: the test may be slow.
    monkeypatch.setattr(demand_sampler, "DemandAverage", lambda: DemandAverage(memory_s=600.0))
    path = f"{ROOT}/namespaces/ns/baton_decode_blocks"
    assert (await served.get(path)).json()["items"][0]["value"] == "7"
    await DemandBoard(redis, lease_s=600).publish(router("r0", decode_blocks=7000))
    (label, value), _ = values(await served.get(path))
    assert label == "m"
    number = float(value[:-1]) / 1000 if value.endswith("m") else float(value)
    assert 7 < number < 3500


async def test_without_redis_it_is_unavailable(served, demand, redis_server):
    redis_server.kill()
    response = await served.get(f"{ROOT}/namespaces/ns/baton_decode_blocks")
    assert response.status_code == 503


async def test_a_deployment_without_workers_is_told_what_waits(served, redis):
    record = types_pb2.RouterDemand(router_id="r", release="b", model="m", decode_sequences=4)
    await DemandBoard(redis, lease_s=600).publish(record)
    response = await served.get(f"{ROOT}/namespaces/ns/baton_decode_sequences")
    assert values(response) == [("m", "4")]


async def test_outside_a_cluster_it_says_what_it_needs(redis_server, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    adapter = Adapter(AdapterSettings(port=0, redis_url=redis_server.url))
    with pytest.raises(StartupError, match="--requestheader-client-ca-file"):
        await adapter.start()
    await adapter.stop()
