"""Puts the adapter together and runs it: certificate → trust → serving → stopped."""

from __future__ import annotations

import asyncio
import datetime
import logging
import ssl
import sys
import tempfile
import time
from pathlib import Path

from kubernetes.client import ApiClient

from core.errors import StartupError, Unavailable
from core.http_server import HttpServer
from core.logs import event
from core.redis_client import connect_redis
from core.rpc import wait_for_stop_signal
from core.tasks import TaskSet
from router import kubernetes_client
from router.demand_board import DemandBoard
from router.demand_sampler import DemandSampler
from router.metrics_adapter import cluster
from router.metrics_adapter.api import MetricsApi
from router.metrics_adapter.certificate import make_certificate, service_names
from router.metrics_adapter.front_proxy import FrontProxy
from router.metrics_adapter.protocol import PeerNameProtocol
from router.metrics_adapter.settings import AdapterSettings

logger = logging.getLogger(__name__)

_REFRESH_S = 60.0
_WITHOUT_CLUSTER = (
    "without a cluster it takes --requestheader-client-ca-file and, for the certificate, "
    "--tls-cert-file and --tls-key-file or --no-patch-api-service"
)
_STOP_GRACE_S = 1.0


class Adapter:
    """One adapter. Construct it in a running event loop."""

    def __init__(self, settings: AdapterSettings) -> None:
        self._settings = settings
        self._tasks = TaskSet()
        self._redis = connect_redis(settings.redis_url)
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # Probes have no certificate; a wrong one ends in the handshake.
        self._context.verify_mode = ssl.CERT_OPTIONAL
        self._ca_bundle: bytes | None = None
        """What the API server must be told of the certificate."""
        self._api: ApiClient | None = None
        self._front_proxy = FrontProxy("")
        self._http: HttpServer | None = None

    async def start(self) -> str:
        """Listens at the `host:port` that it returns. Raises StartupError."""
        self._load_certificate()
        ca_file = self._settings.requestheader_client_ca_file
        if self._ca_bundle is not None or ca_file is None:
            try:
                self._api = await asyncio.to_thread(kubernetes_client.connect)
                await self._refresh()
            except (StartupError, Unavailable) as error:
                raise StartupError(f"{error.message}; {_WITHOUT_CLUSTER}") from error
        if ca_file is not None:
            names = frozenset(self._settings.requestheader_allowed_names)
            self._trust(FrontProxy(_read(ca_file), names))
        sampler = DemandSampler(DemandBoard(self._redis).sums, time.monotonic)
        self._tasks.start(sampler.run())
        api = MetricsApi(
            sampler.averages,
            self._front_proxy,
            self._settings.namespace,
            lambda: datetime.datetime.now(datetime.UTC),
        )
        self._http = HttpServer(
            api.asgi(), self._settings.host, self._settings.port, PeerNameProtocol, self._context
        )
        address = await self._http.start()
        if self._api is not None:
            self._tasks.start(self._keep_fresh())
        return address

    async def stop(self) -> None:
        """Ends what is in flight and closes everything."""
        if self._http is not None:
            await self._http.stop()
        await self._tasks.cancel(_STOP_GRACE_S)
        await self._redis.aclose()

    def _load_certificate(self) -> None:
        """The one that was given, else one of its own."""
        cert, key = self._settings.tls_cert_file, self._settings.tls_key_file
        if (cert is None) != (key is None):
            raise StartupError("--tls-cert-file and --tls-key-file go together")
        try:
            if cert is not None:
                # Again and again: connections to come show a renewed one.
                self._context.load_cert_chain(cert, key)
                return
            names = service_names(self._settings.service_name, self._settings.service_namespace)
            own = make_certificate(names, datetime.datetime.now(datetime.UTC))
            if self._settings.patch_api_service:
                self._ca_bundle = own.ca
            # The ssl module reads files only.
            with tempfile.NamedTemporaryFile(suffix=".pem") as file:
                file.write(own.key + own.certificate)
                file.flush()
                self._context.load_cert_chain(file.name)
        except (OSError, ssl.SSLError) as error:
            raise StartupError(f"the adapter's certificate: {error}") from error

    async def _keep_fresh(self) -> None:
        """The front proxy's CA changes now and then, a given certificate is renewed, and a Helm
        upgrade may reset the bundle."""
        while True:
            await asyncio.sleep(_REFRESH_S)
            try:
                if self._settings.tls_cert_file is not None:
                    self._load_certificate()
                await self._refresh()
            except (StartupError, Unavailable) as error:
                event(logger, logging.WARNING, "not_refreshed", error=error.message)

    async def _refresh(self) -> None:
        """Raises Unavailable."""
        assert self._api is not None
        if self._settings.requestheader_client_ca_file is None:
            self._trust(await asyncio.to_thread(cluster.read_front_proxy, self._api))
        if self._ca_bundle is not None:
            await asyncio.to_thread(cluster.write_ca_bundle, self._api, self._ca_bundle)

    def _trust(self, front_proxy: FrontProxy) -> None:
        if front_proxy.ca != self._front_proxy.ca:
            front_proxy.trust_in(self._context)
        self._front_proxy.ca, self._front_proxy.names = front_proxy.ca, front_proxy.names


async def serve(settings: AdapterSettings) -> None:
    """Runs an adapter until SIGINT or SIGTERM. Prints one `ready` line. Raises StartupError."""
    stop = asyncio.get_running_loop().create_task(wait_for_stop_signal())
    adapter = Adapter(settings)
    try:
        address = await adapter.start()
        sys.stdout.write(f"ready https={address}\n")
        sys.stdout.flush()
        await stop
    finally:
        await adapter.stop()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise StartupError(f"{path}: {error}") from error
