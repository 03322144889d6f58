"""Settings of a worker; every one is a flag, an environment variable and a line of --help."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

from pydantic import Field

from core.tls import TlsSettings
from core.tracing import TracingSettings
from engine.engine import EngineConfig
from kvtransfer.digests import SAMPLE_EVERY, DigestPlan
from kvtransfer.exports import LeaseConfig


class WorkerSettings(TlsSettings, TracingSettings):
    """Settings that both roles have."""

    model: str = Field(description="Folder or hub name of the model.")
    worker_id: str = Field(
        pattern=r"^[\x21-\x7e]{1,128}$",
        description="Name of this worker, without spaces; unique in the deployment.",
    )
    host: str = Field("127.0.0.1", description="Address to listen on.")
    advertise_host: str = Field("", description="Address that peers use; default: --host.")
    port: int = Field(0, ge=0, le=65535, description="Port to listen on; 0 takes a free one.")
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="Port of Prometheus' metrics (HTTP) and of /health; 0 takes a free one.",
    )
    redis_url: str = Field(
        "redis://127.0.0.1:6379/0",
        description="Redis of the deployment: redis://, rediss:// (TLS), "
        "redis+sentinel://host,host/service/db or redis+cluster://host,host.",
    )
    kv_transport: Literal["auto", "nixl", "ucxx", "tcp"] = Field(
        "auto",
        description="Backend of KV transfers; auto: the first of the others that is installed.",
    )
    kv_require: Literal["any", "rdma", "shared-memory", "cuda-ipc"] | None = Field(
        None,
        description="Find out which way KV moves, and take no new request while only slower "
        "links than this one were found; any only reports. cuda-ipc is directly between GPUs, "
        "which may be PCIe. Default: leave UCX, and what it logs, alone.",
    )
    kv_verify: Literal["always", "sampled", "off"] | None = Field(
        None,
        description="Compare digests of transferred blocks: all of them, one in eight, or none; "
        "default: always, and sampled on a GPU.",
    )
    kv_overlap: bool = Field(
        True, description="Hand finished layers of a long chunk off while the rest is computed."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="Logs.")

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Of weights and KV; auto takes the checkpoint's."
    )
    quantization: Literal["none", "int8", "fp8"] = Field(
        "none",
        description="Keep the weights of the layers in 8 bits, with a scale for each output; the "
        "output matrix, embeddings and KV stay in --dtype. A checkpoint that is quantized (AWQ, "
        "GPTQ, FP8) stays as it is, and wants none.",
    )
    kv_cache_dtype: Literal["auto", "fp8"] = Field(
        "auto",
        description="Of KV blocks: auto, that of the weights; fp8, e4m3 numbers with a scale for "
        "each token and head, half the memory and half the bytes to hand off.",
    )
    device: str = Field("cpu", description="cpu or cuda.")
    threads: int = Field(1, ge=1, le=1024, description="CPU threads of a step.")
    cpu_kernels: Literal["auto", "native", "torch"] = Field(
        "auto",
        description="On a CPU: native, compiled once for this machine with g++ into "
        "$BATON_CACHE/native; torch, PyTorch's own; auto, native where it goes.",
    )
    block_size: int = Field(16, ge=1, le=256, description="Tokens in a KV block.")
    num_gpu_blocks_override: int | None = Field(
        None, ge=1, description="Exact number of KV blocks (on any device)."
    )
    kv_cache_memory_bytes: int | None = Field(
        None,
        ge=1,
        description="Memory for KV blocks; default: a share of what is free, and on a GPU what "
        "--gpu-memory-utilization leaves.",
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of a GPU's memory for weights, steps, graphs and KV blocks together, "
        "unless the number or the memory of KV blocks is given.",
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Longest sequence in tokens; default: the model's context."
    )
    max_num_seqs: int = Field(64, ge=1, description="Sequences in one step.")
    max_num_batched_tokens: int = Field(2048, ge=1, description="Tokens in one step.")
    local_prefill_chunk: int | None = Field(
        None,
        ge=1,
        description="Tokens of prompts in one step of a decode worker beside running sequences, "
        "which must not be held up by what it computes itself; default: 128, and 32 on a CPU.",
    )
    async_scheduling: bool | None = Field(
        None,
        description="Plan the next step while one is computed, so that the device does not wait "
        "in between; what finishes early is computed for one step too many. Default: on for a "
        "GPU.",
    )
    max_num_partial_prefills: int = Field(
        4, ge=1, description="Prompts that are prefilled side by side."
    )
    max_long_partial_prefills: int = Field(
        1, ge=1, description="Of them, prompts over --long-prefill-token-threshold."
    )
    long_prefill_token_threshold: int = Field(
        1024, ge=1, description="Tokens from which on a prompt counts as long."
    )

    graph_mode: Literal[
        "auto", "NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"
    ] = Field(
        "auto",
        description="Which steps of a GPU are recorded as CUDA graphs; auto: FULL_DECODE_ONLY. "
        "On a CPU, auto is NONE, and the others only pad the steps, for tests.",
    )
    capture_sizes: list[int] | None = Field(
        None,
        description="Tokens of the graphs, as a JSON list; default: 1, 2, 4, 8, 16, 24 and so on "
        "up to --max-num-seqs. Larger steps run without a graph.",
    )

    lease_s: float = Field(10.0, gt=0, description="Life of exported blocks without renewal.")
    max_lease_s: float = Field(60.0, gt=0, description="Life of exported blocks at most.")
    warm_prefix_share: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of the pool up to which a worker that starts takes over what another "
        "one of its role has found in its prefix cache lately, before it takes requests; 0: none.",
    )
    warm_prefix_timeout_s: float = Field(
        10.0, gt=0, description="How long that may hold up the start; it goes on with what came."
    )
    max_recompute_tokens: int = Field(
        256,
        ge=0,
        description="Decode computes a preempted sequence of up to so many tokens again itself; "
        "a longer one goes back to prefill.",
    )
    import_timeout_s: float = Field(
        120.0, gt=0, description="Silence of prefill after which an import is given up."
    )
    max_quarantined_share: float = Field(
        0.5,
        gt=0,
        le=1,
        description="Share of the pool that given-up reads may block. Above it the worker takes "
        "no new request, ends those that it has, and leaves with exit code 1 to be restarted.",
    )
    max_export_share: float = Field(
        0.9, gt=0, le=1, description="Share of the pool that exports may pin."
    )

    drain_timeout_s: float = Field(
        25.0,
        ge=0,
        description="How long after a stop signal what runs may take to end or to go on "
        "elsewhere; a second signal ends it at once.",
    )

    def engine_config(self, model_path: Path) -> EngineConfig:
        """The part that the engine needs."""
        return EngineConfig(
            model=model_path,
            dtype=self.dtype,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            device=self.device,
            num_threads=self.threads,
            cpu_kernels=self.cpu_kernels,
            block_size=self.block_size,
            num_gpu_blocks_override=self.num_gpu_blocks_override,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            max_model_len=self.max_model_len,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_prefill_tokens_beside_decodes=self.local_prefill_chunk
            or (32 if self.device == "cpu" else 128),
            max_num_partial_prefills=self.max_num_partial_prefills,
            max_long_partial_prefills=self.max_long_partial_prefills,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            gpu_memory_utilization=self.gpu_memory_utilization,
            graph_mode=self.graph_mode,
            capture_sizes=None if self.capture_sizes is None else tuple(self.capture_sizes),
        )

    @property
    def schedules_ahead(self) -> bool:
        """Whether steps are planned ahead."""
        return self.device != "cpu" if self.async_scheduling is None else self.async_scheduling

    def digest_plan(self) -> DigestPlan:
        """Which blocks of a request that begins now are verified."""
        verify = self.kv_verify or ("always" if self.device == "cpu" else "sampled")
        if verify == "off":
            return DigestPlan()
        if verify == "always":
            return DigestPlan(every=1)
        return DigestPlan(every=SAMPLE_EVERY, offset=random.randrange(SAMPLE_EVERY))

    def lease_config(self) -> LeaseConfig:
        """The part that exports need."""
        return LeaseConfig(lease_s=self.lease_s, max_lease_s=self.max_lease_s)
