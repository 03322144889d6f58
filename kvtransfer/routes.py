"""Which way the bytes of a transport go: that is UCX's choice, and it falls back silently.

UCX writes its choice down when it first reads from (or sends to) a kind of peer, as a table
whose last row is for large messages. A kind that it has met before gets no second table, so
a log tells which ways a process uses, and not which peer has which. Of messages (ucxx) it is
the sender that knows, and what it writes down is what it expects the receiver to agree to.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import logging
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from core.logs import event

logger = logging.getLogger(__name__)

_UCX_READ_TABLE = re.compile(r"remote memory read by ucp_get.*\n(?:.*\n){3}(.*)")
_UCX_SEND_TABLE = re.compile(r"message by ucp_tag_send\* from.*\n(?:.*\n){3}(.*\.\.inf .*)")
_TABLE_LINE = re.compile(r"\]\s+[|+]")
_TRANSPORT_NAME = re.compile(r"(\w+)/")
_COPIES_AT_ONE_END = {"cuda_copy", "gdr_copy"}


class LinkKind(enum.IntEnum):
    """From the slowest to the fastest."""

    TCP = 0
    """Also whatever is not known to be better."""
    RDMA = 1
    SHARED_MEMORY = 2
    """Between processes of one machine, in host memory."""
    CUDA_IPC = 3
    """Between GPUs of one machine; whether by NVLink or PCIe, UCX does not tell."""

    @property
    def label(self) -> str:
        """As settings and metrics write it."""
        return self.name.lower().replace("_", "-")

    @classmethod
    def of_label(cls, label: str) -> LinkKind:
        return cls[label.upper().replace("-", "_")]


_KINDS = {
    "cuda_ipc": LinkKind.CUDA_IPC,
    **dict.fromkeys(("cma", "knem", "xpmem", "sysv", "posix", "self"), LinkKind.SHARED_MEMORY),
    **dict.fromkeys(
        ("rc_verbs", "rc_mlx5", "dc_mlx5", "ud_verbs", "ud_mlx5", "gga_mlx5", "srd"), LinkKind.RDMA
    ),
}


def link_kind(route: str) -> LinkKind:
    """The kind of a route such as "cma/memory" or "50% on rc_mlx5/mlx5_0:1 and …": that of its
    slowest part."""
    names = set(_TRANSPORT_NAME.findall(route)) - _COPIES_AT_ONE_END
    return min((_KINDS.get(name, LinkKind.TCP) for name in names), default=LinkKind.TCP)


def ucx_routes(text: str) -> tuple[str, ...]:
    """The different routes of large blocks that a log of UCX tells of, in its order."""
    rows = _UCX_READ_TABLE.findall(text) or _UCX_SEND_TABLE.findall(text)
    routes = (row.strip(" |").rpartition("|")[2].strip() for row in rows)
    return tuple(dict.fromkeys(route for route in routes if route))


class UcxLog:
    """What UCX of this process writes down; passes on what is no table."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._num_lines_seen = 0

    def routes(self) -> tuple[str, ...]:
        """Those found until now. Reads a small file: call it in a thread."""
        ctypes.CDLL(None).fflush(None)  # UCX leaves the log in the C library's buffer.
        if not self.path.exists():
            return ()
        text = self.path.read_text(errors="replace")
        self._pass_on(text.split("\n")[:-1])
        return ucx_routes(text)

    def _pass_on(self, lines: list[str]) -> None:
        fresh: Iterable[str] = lines[self._num_lines_seen :]
        self._num_lines_seen = len(lines)
        for line in fresh:
            if not _TABLE_LINE.search(line):
                event(logger, logging.WARNING, "ucx", line=line)


@contextlib.contextmanager
def ucx_log() -> Iterator[UcxLog]:
    """Lets UCX write down its choices; before the process loads UCX, and for all of it.

    Processes that are spawned meanwhile write files of their own beside it.
    """
    with tempfile.TemporaryDirectory(prefix="baton-ucx-", ignore_cleanup_errors=True) as folder:
        os.environ.update(UCX_PROTO_INFO="y", UCX_LOG_FILE=str(Path(folder) / "%p.log"))
        yield UcxLog(Path(folder) / f"{os.getpid()}.log")
