"""Ports that are reserved for servers."""

from __future__ import annotations

import gc
import socket

import pytest

from millstream.cli.local_process import ReservedPort, is_free


def listen_on(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def test_only_the_given_port_is_listened_on_every_time() -> None:
    held = ReservedPort()
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", held.number), timeout=60).close()
        with listen_on(held.number) as server:
            socket.create_connection(server.getsockname(), timeout=60).close()
            assert not is_free("127.0.0.1", held.number)


def test_a_reserved_port_is_not_given_to_another_process() -> None:
    held = ReservedPort()
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", held.number))
    assert ReservedPort().address != held.address


def test_a_released_port_is_free() -> None:
    held = ReservedPort()
    number = held.number
    del held
    gc.collect()
    with socket.socket() as other:
        other.bind(("127.0.0.1", number))
