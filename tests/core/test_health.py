"""The health service, called without a server."""

from __future__ import annotations

import asyncio

from grpc_health.v1 import health_pb2

from core.health import Health

STATES = health_pb2.HealthCheckResponse


class Server:
    """Takes the place of a server that the service is added to."""

    def add_generic_rpc_handlers(self, handlers): ...

    def add_registered_method_handlers(self, name, handlers): ...


class Watcher:
    """Keeps what is written to it, once it is open."""

    def __init__(self, health, service="", *, is_open=True):
        self.states = asyncio.Queue()
        self._open = asyncio.Event()
        if is_open:
            self._open.set()
        request = health_pb2.HealthCheckRequest(service=service)
        self.task = asyncio.create_task(health.Watch(request, self))

    async def write(self, response):
        await self._open.wait()
        self.states.put_nowait(response.status)


def make_health():
    health = Health()
    health.add_to(Server(), ["baton.v1.Worker"])
    return health


async def test_who_watches_is_told_the_state_and_each_change_of_it():
    health = make_health()
    watcher = Watcher(health, "baton.v1.Worker")
    assert await watcher.states.get() == STATES.NOT_SERVING
    health.set_serving(False)
    health.set_serving(True)
    assert await watcher.states.get() == STATES.SERVING
    health.close()
    assert await watcher.states.get() == STATES.NOT_SERVING
    watcher.task.cancel()


async def test_one_that_does_not_read_keeps_no_state_from_the_others():
    health = make_health()
    stuck = Watcher(health, is_open=False)
    await asyncio.sleep(0)
    health.set_serving(True)
    watcher = Watcher(health)
    assert await watcher.states.get() == STATES.SERVING
    for each in (stuck, watcher):
        each.task.cancel()


async def test_an_unknown_service_is_watched_as_unknown():
    watcher = Watcher(make_health(), "baton.v1.Nobody")
    assert await watcher.states.get() == STATES.SERVICE_UNKNOWN
    watcher.task.cancel()


async def test_a_closed_service_does_not_serve_again():
    health = make_health()
    health.close()
    health.set_serving(True)
    answer = await health.Check(health_pb2.HealthCheckRequest(), None)
    assert answer.status == STATES.NOT_SERVING
