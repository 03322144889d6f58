"""Messages between workers that get lost, come late or come twice."""

from __future__ import annotations

from typing import Any

import grpc

from tests.faults.points import FaultPoints


class FaultyCalls(grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[misc, type-arg]
    """The points NAME:before and NAME:after of every call NAME: Grant, Announce, Release, …

    Before: hold, delay, drop (the peer never hears it), duplicate (the peer hears it twice).
    After: hold, delay, drop (the answer is lost).
    """

    def __init__(self, faults: FaultPoints) -> None:
        self._faults = faults

    async def intercept_unary_unary(
        self, continuation: Any, client_call_details: Any, request: Any
    ) -> Any:
        name = client_call_details.method.decode().rpartition("/")[2]
        action = await self._faults.at(f"{name}:before")
        if action == "drop":
            raise _lost(name)
        if action == "duplicate":
            await (await continuation(client_call_details, request))
        call = await continuation(client_call_details, request)
        reply = await call
        if await self._faults.at(f"{name}:after") == "drop":
            raise _lost(name)
        return reply


def _lost(name: str) -> grpc.aio.AioRpcError:
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), f"a fault: {name}"
    )
