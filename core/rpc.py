"""gRPC life-cycle that every service shares: options, errors, start, health, stop.

run_service(main)  ->  RpcServer(host, port)  ->  add servicers  ->  start  ->  stop
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import logging
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any

import grpc
import uvloop
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from core.address import join_host_port
from core.errors import (
    ERROR_METADATA_KEY,
    BatonError,
    InternalError,
    StartupError,
    Unavailable,
    Unreachable,
    from_exception,
    own_error,
    status_of,
    to_detail,
)
from core.health import Health
from core.logs import event
from core.tls import Tls

logger = logging.getLogger(__name__)

MAX_REQUEST_BYTES = 4 << 20
"""Largest request that a service takes; a larger one is an InvalidArgument."""

MAX_MESSAGE_BYTES = 32 << 20
"""Largest message that gRPC delivers at all. Above it gRPC itself answers
RESOURCE_EXHAUSTED, before any code of ours runs; hence the distance to the limit above."""

KEEPALIVE_S = 20.0
"""A peer from which nothing comes for so long is asked whether it is there."""
KEEPALIVE_TIMEOUT_S = 10.0

_COMMON_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", round(1e3 * KEEPALIVE_S)),
    ("grpc.keepalive_timeout_ms", round(1e3 * KEEPALIVE_TIMEOUT_S)),
)

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON_OPTIONS,
    # A restarted pod is found again within two seconds, not within gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    # A channel to a pod's new life at the same address tries at once. Without this it would
    # share the connection of the former life's channel, which may be in its backoff.
    ("grpc.use_local_subchannel_pool", 1),
    # Pods talk to each other directly, whatever http_proxy says.
    ("grpc.enable_http_proxy", 0),
)

_GC_THRESHOLDS = (1_000, 10, 1_000)
"""A collection takes about a microsecond for each object that is new since the last one, and
everybody waits; of cycles, which are what it finds, requests leave hardly any."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *_COMMON_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", round(1e3 * KEEPALIVE_S / 2)),
    ("grpc.http2.max_ping_strikes", 0),
    # With SO_REUSEPORT a second server on a used port would start and take half the calls.
    ("grpc.so_reuseport", 0),
)


def open_channel(address: str, tls: Tls | None = None) -> grpc.aio.Channel:
    """A channel to a pod, encrypted with `tls`. Connects on first use."""
    if tls is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    options = (*CHANNEL_OPTIONS, *tls.channel_options)
    return grpc.aio.secure_channel(address, tls.channel_credentials(), options=options)


@contextmanager
def pod_errors(pod: str) -> Iterator[None]:
    """Translates everything that a call to `pod` raises: its own errors, else Unreachable.

    A call whose channel is closed meanwhile ends with a CancelledError that nobody asked for;
    a cancellation of the caller passes through.
    """
    try:
        yield
    except grpc.RpcError as error:
        own = own_error(error)
        raise own or Unreachable(f"{pod}: {error.code().name}: {error.details()}") from error
    except grpc.aio.UsageError as error:
        raise Unreachable(f"{pod}: {error}") from error
    except asyncio.CancelledError:
        if is_cancelled():
            raise
        raise Unreachable(f"{pod}: the connection was closed") from None


