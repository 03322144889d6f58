"""What the operator can choose about a router."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from core.tls import TlsSettings
from core.tracing import TracingSettings
from router.local_prefill import MAX_TOKENS, START_TOKENS
from router.policies import PolicyName
from router.tenants import ClassName


class RouterSettings(TlsSettings, TracingSettings):
    """Flags of `python -m router`."""

    model: str = Field(description="Model folder or hub name: tokenizer, limits, defaults")
    served_model_name: str | None = Field(
        None, description="Name that clients use; the folder's name if not given"
    )
    release: str = Field(
        "baton",
        pattern=r"^[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?$",
        description="This deployment's name, a label of the autoscaling metrics",
    )
    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(50051, ge=0, le=65535, description="Port to listen on; 0 takes a free one")
    http_port: int | None = Field(
        None, ge=0, le=65535, description="Port of the OpenAI HTTP API; 0 takes a free one"
    )
    api_keys: Path | None = Field(
        None,
        description="File of API keys, lines of KEY or KEY TENANT; read again on change; "
        "without it all may call",
    )
    cors_origins: str = Field(
        "",
        description="Origins whose web pages may call the HTTP API, with commas between; * is all",
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="Registry, prefix index and quotas: redis://, rediss:// (TLS), "
        "redis+sentinel://host,host/service/db or redis+cluster://host,host",
    )
    log_level: str = Field("INFO", pattern="(?i)^(debug|info|warning|error)$", description="Logs")
    request_timeout_s: float = Field(
        600.0, gt=0, description="Longest life of a request; a client's own deadline is shorter"
    )
    client_stall_s: float = Field(
        60.0, gt=0, description="A client that reads nothing of its answer for so long is dropped"
    )
    worker_silence_s: float = Field(
        5.0, gt=0, description="A worker that says nothing for so long counts as unreachable"
    )
    worker_wait_s: float = Field(
        10.0,
        ge=0,
        description="How long a request waits in all while no worker of a role is ready",
    )
    load_max_age_s: float = Field(
        3.0, gt=0, description="A load report older than this counts as unknown"
    )
    routing_policy: PolicyName = Field(
        "kv_aware", description="How workers are chosen; the others are for comparison"
    )
    prefix_weight: float = Field(
        6.0,
        ge=0,
        description="What computing a block that another worker holds costs, next to 1 for "
        "waiting as long: more gives more cache hits and less even load",
    )
    local_prefill_max_tokens: int | None = Field(
        None,
        ge=0,
        description="Decode computes a prompt itself if it lacks no more than so many tokens of "
        "it; 0: never; learned from what is observed if not given",
    )
    local_prefill_start_tokens: int = Field(
        START_TOKENS,
        ge=0,
        le=MAX_TOKENS,
        description="Where that limit begins when it is learned: what bench.local_prefill finds",
    )
    tenants: Path | None = Field(
        None, description="YAML file of classes, tenants, keys and quotas; read again on change"
    )
    max_queued_requests: int = Field(
        1024, ge=1, description="Requests of one tenant that may wait in the router"
    )
    prefill_ahead_s: float = Field(
        0.1,
        gt=0,
        description="Work that is sent ahead to a prefill worker; the rest waits in the router",
    )
    fallback_url: str | None = Field(
        None,
        pattern="^https?://.+",
        description="OpenAI-compatible endpoint (https://host/v1) for what cannot be served here",
    )
    fallback_api_key_env: str | None = Field(
        None, description="Environment variable that holds the fallback's API key"
    )
    fallback_model: str | None = Field(
        None, description="Model to ask the fallback for; the served name if not given"
    )
    fallback_classes: list[ClassName] = Field(
        ["gold"], description="Classes whose requests may go to the fallback"
    )
    drain_timeout_s: float = Field(
        25.0,
        ge=0,
        description="How long after a stop signal answers may take to end; "
        "a second signal ends it at once",
    )
    traces_sampling_ratio: float = Field(
        1.0,
        ge=0,
        le=1,
        description="Share of requests that are traced, of those that come without a "
        "traceparent; with one, the caller has decided",
    )
    worker_poll_s: float = Field(1.0, gt=0, description="How often the registry is read")
