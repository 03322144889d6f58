"""What the operator can choose about a router."""

from __future__ import annotations

from pydantic import Field

from core.settings import Settings
from router.policies import PolicyName


class RouterSettings(Settings):
    """Flags of `python -m router`."""

    model: str = Field(description="Model folder or hub name: tokenizer, limits, defaults")
    served_model_name: str | None = Field(
        None, description="Name that clients use; the folder's name if not given"
    )
    host: str = Field("127.0.0.1", description="Address to listen on")
    port: int = Field(50051, ge=0, le=65535, description="Port to listen on; 0 takes a free one")
    redis_url: str = Field("redis://127.0.0.1:6379/0", description="Registry and prefix index")
    log_level: str = Field("INFO", pattern="(?i)^(debug|info|warning|error)$", description="Logs")
    request_timeout_s: float = Field(
        600.0, gt=0, description="Longest life of a request; a client's own deadline is shorter"
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
    worker_poll_s: float = Field(1.0, gt=0, description="How often the registry is read")
