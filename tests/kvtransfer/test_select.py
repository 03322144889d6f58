"""Which transport a worker gets, by name and by itself."""

from __future__ import annotations

import logging

import pytest

from core.errors import StartupError
from kvtransfer import nixl_library, ucxx_library
from kvtransfer.base import Transport
from kvtransfer.local_peer import LOOPBACK, HostPool
from kvtransfer.select import make_transport
from tests.kvtransfer.readers import needs_nixl, needs_ucxx

NOWHERE = "no_such_module"


def make(name: str) -> Transport:
    return make_transport(name, "r@1", HostPool(1, 64).region, LOOPBACK)


@pytest.fixture
def without_nixl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_library, "NIXL_MODULES", ())


@pytest.fixture
def without_ucxx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucxx_library, "UCXX_MODULE", NOWHERE)


@needs_nixl
def test_auto_takes_nixl_first(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert make("auto").name == "nixl"
    assert caplog.messages == ["kv_transport chosen=nixl reason=first choice"]


@needs_ucxx
@pytest.mark.usefixtures("without_nixl")
def test_auto_takes_ucxx_where_nixl_is_not_installed() -> None:
    assert make("auto").name == "ucxx"


@pytest.mark.usefixtures("without_nixl", "without_ucxx")
def test_auto_takes_tcp_where_nothing_is_installed_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    assert make("auto").name == "tcp"
    assert "nixl and ucxx not installed" in caplog.text


def test_a_named_transport_is_taken_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert make("tcp").name == "tcp"
    assert caplog.records == []


def test_an_unknown_transport_does_not_start() -> None:
    with pytest.raises(StartupError, match="'rdma' is not one of auto, nixl, ucxx, tcp"):
        make("rdma")


@pytest.mark.usefixtures("without_nixl")
def test_nixl_without_its_wheel_says_what_to_install() -> None:
    with pytest.raises(StartupError, match="neither nixl-cu12 nor nixl-cu13 is installed"):
        make("nixl")


@pytest.mark.usefixtures("without_ucxx")
def test_ucxx_without_its_wheel_says_what_to_install() -> None:
    with pytest.raises(StartupError, match="neither ucxx-cu13 nor ucxx-cu12 is installed"):
        make("ucxx")
