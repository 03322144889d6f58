"""Host and port as one text, with IPv6 addresses in brackets (RFC 3986, section 3.2.2)."""

from __future__ import annotations

import ipaddress


def is_ipv6(host: str) -> bool:
    """Whether `host` is an IPv6 address, rather than an IPv4 one or a name."""
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def join_host_port(host: str, port: int) -> str:
    """`host:port`, or `[host]:port` for an IPv6 address."""
    return f"[{host}]:{port}" if is_ipv6(host) else f"{host}:{port}"


def split_host_port(address: str) -> tuple[str, int]:
    """Host, without brackets, and port of what `join_host_port` returned."""
    host, _, port = address.rpartition(":")
    return host.removeprefix("[").removesuffix("]"), int(port)


def port_of(address: str) -> int:
    """The port of what `join_host_port` returned."""
    return split_host_port(address)[1]
