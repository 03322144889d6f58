"""What the operator can choose about the metrics adapter."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from core.settings import Settings


class AdapterSettings(Settings):
    """Flags of `python -m router.metrics_adapter`."""

    host: str = Field("0.0.0.0", description="Address to listen on")
    port: int = Field(6443, ge=0, le=65535, description="Port to listen on; 0 takes a free one")
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="Redis of the routers: redis://, rediss:// (TLS), "
        "redis+sentinel://host,host/service/db or redis+cluster://host,host",
    )
    namespace: str | None = Field(
        None, description="The only namespace that is told any values; all if not given"
    )
    service_name: str = Field(
        "baton-metrics-adapter",
        description="Service under which the API server reaches it: a name in its certificate",
    )
    service_namespace: str = Field("default", description="Namespace of that service")
    tls_cert_file: Path | None = Field(
        None, description="Its certificate (PEM); it makes its own if not given"
    )
    tls_key_file: Path | None = Field(None, description="The certificate's key (PEM)")
    patch_api_service: bool = Field(
        True,
        description="Write the CA of the certificate that it makes into its APIService",
    )
    requestheader_client_ca_file: Path | None = Field(
        None,
        description="CA of the API server's front proxy (PEM); read from the config map "
        "kube-system/extension-apiserver-authentication if not given",
    )
    requestheader_allowed_names: list[str] = Field(
        [],
        description="With that file: common names that the front proxy may have; none: any",
    )
    log_level: str = Field("INFO", pattern="(?i)^(debug|info|warning|error)$", description="Logs")
