"""The cluster that a router or the metrics adapter runs in. All calls block: use a thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.config.config_exception import ConfigException
from urllib3.exceptions import HTTPError

from core.errors import StartupError, Unavailable

TIMEOUT_S = 10.0
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"


def connect() -> client.ApiClient:
    """With this pod's service account. Raises StartupError outside a cluster."""
    configuration = client.Configuration()
    load: Any = config.load_incluster_config
    try:
        load(client_configuration=configuration)
    except ConfigException as error:
        raise StartupError(f"not in a cluster: {error}") from error
    return client.ApiClient(configuration)


@contextmanager
def api_errors(what: str) -> Iterator[None]:
    """Translates what the client raises to Unavailable."""
    try:
        yield
    except ApiException as error:
        raise Unavailable(f"{what}: {error.status} {error.reason}") from error
    except (HTTPError, OSError) as error:
        raise Unavailable(f"{what}: {error}") from error


def write_deletion_cost(api: client.ApiClient, namespace: str, pod: str, cost: int) -> None:
    """Of several pods that may go, one of the least cost goes first. Raises Unavailable."""
    patch = {"metadata": {"annotations": {DELETION_COST: str(cost)}}}
    pods: Any = client.CoreV1Api(api)
    with api_errors(f"patching pod {namespace}/{pod}"):
        pods.patch_namespaced_pod(pod, namespace, patch, _request_timeout=TIMEOUT_S)
