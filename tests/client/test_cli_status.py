"""`baton status`: the JSON, the table, the verdict of the audit."""

from __future__ import annotations

import json

import pytest

from baton.v1 import types_pb2, worker_pb2
from client.cli import main
from tests.client.conftest import worker_status


def status(router, *args: str) -> int:
    return main(["status", "--server", router.address, *args])


def test_json_has_the_documented_shape(router, capsys):
    assert status(router, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == {
        "workers": [
            {
                "id": "prefill-0",
                "role": "prefill",
                "address": "127.0.0.1:4000",
                "pid": 42,
                "epoch": 17,
                "state": "ready",
                "kv_transport": "tcp",
                "queue_depth": 1,
                "queued_tokens": 0,
                "running": 2,
                "blocks": {
                    "total": 10,
                    "free": 6,
                    "cached": 3,
                    "referenced": 1,
                    "quarantined": 0,
                },
                "exports": 3,
                "imports": 4,
            }
        ],
        "router": {"model": "tiny", "pid": 41, "num_requests": 1, "redis_ok": True},
    }
    assert router.audits == [False]


@pytest.mark.parametrize("columns", ["80", "200"])
def test_the_table_names_every_worker(router, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    router.workers.append(worker_status("decode-7"))
    assert status(router) == 0
    printed = capsys.readouterr().out
    assert "model tiny" in printed and "prefill-0" in printed and "decode-7" in printed
    assert "…" not in printed
    assert ("127.0.0.1:4000" in printed) == (columns == "200")


def test_a_clean_audit_ends_with_0(router, capsys):
    router.workers = [worker_status(audit=worker_pb2.Audit(ok=True))]
    assert status(router, "--audit", "--json") == 0
    assert router.audits == [True]
    assert json.loads(capsys.readouterr().out)["workers"][0]["audit"] == {"ok": True, "errors": []}


@pytest.mark.parametrize(
    ("worker", "line"),
    [
        (
            worker_status(audit=worker_pb2.Audit(ok=False, errors=["block 3 is free twice"])),
            "audit: prefill-0: block 3 is free twice\n",
        ),
        (
            worker_status(state=types_pb2.WORKER_STATE_UNREACHABLE),
            "audit: prefill-0: cannot be reached\n",
        ),
        (worker_status(), "audit: prefill-0: did not answer the audit\n"),
    ],
)
def test_an_audit_that_is_not_clean_ends_with_1(router, capsys, worker, line):
    router.workers = [worker]
    assert status(router, "--audit") == 1
    assert capsys.readouterr().err == line


def test_an_audit_of_no_worker_is_no_success(router, capsys):
    router.workers = []
    assert status(router, "--audit") == 1


def test_watch_refreshes_until_ctrl_c(router, capsys, monkeypatch):
    pauses = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("client.cli_status.time.sleep", sleep)
    assert status(router, "--watch", "0.5") == 130
    assert pauses == [0.5, 0.5]
    assert len(router.audits) == 2
