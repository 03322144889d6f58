"""The HTTP API as an ASGI application: who may call, which endpoint, what goes wrong."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import asdict, dataclass, field

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from router.demand import Totals
from router.generation import Generation
from router.http.answer import answer
from router.http.call import Call
from router.http.cors import CorsPolicy
from router.http.errors import CLIENT_LEFT, ClientLeft, HttpError, to_http
from router.http.formats import ChatFormat, CompletionFormat, Reply
from router.http.jobs import chat_job, check_model, completion_job
from router.http.parameters import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
    renamed_fields,
)
from router.http.parse import off_loop, parse_body
from router.http.tokens import detokenized, tokenized
from router.quotas import Charge
from router.requests import RequestTable

MAX_HEADER_BYTES = 32 << 10
_OPEN_PATHS = frozenset({"/health", "/metrics", "/demand"})
"""For probes, Prometheus and autoscalers, which have no key."""

Handler = Callable[[Call], Awaitable[None]]


@dataclass(frozen=True)
class HttpApi:
    """What the endpoints need. `asgi()` makes the application."""

    table: RequestTable
    shared: Generation
    request_timeout_s: float
    demand: Callable[[], Awaitable[Totals]]
    started_at: float = field(default_factory=time.time)

    def asgi(self, cors_origins: list[str]) -> ASGIApp:
        """The application; web pages of `cors_origins` may call it from a browser."""
        routes = [
            ("/v1/chat/completions", "POST", self.chat_completions),
            ("/v1/completions", "POST", self.completions),
            ("/v1/models", "GET", self.models),
            ("/v1/models/{name:path}", "GET", self.model),
            ("/tokenize", "POST", self.tokenize),
            ("/detokenize", "POST", self.detokenize),
            ("/health", "GET", self.health),
            ("/metrics", "GET", self.metrics),
            ("/demand", "GET", self.whole_demand),
        ]
        router = Router(
            [Route(path, _Endpoint(handler), methods=[method]) for path, method, handler in routes],
            redirect_slashes=False,
        )
        handlers = {(method, path): handler for path, method, handler in routes if "{" not in path}
        app: ASGIApp = _Boundary(self, handlers, router)
        if cors_origins:
            app = CorsPolicy(
                app,
                allow_origins=cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "retry-after"],
            )
        return app

    async def completions(self, call: Call) -> None:
        data = await _json(call)
        body = await off_loop(data, parse_body, CompletionBody, data)
        call.names = renamed_fields(body)
        limits = self.shared.current_limits()
        check_model(body.model, limits)
        job = await completion_job(body, call.request_id, self.shared.tokenizer, limits)
        form = CompletionFormat(job, self._reply(call), self.shared.tokenizer)
        await answer(call, job, form, self.table, call.timeout_s(self.request_timeout_s))

    async def chat_completions(self, call: Call) -> None:
        data = await _json(call)
        body = await off_loop(data, parse_body, ChatBody, data)
        call.names = renamed_fields(body)
        check_model(body.model, self.shared.limits)
        job = await off_loop(data, chat_job, body, call.request_id)
        form = ChatFormat(job, self._reply(call), self.shared.tokenizer)
        await answer(call, job, form, self.table, call.timeout_s(self.request_timeout_s))

    async def models(self, call: Call) -> None:
        await call.reply_json({"object": "list", "data": [self._model()]})

    async def model(self, call: Call) -> None:
        name = call.scope["path_params"]["name"]
        if not name:  # it stands for the served model only where it is a parameter
            raise HTTPException(404)
        check_model(name, self.shared.limits)
        await call.reply_json(self._model())

    async def tokenize(self, call: Call) -> None:
        data = await _json(call)
        body = await off_loop(data, parse_body, TokenizeBody, data)
        async with self._counted(call):
            await call.reply_json(await tokenized(body, self.shared))

    async def detokenize(self, call: Call) -> None:
        data = await _json(call)
        body = await off_loop(data, parse_body, DetokenizeBody, data)
        async with self._counted(call):
            await call.reply_json(await detokenized(body, self.shared))

    async def health(self, call: Call) -> None:
        is_ready = self.shared.placer.pool.is_ready
        if not is_ready:
            raise HttpError(503, "no worker of each role is ready", code="unavailable")
        await call.reply_json({"status": "ok"})

    async def metrics(self, call: Call) -> None:
        body = generate_latest(self.shared.metrics.registry)
        await call.reply(200, body, content_type=CONTENT_TYPE_LATEST)

    async def whole_demand(self, call: Call) -> None:
        """Of the whole deployment, as autoscalers outside Kubernetes' own API read it."""
        await call.reply_json(asdict(await self.demand()))

    def _counted(self, call: Call) -> AbstractAsyncContextManager[Charge]:
        """The call counts as a request of its tenant, of no tokens."""
        tenant = self.shared.tenants.current.named(call.tenant)
        request_id = f"{self.shared.router_id}/call/{uuid.uuid4().hex}"
        return self.shared.admission.quota(tenant, request_id, num_tokens=0)

    def _reply(self, call: Call) -> Reply:
        return Reply(call.request_id, int(time.time()), self.shared.limits.served_name)

    def _model(self) -> Mapping[str, object]:
        limits = self.shared.current_limits()
        return {
            "id": limits.served_name,
            "object": "model",
            "created": int(self.started_at),
            "owned_by": "baton",
            "max_model_len": limits.max_model_len,
        }


class _Endpoint:
    """A handler as the routes want it: an ASGI application."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._handler(scope["baton.call"])


class _Boundary:
    """Around all endpoints: checks what concerns every call, and answers every error.

    A call of exactly one of `handlers` goes straight there, all others through `router`, which
    tries one route after the other.
    """

    def __init__(
        self, api: HttpApi, handlers: Mapping[tuple[str, str], Handler], router: Router
    ) -> None:
        self._api = api
        self._handlers = handlers
        self._router = router

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send)
        try:
            call.take_request_id()
            _check_headers(scope)
            if scope["path"] not in _OPEN_PATHS:
                call.tenant = self._api.shared.tenants.tenant(call.header("authorization"))
            handler = self._handlers.get((scope["method"], scope["path"]))
            if handler is not None:
                await handler(call)
            else:
                # With "app" there, unknown paths and methods are raised and not answered.
                scope.update({"baton.call": call, "app": self})
                await self._router(scope, receive, send)
        except ClientLeft:
            call.status = CLIENT_LEFT
        except Exception as error:
            await call.fail(to_http(error, call.names, call.request_id))
        finally:
            # Which knows the scope: they must not keep each other.
            scope.pop("baton.call", None)
            self._api.shared.metrics.http_responses.labels(str(call.status)).inc()


def _check_headers(scope: Scope) -> None:
    num_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
    num_bytes += len(scope["raw_path"]) + len(scope["query_string"])
    if num_bytes > MAX_HEADER_BYTES:
        message = f"the headers have {num_bytes} bytes; the limit is {MAX_HEADER_BYTES}"
        raise HttpError(431, message, code="headers_too_large")


async def _json(call: Call) -> bytes:
    """The body, which has to be JSON if its type is told. Raises HttpError."""
    body = await call.body()
    kind = (call.header("content-type") or "").partition(";")[0].strip().lower()
    if kind and kind != "application/json" and not kind.endswith("+json"):
        message = f"content-type must be application/json, got {kind[:64]!r}"
        raise HttpError(415, message, code="unsupported_media_type", param="content-type")
    return body
