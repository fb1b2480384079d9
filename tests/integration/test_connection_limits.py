"""Connections are limited by address and by principal, before and after authentication."""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from millstream.broker.net import listener
from millstream.embedded import EmbeddedBroker
from millstream_testing.security import Certificates, declare_security

WAIT_S: Final = 60.0
UNKNOWN_MAX: Final = 4
PER_PRINCIPAL: Final = 3
PER_ADDRESS: Final = 8


class Limited(NamedTuple):
    encrypted: str
    clear: str
    ca: Path


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    """A broker with TLS and one without."""
    folder = tmp_path_factory.mktemp("limited")
    certificates = Certificates(folder / "certs")
    limits = {"connections-per-principal-max": PER_PRINCIPAL, "connections-per-address-max": PER_ADDRESS}
    tls = {"tls-cert": str(certificates.node), "tls-key": str(certificates.node_key)}
    before = listener.UNKNOWN_PER_ADDRESS_MAX
    listener.UNKNOWN_PER_ADDRESS_MAX = UNKNOWN_MAX
    with ExitStack() as stack:
        stack.callback(setattr, listener, "UNKNOWN_PER_ADDRESS_MAX", before)
        addresses = []
        for name, more in (("encrypted", tls), ("clear", {})):
            declare_security(folder / name, {"alice": "alice-password", "bob": "bob-password"})
            broker = EmbeddedBroker(folder / name, settings={"auth": "required", **limits, **more})
            broker.start_and_wait()
            stack.callback(broker.stop_and_wait)
            addresses.append(broker.kafka_address)
        yield Limited(addresses[0], addresses[1], certificates.ca)


def connect(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def is_closed(connection: socket.socket) -> bool:
    """Whether the broker closes a connection on which nothing is asked; it has nothing to say otherwise."""
    connection.settimeout(0.5)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def frame(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


def sign_in(connection: socket.socket, user: str, password: str = "") -> bool:
    """Authenticate by PLAIN; False if the broker refuses."""
    try:
        connection.sendall(frame(struct.pack(">hhih", 17, 0, 1, -1) + b"\0\x05PLAIN"))
        (size,) = struct.unpack(">i", connection.recv(4))
        connection.recv(size)
        connection.sendall(frame(f"\0{user}\0{password or user + '-password'}".encode()))
        return connection.recv(4) == b"\0\0\0\0"
    except (ConnectionError, struct.error):
        return False


def admitted(address: str, user: str, stack: ExitStack) -> bool:
    """Connect and authenticate, and keep the connection if that succeeds."""
    connection = stack.enter_context(connect(address))
    if sign_in(connection, user):
        return True
    connection.close()
    return False


def until_admitted(address: str, user: str) -> None:
    """Wait until the broker has noticed which connections are gone."""
    deadline = time.monotonic() + WAIT_S
    while True:
        with ExitStack() as stack:
            if admitted(address, user, stack):
                return
        assert time.monotonic() < deadline


@pytest.mark.parametrize("kind", ["encrypted", "clear"])
def test_an_address_has_few_connections_that_have_not_authenticated(limited: Limited, kind: str) -> None:
    address = getattr(limited, kind)
    with ExitStack() as stack:
        # With TLS these are in the middle of a handshake, which counts.
        silent = [stack.enter_context(connect(address)) for _ in range(UNKNOWN_MAX)]
        deadline = time.monotonic() + WAIT_S
        while not is_closed(stack.enter_context(connect(address))):
            assert time.monotonic() < deadline
        assert not any(is_closed(one) for one in silent)
    until_admitted(limited.clear, "alice")


def test_a_handshake_that_is_over_does_not_count_twice(limited: Limited) -> None:
    context = ssl.create_default_context(cafile=str(limited.ca))
    for _ in range(2 * UNKNOWN_MAX):
        with context.wrap_socket(connect(limited.encrypted), server_hostname="localhost") as connection:
            assert sign_in(connection, "bob")


def test_a_principal_has_only_so_many_connections(limited: Limited) -> None:
    until_admitted(limited.clear, "alice")
    with ExitStack() as stack:
        for _ in range(PER_PRINCIPAL):
            until = time.monotonic() + WAIT_S
            while not admitted(limited.clear, "alice", stack):
                assert time.monotonic() < until
        assert not admitted(limited.clear, "alice", stack)
        assert admitted(limited.clear, "bob", stack)
    until_admitted(limited.clear, "alice")


def test_an_address_has_only_so_many_connections(limited: Limited) -> None:
    with ExitStack() as stack:
        count = sum(admitted(limited.clear, user, stack) for user in ("alice", "bob") * PER_PRINCIPAL)
        assert count <= 2 * PER_PRINCIPAL
        # The rest up to the limit may be connected, but not more.
        others = [stack.enter_context(connect(limited.clear)) for _ in range(PER_ADDRESS)]
        deadline = time.monotonic() + WAIT_S
        while count + sum(not is_closed(one) for one in others) > PER_ADDRESS:
            assert time.monotonic() < deadline
