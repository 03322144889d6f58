"""Ports that are free, and none else."""

import socket

import pytest

from bench.ports import BELOW_CLIENTS, free_ports


def test_ports_are_different_and_can_be_listened_on():
    ports = free_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        assert port in BELOW_CLIENTS
        socket.create_server(("127.0.0.1", port)).close()


def test_a_port_that_is_taken_is_not_given():
    (port,) = free_ports(1)
    with (
        socket.create_server(("127.0.0.1", port)),
        pytest.raises(RuntimeError, match="fewer than 1 ports are free"),
    ):
        free_ports(1, range(port, port + 1))
