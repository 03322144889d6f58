"""Host and port as one text."""

from __future__ import annotations

import pytest

from core.address import join_host_port, port_of, split_host_port


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("10.0.0.7", "10.0.0.7:50052"),
        ("fd00::7", "[fd00::7]:50052"),
        ("::", "[::]:50052"),
        ("decode-0.decode", "decode-0.decode:50052"),
    ],
)
def test_only_ipv6_addresses_stand_in_brackets(host: str, address: str) -> None:
    assert join_host_port(host, 50052) == address
    assert port_of(address) == 50052
    assert split_host_port(address) == (host, 50052)
