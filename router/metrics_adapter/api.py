"""external.metrics.k8s.io/v1beta1 as an ASGI application: discovery documents and values.

Who calls is settled by the certificate of its connection, which `server` puts into the
request's state: only the API server's front proxy, which has authorized the user already.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from core.errors import BatonError, InvalidArgument
from router.demand_sampler import Sums
from router.metrics_adapter.front_proxy import FrontProxy
from router.metrics_adapter.protocol import PEER_NAME
from router.metrics_adapter.selector import label_value, parse_selector

GROUP = "external.metrics.k8s.io"
VERSION = "v1beta1"
GROUP_VERSION = f"{GROUP}/{VERSION}"
METRICS = {
    "baton_prefill_prompts": "prefill_prompts",
    "baton_prefill_queued_tokens": "prefill_queued_tokens",
    "baton_decode_sequences": "decode_sequences",
    "baton_decode_blocks": "decode_blocks",
}
"""Names of metrics, and the fields of Totals that they tell."""
_OPEN_PATHS = frozenset({"/healthz", "/livez", "/readyz"})
_REASONS = {
    400: "BadRequest",
    401: "Unauthorized",
    403: "Forbidden",
    404: "NotFound",
    405: "MethodNotAllowed",
    500: "InternalError",
    503: "ServiceUnavailable",
}


@dataclass(frozen=True)
class MetricsApi:
    """`sums` tells the demand or raises; `namespace` is the only one that is told any of it."""

    sums: Sums
    front_proxy: FrontProxy
    namespace: str | None
    now: Callable[[], datetime.datetime]

    def asgi(self) -> ASGIApp:
        """The application."""
        root = f"/apis/{GROUP_VERSION}"
        routes = [
            Route("/apis", _groups),
            Route(f"/apis/{GROUP}", _group),
            Route(root, _resources),
            Route(root + "/namespaces/{namespace}/{metric}", self._values),
            *(Route(path, _healthy) for path in sorted(_OPEN_PATHS)),
        ]
        handlers: dict[Any, Any] = {
            404: lambda request, _: status(404, f"there is no {request.url.path}"),
            405: lambda request, _: status(405, f"{request.method} is not supported"),
            InvalidArgument: lambda _, error: status(400, error.message),
            BatonError: lambda _, error: status(503, error.message),
            Exception: lambda *_: status(500, "internal error"),
        }
        gate = Middleware(_OnlyFrontProxy, front_proxy=self.front_proxy)
        return Starlette(routes=routes, middleware=[gate], exception_handlers=handlers)

    async def _values(self, request: Request) -> JSONResponse:
        """One value for each deployment that the label selector picks."""
        metric = request.path_params["metric"]
        field = METRICS.get(metric)
        if field is None:
            return status(404, f"there is no metric {metric}")
        is_picked = parse_selector(request.query_params.get("labelSelector", ""))
        sums = await self.sums()
        if self.namespace not in (None, request.path_params["namespace"]):
            sums = {}
        timestamp = self.now().strftime("%Y-%m-%dT%H:%M:%SZ")
        items = []
        for (release, model), totals in sorted(sums.items()):
            labels = {"release": release, "model": label_value(model)}
            if is_picked(labels):
                value = quantity(getattr(totals, field))
                items.append(
                    {
                        "metricName": metric,
                        "metricLabels": labels,
                        "timestamp": timestamp,
                        "value": value,
                    }
                )
        return JSONResponse(
            {
                "kind": "ExternalMetricValueList",
                "apiVersion": GROUP_VERSION,
                "metadata": {},
                "items": items,
            }
        )


def quantity(value: float) -> str:
    """As Kubernetes writes it, to a thousandth: `7`, `1500m`."""
    thousandths = round(max(0.0, value) * 1000)
    whole, rest = divmod(thousandths, 1000)
    return f"{thousandths}m" if rest else str(whole)


def status(code: int, message: str) -> JSONResponse:
    """A failure as Kubernetes' clients understand it."""
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": _REASONS[code],
        "code": code,
    }
    return JSONResponse(body, status_code=code)


class _OnlyFrontProxy:
    """Lets nobody else through, but to what a probe asks."""

    def __init__(self, app: ASGIApp, front_proxy: FrontProxy) -> None:
        self._app = app
        self._front_proxy = front_proxy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope)
        await (self._app if refusal is None else refusal)(scope, receive, send)

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        if scope["path"] in _OPEN_PATHS:
            return None
        name = scope["state"].get(PEER_NAME)
        if name is None:
            return status(401, "a client certificate of the API server's front proxy is needed")
        if not self._front_proxy.allows(name):
            return status(403, f"{name} is not the API server's front proxy")
        return None


async def _healthy(request: Request) -> JSONResponse:
    return JSONResponse({"status": "ok"})


async def _groups(request: Request) -> JSONResponse:
    return JSONResponse({"kind": "APIGroupList", "apiVersion": "v1", "groups": [_group_body()]})


async def _group(request: Request) -> JSONResponse:
    return JSONResponse({"kind": "APIGroup", "apiVersion": "v1", **_group_body()})


async def _resources(request: Request) -> JSONResponse:
    resources = [
        {
            "name": name,
            "singularName": "",
            "namespaced": True,
            "kind": "ExternalMetricValueList",
            "verbs": ["get"],
        }
        for name in METRICS
    ]
    return JSONResponse(
        {
            "kind": "APIResourceList",
            "apiVersion": "v1",
            "groupVersion": GROUP_VERSION,
            "resources": resources,
        }
    )


def _group_body() -> dict[str, object]:
    version = {"groupVersion": GROUP_VERSION, "version": VERSION}
    return {"name": GROUP, "versions": [version], "preferredVersion": version}
