"""As much of an API server as Helm asks for when it renders for a cluster."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

API_SERVICES = "/apis/apiregistration.k8s.io/v1/apiservices"

_KINDS = {
    "v1": ("ConfigMap", "Pod", "Service", "ServiceAccount"),
    "apiregistration.k8s.io/v1": ("APIService",),
    "apps/v1": ("Deployment", "StatefulSet"),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "keda.sh/v1alpha1": ("ScaledObject",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "policy/v1": ("PodDisruptionBudget",),
    "rbac.authorization.k8s.io/v1": ("ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"),
}
"""What the chart makes; Helm 4 asks whether the cluster knows it."""


def _discovery() -> dict[str, Any]:
    """Answers of the discovery API, by path."""
    groups: list[dict[str, Any]] = []
    answers: dict[str, Any] = {
        "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "groups": groups},
    }
    for group_version, kinds in _KINDS.items():
        group, _, version = group_version.rpartition("/")
        if group:
            entry = {"groupVersion": group_version, "version": version}
            groups.append({"name": group, "versions": [entry], "preferredVersion": entry})
        path = f"/apis/{group_version}" if group else "/api/v1"
        answers[path] = {
            "kind": "APIResourceList",
            "groupVersion": group_version,
            "resources": [_resource(kind) for kind in kinds],
        }
    return answers


def _resource(kind: str) -> dict[str, Any]:
    is_namespaced = not kind.startswith(("APIService", "Cluster"))
    name = f"{kind.lower()}s"
    return {"name": name, "kind": kind, "namespaced": is_namespaced, "verbs": ["get"]}


@contextmanager
def fake_cluster(objects: Mapping[str, Any], folder: Path) -> Iterator[Path]:
    """A kubeconfig, in `folder`, of a cluster that has `objects`, by the paths of their URLs."""
    answers = {**_discovery(), **objects}

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
