"""`python -m bench.limited_prefill`: a prefill worker whose blocks are read over a slow link.

It is `python -m prefill_svc --kv-transport tcp` with a relay before its data port.
"""

from __future__ import annotations

import contextlib
import sys
from unittest import mock

from baton.v1 import kv_transfer_pb2
from bench.relay import relay
from kvtransfer.base import MemoryRegion, Transport
from kvtransfer.tcp_transport import TcpTransport
from prefill_svc.service import PrefillService
from worker.main import run

LINK_BITS_PER_S = 1e9


class LimitedTransport(TcpTransport):
    """Tells peers the relay's port instead of its own."""

    def __init__(self, agent: str, region: MemoryRegion, host: str) -> None:
        super().__init__(agent, region, host)
        self._relay = contextlib.ExitStack()
        self._relay_port = 0

    async def start(self) -> None:
        await super().start()
        own = super().descriptor()
        link = relay((own.host, own.port), LINK_BITS_PER_S)
        self._relay_port = self._relay.enter_context(link)

    def descriptor(self) -> kv_transfer_pb2.TransportDescriptor:
        descriptor = super().descriptor()
        descriptor.port = self._relay_port
        return descriptor

    async def close(self) -> None:
        self._relay.close()
        await super().close()


def _make_transport(name: str, agent: str, region: MemoryRegion, host: str) -> Transport:
    assert name == TcpTransport.name, "the relay forwards the tcp transport only"
    return LimitedTransport(agent, region, host)


if __name__ == "__main__":
    with mock.patch("worker.main.make_transport", _make_transport):
        sys.exit(run("bench.limited_prefill", PrefillService))
