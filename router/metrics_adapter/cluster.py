"""What the adapter reads from and writes to its cluster. All calls block: use a thread."""

from __future__ import annotations

import base64
import json
from typing import Any

from kubernetes import client

from core.errors import Unavailable
from router.kubernetes_client import TIMEOUT_S, api_errors
from router.metrics_adapter.api import GROUP, VERSION
from router.metrics_adapter.front_proxy import FrontProxy

_NAMESPACE = "kube-system"
_CONFIG_MAP = "extension-apiserver-authentication"
_API_SERVICE = f"{VERSION}.{GROUP}"


def read_front_proxy(api: client.ApiClient) -> FrontProxy:
    """Whom the API server says to trust. Raises Unavailable."""
    with api_errors(f"reading config map {_NAMESPACE}/{_CONFIG_MAP}"):
        config_map: Any = client.CoreV1Api(api).read_namespaced_config_map(
            _CONFIG_MAP, _NAMESPACE, _request_timeout=TIMEOUT_S
        )
    return front_proxy_of(config_map.data or {})


def front_proxy_of(data: dict[str, str]) -> FrontProxy:
    """What the config map says. Raises Unavailable when it says nothing of a front proxy."""
    ca = data.get("requestheader-client-ca-file")
    if not ca:
        raise Unavailable(f"config map {_NAMESPACE}/{_CONFIG_MAP} names no front proxy's CA")
    names = json.loads(data.get("requestheader-allowed-names") or "[]")
    return FrontProxy(ca, frozenset(names))


def write_ca_bundle(api: client.ApiClient, ca: bytes) -> None:
    """Has the API server trust certificates of `ca` for this API. Raises Unavailable."""
    bundle = base64.b64encode(ca).decode()
    with api_errors(f"patching APIService {_API_SERVICE}"):
        services: Any = client.ApiregistrationV1Api(api)
        current = services.read_api_service(_API_SERVICE, _request_timeout=TIMEOUT_S)
        if current.spec.ca_bundle != bundle:
            patch = {"spec": {"caBundle": bundle, "insecureSkipTLSVerify": False}}
            services.patch_api_service(_API_SERVICE, patch, _request_timeout=TIMEOUT_S)
