"""The adapter in a cluster: a stand-in for the API server has its config map and APIService."""

import asyncio
import base64
import datetime
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest
from kubernetes.client import ApiClient, Configuration

from core.errors import StartupError, Unavailable
from router import kubernetes_client
from router.metrics_adapter import cluster
from router.metrics_adapter.certificate import make_certificate
from router.metrics_adapter.server import Adapter
from router.metrics_adapter.settings import AdapterSettings
from tests.router.metrics_adapter.pki import Authority

CONFIG_MAP = "/api/v1/namespaces/kube-system/configmaps/extension-apiserver-authentication"
API_SERVICE = "/apis/apiregistration.k8s.io/v1/apiservices/v1beta1.external.metrics.k8s.io"


POD = "/api/v1/namespaces/baton/pods/decode-0"


class ApiServer(ThreadingHTTPServer):
    def __init__(self, ca):
        super().__init__(("127.0.0.1", 0), Handler)
        names = json.dumps(["front-proxy-client"])
        self.config = {"requestheader-client-ca-file": ca, "requestheader-allowed-names": names}
        self.spec = {"groupPriorityMinimum": 100, "versionPriority": 100}
        self.num_patches = 0
        self.pod = {"metadata": {"name": "decode-0"}}

    def client(self):
        return ApiClient(Configuration(host=f"http://127.0.0.1:{self.server_address[1]}"))


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        bodies = {CONFIG_MAP: {"data": self.server.config}, API_SERVICE: {"spec": self.server.spec}}
        self.answer(bodies.get(self.path))

    def do_PATCH(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == POD:
            self.server.pod["metadata"] |= body["metadata"]
            self.answer(self.server.pod)
            return
        self.server.spec |= body["spec"]
        self.server.num_patches += 1
        self.answer({"spec": self.server.spec})

    def answer(self, body):
        content = json.dumps(body or {}).encode()
        self.send_response(404 if body is None else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


@pytest.fixture
def front_proxy(tmp_path):
    return Authority(tmp_path, "front-proxy-ca")


@pytest.fixture
def api_server(front_proxy):
    with ApiServer(front_proxy.file.read_text()) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
async def adapter(redis_server, api_server, monkeypatch):
    monkeypatch.setattr(kubernetes_client, "connect", api_server.client)
    adapter = Adapter(
        AdapterSettings(
            host="127.0.0.1",
            port=0,
            redis_url=redis_server.url,
            service_name="adapter",
            service_namespace="baton",
        )
    )
    yield adapter
    await adapter.stop()


async def test_the_api_server_can_verify_the_certificate_that_the_adapter_makes(
    adapter, api_server, front_proxy
):
    address = await adapter.start()
    bundle = base64.b64decode(api_server.spec["caBundle"]).decode()
    context = ssl.create_default_context(cadata=bundle)
    context.load_cert_chain(front_proxy.issue("front-proxy-client"))
    async with httpx2.AsyncClient(verify=context, timeout=30) as http:
        response = await http.get(
            f"https://{address}/apis", extensions={"sni_hostname": "adapter.baton.svc"}
        )
    assert response.status_code == 200
    assert api_server.spec["insecureSkipTLSVerify"] is False


async def test_the_front_proxys_names_are_read_from_the_cluster(adapter, api_server, front_proxy):
    address = await adapter.start()
    context = ssl.create_default_context(
        cadata=base64.b64decode(api_server.spec["caBundle"]).decode()
    )
    context.load_cert_chain(front_proxy.issue("kubelet"))
    async with httpx2.AsyncClient(verify=context, timeout=30) as http:
        response = await http.get(
            f"https://{address}/apis", extensions={"sni_hostname": "adapter.baton.svc"}
        )
    assert response.status_code == 403


def test_the_bundle_is_written_only_when_it_differs(api_server):
    for _ in range(2):
        cluster.write_ca_bundle(api_server.client(), b"ca")
    assert (api_server.num_patches, api_server.spec["caBundle"]) == (1, "Y2E=")


async def test_a_certificate_that_was_renewed_is_shown(
    redis_server, api_server, tmp_path, monkeypatch
):
    monkeypatch.setattr(kubernetes_client, "connect", api_server.client)
    monkeypatch.setattr("router.metrics_adapter.server._REFRESH_S", 0.05)
    cert, key = tmp_path / "tls.crt", tmp_path / "tls.key"
    issued = [make_certificate(["adapter"], datetime.datetime.now(datetime.UTC)) for _ in range(2)]
    for file, content in ((cert, issued[0].certificate), (key, issued[0].key)):
        file.write_bytes(content)
    settings = {"host": "127.0.0.1", "port": 0, "redis_url": redis_server.url}
    adapter = Adapter(AdapterSettings(**settings, tls_cert_file=cert, tls_key_file=key))
    try:
        host, _, port = (await adapter.start()).rpartition(":")
        key.write_bytes(issued[1].key)
        cert.write_bytes(issued[1].certificate)
        async with asyncio.timeout(30):
            while await shown_at(host, int(port)) != issued[1].certificate.decode():
                await asyncio.sleep(0.02)
    finally:
        await adapter.stop()


async def shown_at(host, port):
    """The certificate of a server, in PEM."""
    return await asyncio.to_thread(ssl.get_server_certificate, (host, port))


async def test_a_cluster_without_a_front_proxy_ends_the_start(adapter, api_server):
    del api_server.config["requestheader-client-ca-file"]
    with pytest.raises(StartupError, match="names no front proxy's CA"):
        await adapter.start()


def test_an_api_server_that_is_away_is_unavailable():
    client = ApiClient(Configuration(host="http://127.0.0.1:1"))
    with pytest.raises(Unavailable, match="patching APIService"):
        cluster.write_ca_bundle(client, b"ca")


def test_a_pods_deletion_cost_is_an_annotation(api_server):
    kubernetes_client.write_deletion_cost(api_server.client(), "baton", "decode-0", 3)
    annotations = api_server.pod["metadata"]["annotations"]
    assert annotations == {"controller.kubernetes.io/pod-deletion-cost": "3"}


def test_a_cost_that_cannot_be_written_is_unavailable():
    client = ApiClient(Configuration(host="http://127.0.0.1:1"))
    with pytest.raises(Unavailable, match="patching pod baton/decode-0"):
        kubernetes_client.write_deletion_cost(client, "baton", "decode-0", 3)
