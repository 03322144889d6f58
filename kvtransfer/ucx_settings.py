"""What UCX is told, by whichever backend loads it, unless the environment says otherwise."""

from __future__ import annotations

from pathlib import Path


def ucx_defaults(memory: str, host: str) -> dict[str, str]:
    """Environment variables for UCX. `memory` and `host`: what will be registered, and the
    address that peers reach it at.

    UCX's own TCP defaults are four times slower; a large segment helps on loopback and hurts
    between network namespaces. CMA in its default segments of 512 KiB is a tenth slower than
    in whole large blocks. Device memory and RDMA need UCX's own choice of transports. UCX logs
    to standard output unless told not to.
    """
    is_loopback = host in ("localhost", "::1") or host.startswith("127.")
    segment = "256k" if is_loopback else "64k"
    defaults = {
        "UCX_TCP_TX_SEG_SIZE": segment,
        "UCX_TCP_RX_SEG_SIZE": segment,
        "UCX_TCP_SNDBUF": "4m",
        "UCX_TCP_RCVBUF": "4m",
        "UCX_CMA_SEG_SIZE": "2m",
        "UCX_LOG_FILE": "stderr",
    }
    if memory == "DRAM" and not Path("/sys/class/infiniband").is_dir():
        defaults["UCX_TLS"] = "cma,tcp,self"
    return defaults
