"""As much of an API server as Helm's `lookup` of an APIService asks for."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

API_SERVICES = "/apis/apiregistration.k8s.io/v1"
_RESOURCE = {"name": "apiservices", "kind": "APIService", "namespaced": False, "verbs": ["get"]}
_VERSION = {"groupVersion": "apiregistration.k8s.io/v1", "version": "v1"}

DISCOVERY: dict[str, Any] = {
    "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
    "/api": {"kind": "APIVersions", "versions": []},
    "/apis": {
        "kind": "APIGroupList",
        "groups": [
            {
                "name": "apiregistration.k8s.io",
                "versions": [_VERSION],
                "preferredVersion": _VERSION,
            }
        ],
    },
    API_SERVICES: {
        "kind": "APIResourceList",
        "groupVersion": "apiregistration.k8s.io/v1",
        "resources": [_RESOURCE],
    },
}


@contextmanager
def fake_cluster(objects: Mapping[str, Any], folder: Path) -> Iterator[Path]:
    """A kubeconfig, in `folder`, of a cluster that has `objects`, by the paths of their URLs."""
    answers = {**DISCOVERY, **objects}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            missing = {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(missing if answer is None else answer).encode()
            self.send_response(404 if answer is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        config = folder / "kubeconfig.json"
        config.write_text(json.dumps(_kubeconfig(f"http://127.0.0.1:{server.server_port}")))
        try:
            yield config
        finally:
            server.shutdown()
            thread.join()


def _kubeconfig(url: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "fake", "cluster": {"server": url}}],
        "contexts": [{"name": "fake", "context": {"cluster": "fake", "user": ""}}],
        "current-context": "fake",
    }
