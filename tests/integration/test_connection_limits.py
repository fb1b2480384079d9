"""Connections are limited by address and by principal, before and after authentication."""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from millstream.broker.net import listener
from millstream.embedded import EmbeddedBroker
from millstream_testing.security import Certificates, declare_security
from millstream_testing.waiting import wait_until

WAIT_S: Final = 60.0
UNKNOWN_MAX: Final = 4
PER_PRINCIPAL: Final = 3
PER_ADDRESS: Final = 8


class Limited(NamedTuple):
    address: str
    tls: ssl.SSLContext | None


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certs"))


@pytest.fixture
def limited(request: pytest.FixtureRequest, certificates: Certificates, tmp_path: Path) -> Iterator[Limited]:
    """A broker with low limits, with TLS if the parameter says so.

    It is new: one that was connected to counts each connection until it notices that it was closed.
    """
    is_encrypted = request.param == "encrypted"
    limits = {"connections-per-principal-max": PER_PRINCIPAL, "connections-per-address-max": PER_ADDRESS}
    tls = {"tls-cert": str(certificates.node), "tls-key": str(certificates.node_key)} if is_encrypted else {}
    context = ssl.create_default_context(cafile=str(certificates.ca)) if is_encrypted else None
    declare_security(tmp_path / "data", {"alice": "alice-password", "bob": "bob-password"})
    broker = EmbeddedBroker(tmp_path / "data", settings={"auth": "required", **limits, **tls})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listener, "UNKNOWN_PER_ADDRESS_MAX", UNKNOWN_MAX)
        broker.start_and_wait()
        try:
            yield Limited(broker.kafka_address, context)
        finally:
            broker.stop_and_wait()


both_kinds = pytest.mark.parametrize("limited", ["encrypted", "clear"], indirect=True)


def connect(limited: Limited) -> socket.socket:
    """Connect, without the TLS handshake."""
    host, port = limited.address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def is_closed(connection: socket.socket) -> bool:
    """Whether the broker closes an idle connection; it sends nothing otherwise."""
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
    """Authenticate with PLAIN; return False if the broker refuses."""
    try:
        connection.sendall(frame(struct.pack(">hhih", 17, 0, 1, -1) + b"\0\x05PLAIN"))
        (size,) = struct.unpack(">i", connection.recv(4))
        connection.recv(size)
        connection.sendall(frame(f"\0{user}\0{password or user + '-password'}".encode()))
        return connection.recv(4) == b"\0\0\0\0"
    except (ConnectionError, struct.error):
        return False


def admitted(limited: Limited, user: str, stack: ExitStack) -> bool:
    """Connect and authenticate, and keep the connection if that succeeds."""
    connection = connect(limited)
    try:
        if limited.tls is not None:
            connection = limited.tls.wrap_socket(connection, server_hostname="localhost")
        is_admitted = sign_in(connection, user)
    except OSError:
        is_admitted = False
    if is_admitted:
        stack.enter_context(connection)
    else:
        connection.close()
    return is_admitted


def until_admitted(limited: Limited, user: str, stack: ExitStack) -> None:
    """Connect and authenticate once the broker has noticed which connections are gone."""
    wait_until(lambda: admitted(limited, user, stack))


@both_kinds
def test_unauthenticated_connections_per_address_are_limited(limited: Limited) -> None:
    with ExitStack() as stack:
        # With TLS these are in the middle of a handshake, which counts.
        silent = [stack.enter_context(connect(limited)) for _ in range(UNKNOWN_MAX)]
        wait_until(lambda: is_closed(stack.enter_context(connect(limited))))
        assert not any(is_closed(connection) for connection in silent)
    with ExitStack() as stack:
        until_admitted(limited, "alice", stack)


@both_kinds
def test_an_authenticated_client_is_counted_once(limited: Limited) -> None:
    # More than may be unauthenticated; counted twice they would exceed the limit per address.
    users = ("alice", "bob") * PER_PRINCIPAL
    assert len(users) > UNKNOWN_MAX
    assert 2 * len(users) > PER_ADDRESS
    with ExitStack() as stack:
        assert all(admitted(limited, user, stack) for user in users)
    with ExitStack() as stack:
        for user in users:
            until_admitted(limited, user, stack)


@pytest.mark.parametrize("limited", ["clear"], indirect=True)
def test_connections_per_principal_are_limited(limited: Limited) -> None:
    with ExitStack() as stack:
        for _ in range(PER_PRINCIPAL):
            assert admitted(limited, "alice", stack)
        assert not admitted(limited, "alice", stack)
        assert admitted(limited, "bob", stack)
    with ExitStack() as stack:
        until_admitted(limited, "alice", stack)


@pytest.mark.parametrize("limited", ["clear"], indirect=True)
def test_connections_per_address_are_limited(limited: Limited) -> None:
    with ExitStack() as stack:
        users = ("alice", "bob") * PER_PRINCIPAL
        assert all(admitted(limited, user, stack) for user in users)
        # The rest up to the limit may connect, but no more.
        others = [stack.enter_context(connect(limited)) for _ in range(PER_ADDRESS)]
        wait_until(lambda: len(users) + sum(not is_closed(other) for other in others) <= PER_ADDRESS)