def is_cancelled() -> bool:
    """Whether the running task itself is meant by the CancelledError being handled.

    It is not when something was cancelled that the task awaits.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


class ErrorInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Ends a failed call with the status table's code and an ErrorDetail in the trailer."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler = await continuation(handler_call_details)
        if handler is None or (handler.request_streaming and not handler.response_streaming):
            return handler
        make: Any
        if not handler.response_streaming:
            wrap, behaviour = _wrap_unary, handler.unary_unary
            make = grpc.unary_unary_rpc_method_handler
        elif not handler.request_streaming:
            wrap, behaviour = _wrap_stream, handler.unary_stream
            make = grpc.unary_stream_rpc_method_handler
        else:
            wrap, behaviour = _wrap_stream, handler.stream_stream
            make = grpc.stream_stream_rpc_method_handler
        wrapped: grpc.RpcMethodHandler[Any, Any] = make(
            wrap(behaviour, handler_call_details.method),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return wrapped


def _wrap_unary(behaviour: Any, method: str) -> Any:
    async def call(request: Any, context: Any) -> Any:
        try:
            return await behaviour(request, context)
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            return await _abort(context, stray_cancellation(), method)
        except Exception as error:
            return await _abort(context, error, method)

    return call


def _wrap_stream(behaviour: Any, method: str) -> Any:
    if not inspect.isasyncgenfunction(behaviour):
        return _wrap_unary(behaviour, method)

    async def call(request: Any, context: Any) -> None:
        try:
            # Written out rather than yielded, so that a cancelled call closes the
            # handler's generator at once and in this task.
            async with aclosing(behaviour(request, context)) as messages:
                async for message in messages:
                    await context.write(message)
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError:
            if is_cancelled():
                raise
            await _abort(context, stray_cancellation(), method)
        except Exception as error:
            await _abort(context, error, method)

    return call


def stray_cancellation() -> BatonError:
    """For a CancelledError that nobody asked for.

    gRPC takes it for the end of the call, which would leave the caller without an answer.
    """
    return Unavailable("something that the call depends on was closed")


def to_own_error(exception: Exception, method: str) -> BatonError:
    """What a call to `method` that raised `exception` is answered with; bugs are logged."""
    error = from_exception(exception)
    if isinstance(error, InternalError):
        event(logger, logging.ERROR, "call_failed", method=method, error=error.message)
        logger.error("traceback", exc_info=exception)
    return error


async def _abort(context: Any, exception: Exception, method: str) -> None:
    error = to_own_error(exception, method)
    detail = to_detail(error)
    try:
        await context.abort(
            status_of(error).grpc,
            error.message,
            trailing_metadata=((ERROR_METADATA_KEY, detail.SerializeToString()),),
        )
    except grpc.aio.InternalError:
        # The client has left, or its deadline has passed, before the answer was there. gRPC
        # takes this for a cancelled call, and any other exception for a fault.
        raise asyncio.CancelledError from None


class RpcServer:
    """One gRPC server with error translation, health and reflection.

    Servicers are added to `grpc_server` before `start`. Construct it in a running loop. With
    `tls` it hears only services of this deployment.
    """

    def __init__(self, host: str, port: int, tls: Tls | None = None) -> None:
        self._host = host
        self._port = port
        self._tls = tls
        self._health = Health()
        self.grpc_server = grpc.aio.server(
            interceptors=[ErrorInterceptor()], options=SERVER_OPTIONS
        )

    async def start(self, service_names: Sequence[str]) -> str:
        """Listens and returns `host:port`; port 0 takes a free one. Raises StartupError."""
        self._health.add_to(self.grpc_server, service_names)
        names = [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME]
        reflection.enable_server_reflection(names, self.grpc_server)
        address = join_host_port(self._host, self._port)
        await self._check_host(address)
        try:
            if self._tls is None:
                port = self.grpc_server.add_insecure_port(address)
            else:
                port = self.grpc_server.add_secure_port(address, self._tls.server_credentials())
        except RuntimeError:
            port = 0
        if port == 0:
            raise StartupError(
                f"cannot listen on {address}: in use, or not an address of this host"
            )
        await self.set_serving(False)
        await self.grpc_server.start()
        return join_host_port(self._host, port)

    async def _check_host(self, address: str) -> None:
        """gRPC writes a line of its own about a host that it cannot resolve."""
        try:
            await asyncio.get_running_loop().getaddrinfo(self._host, self._port)
        except (OSError, UnicodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise StartupError(f"cannot listen on {address}: {reason}") from error

    async def set_serving(self, is_serving: bool) -> None:
        """What the health service answers, for the server and for each service of it."""
        self._health.set_serving(is_serving)

    async def stop(self, grace_s: float) -> None:
        """Takes no new call and ends those in flight after `grace_s`."""
        self._health.close()
        await self.grpc_server.stop(grace_s)


async def wait_for_stop_signal() -> None:
    """Returns at the next SIGINT or SIGTERM; those that come while nobody waits are ignored."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()


def settle_heap() -> None:
    """To be called when a service has started: what it has loaded, it keeps.

    The garbage collector need not look at that again and again, and at all objects seldom.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)


def run_service(main: Callable[[], Coroutine[Any, Any, None]]) -> int:
    """Runs a service's main coroutine on uvloop and returns the exit code.

    A StartupError becomes one line on standard error and exit code 1; Ctrl-C before `main`
    listens for it ends quietly with 130.
    """
    try:
        uvloop.run(main())
    except StartupError as error:
        sys.stderr.write(f"error: {error.message}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    # Where torch is loaded, the interpreter's last collection takes seconds to free what the
    # end of the process frees anyway.
    gc.freeze()
    return 0
