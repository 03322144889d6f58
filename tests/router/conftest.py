"""What the router's tests have in common."""

from __future__ import annotations

import pytest

from tests.router.stack import PATIENCE_S


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is no outage: a router goes on without Redis, or a worker's word, only in the
    tests that are about that."""
    for limit in (
        "router.dispatch._PREFILL_REPORT_TIMEOUT_S",
        "router.load_exchange._TIMEOUT_S",
        "router.prefix_hints._TIMEOUT_S",
        "router.quotas._TIMEOUT_S",
        "router.service._STATUS_TIMEOUT_S",
    ):
        monkeypatch.setattr(limit, PATIENCE_S)
