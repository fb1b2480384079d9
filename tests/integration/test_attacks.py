"""Attacks on a locked node: they get no further than their connection, and are logged."""

from __future__ import annotations

import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from conformance import sasl_table

from millstream.broker.net import listener
from millstream.broker.security import gate
from millstream.core.errors import AuthenticationFailed, MillstreamError
from millstream.embedded import EmbeddedBroker
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import OAUTHBEARER, Credentials, client_tls
from millstream_testing.security import ALICE, Certificates, Issuer, Locked, declare_security, locked_server

WAIT_S = 60.0
METADATA = struct.pack(">ihhihi", 14, 3, 1, 1, -1, 0)


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Locked]:
    with locked_server(tmp_path_factory.mktemp("attacked")) as locked:
        yield locked


def connect(address: str) -> socket.socket:
    host, port = address.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def rest_of(connection: socket.socket) -> bytes:
    """Read until the broker disconnects."""
    response = b""
    with suppress(ConnectionError, ssl.SSLError):
        while piece := connection.recv(65536):
            response += piece
    return response


class Log:
    """The log lines of a server from now on."""

    def __init__(self, locked: Locked) -> None:
        self._file = locked.server.log
        self._at = self._file.stat().st_size

    def await_line(self, *parts: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while True:
            text = self._file.read_bytes()[self._at :].decode()
            if any(all(part in line for part in parts) for line in text.splitlines()):
                return
            assert time.monotonic() < deadline, text
            time.sleep(0.02)


# -- TLS ------------------------------------------------------------------------------------------------------------


def present(locked: Locked, certificate: tuple[Path, Path] | None) -> bytes:
    """Request metadata with only a certificate; return the response."""
    context = client_tls(
        locked.certificates.ca,
        certificate=None if certificate is None else certificate[0],
        key=None if certificate is None else certificate[1],
    )
    with connect(locked.server.kafka) as plain:
        try:
            with context.wrap_socket(plain, server_hostname="localhost") as connection:
                connection.sendall(METADATA)
                return rest_of(connection)
        except (ssl.SSLError, ConnectionError):
            return b""


def test_a_client_without_a_certificate_or_a_password_gets_nothing(locked: Locked) -> None:
    log = Log(locked)
    assert present(locked, None) == b""
    log.await_line("connection closed", "before authentication")


@pytest.mark.parametrize(
    ("times", "reason"),
    [({"begins_days": -2, "lasts_days": 1}, "expired"), ({"begins_days": 1}, "not yet valid")],
    ids=["expired", "not yet valid"],
)
def test_an_expired_or_future_certificate_is_refused(locked: Locked, times: dict[str, float], reason: str) -> None:
    log = Log(locked)
    assert present(locked, locked.certificates.sign("alice", **times)) == b""  # type: ignore[arg-type]
    log.await_line("TLS handshake failed", "the client's certificate is refused", reason)


def test_a_certificate_of_another_authority_is_refused(locked: Locked, tmp_path: Path) -> None:
    log = Log(locked)
    assert present(locked, Certificates(tmp_path).client("alice")) == b""
    log.await_line("TLS handshake failed", "the client's certificate is refused")


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
@pytest.mark.parametrize("alert", ["unknown ca", "certificate expired"])
def test_a_client_learns_that_its_certificate_is_refused(
    locked: Locked, tmp_path: Path, version: ssl.TLSVersion, alert: str
) -> None:
    """Without the alert, Java clients retry until their timeout."""
    expired = locked.certificates.sign("alice", begins_days=-2, lasts_days=1)
    certificate, key = expired if "expired" in alert else Certificates(tmp_path).client("alice")
    context = client_tls(locked.certificates.ca, certificate=certificate, key=key)
    context.minimum_version = context.maximum_version = version

    def request_metadata() -> None:
        with (
            connect(locked.server.kafka) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            # With TLS 1.3, the client has sent its first request before its certificate is refused.
            connection.sendall(METADATA)
            connection.recv(1)

    with pytest.raises(ssl.SSLError, match=f"alert {alert}"):
        request_metadata()


@pytest.mark.parametrize(
    "certificate",
    [{"hosts": ("elsewhere.example",)}, {"begins_days": -2, "lasts_days": 1}],
    ids=["another name", "expired"],
)
async def test_a_client_refuses_a_node_with_another_name(locked: Locked, certificate: Any) -> None:
    who = Credentials(tls=client_tls(locked.certificates.ca), user=ALICE[0], password=ALICE[1])
    locked.certificates.renew_node(**certificate)
    try:
        with pytest.raises(MillstreamError, match="certificate"):
            async with Client.connect(locked.server.kafka, timeout_s=10, credentials=who):
                pass
    finally:
        locked.certificates.renew_node()
    async with Client.connect(locked.server.kafka, timeout_s=WAIT_S, credentials=who) as client:
        assert await client.metadata()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3], ids=["1.2", "1.3"])
async def test_both_versions_of_tls_are_served(locked: Locked, version: ssl.TLSVersion) -> None:
    tls = client_tls(locked.certificates.ca)
    tls.minimum_version = tls.maximum_version = version
    who = Credentials(tls=tls, user=ALICE[0], password=ALICE[1])
    async with Client.connect(locked.server.kafka, timeout_s=WAIT_S, credentials=who) as client:
        assert await client.metadata()


def test_an_older_version_of_tls_is_refused(locked: Locked) -> None:
    # The hello of a client that offers TLS 1.1 at most; a current library would hardly send one.
    ciphers = struct.pack(">HHH", 4, 0xC014, 0x002F)
    groups = struct.pack(">HHHH", 10, 4, 2, 23) + struct.pack(">HHBB", 11, 2, 1, 0)
    body = b"\x03\x02" + os.urandom(32) + b"\0" + ciphers + b"\x01\0" + struct.pack(">H", len(groups)) + groups
    hello = b"\x01" + len(body).to_bytes(3, "big") + body
    log = Log(locked)
    with connect(locked.server.kafka) as connection:
        connection.sendall(b"\x16\x03\x01" + struct.pack(">H", len(hello)) + hello)
        response = rest_of(connection)
    assert response[:1] in (b"", b"\x15"), "an alert, if anything"
    log.await_line("TLS handshake failed", "no version of TLS from 1.2 on")


def test_plain_text_to_a_tls_port_is_disconnected(locked: Locked) -> None:
    log = Log(locked)
    with connect(locked.server.kafka) as connection:
        connection.sendall(METADATA)
        assert len(rest_of(connection)) < 16, "an alert, if anything"
    log.await_line("TLS handshake failed", "does not speak TLS")
    with connect(locked.server.kafka) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert len(rest_of(connection)) < 16
    log.await_line("TLS handshake failed", "HTTP")


def test_tls_to_a_plain_port_is_disconnected(locked: Locked) -> None:
    log = Log(locked)
    with connect(locked.clear) as plain, pytest.raises((ssl.SSLError, ConnectionError)):
        client_tls(locked.certificates.ca).wrap_socket(plain, server_hostname="localhost")
    log.await_line("connection closed", "the client speaks TLS, but this listener does not")


def test_a_request_sent_with_the_end_of_the_handshake_gets_a_response(locked: Locked) -> None:
    context = client_tls(locked.certificates.ca)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    versions = struct.pack(">ihhih", 10, 18, 0, 7, -1)
    with connect(locked.server.kafka) as connection:
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                connection.sendall(outgoing.read())
                incoming.write(connection.recv(65536))
        tls.write(versions)
        connection.sendall(outgoing.read())
        response = b""
        while len(response) < 8:
            with suppress(ssl.SSLWantReadError):
                response += tls.read(65536)
                continue
            incoming.write(connection.recv(65536))
    assert response[4:8] == struct.pack(">i", 7)


# -- before authentication ------------------------------------------------------------------------------------------


def test_slow_unauthenticated_clients_are_disconnected_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No client keeps its connection beyond the deadline, however it spends the time."""
    # Long enough for a TLS handshake on a busy machine.
    for module, name in ((gate, "DEADLINE_S"), (listener, "HANDSHAKE_S"), (listener, "SWEEP_S")):
        monkeypatch.setattr(module, name, 1.5)
    certificates = Certificates(tmp_path / "certs")
    tls = {"tls-cert": str(certificates.node), "tls-key": str(certificates.node_key)}
    nodes = []
    for name, more in (("clear", {}), ("tls", tls)):
        declare_security(tmp_path / name, dict((ALICE,)))
        settings = {"auth": "required", **more}
        nodes.append(EmbeddedBroker(tmp_path / name, kafka="127.0.0.1:0", http="", settings=settings))
        nodes[-1].start_and_wait()
    beginnings = (b"", b"\0\0", METADATA[:9], struct.pack(">i", 60_000))
    connections = [(connect(node.kafka_address), sent) for node in nodes for sent in beginnings]
    context = client_tls(certificates.ca)
    shaken = context.wrap_socket(connect(nodes[1].kafka_address), server_hostname="localhost")
    connections.append((shaken, METADATA[:9]))
    stop = threading.Event()

    def send_byte_by_byte(connection: socket.socket) -> None:
        # One byte of a frame at a time, which is progress of a kind.
        with suppress(OSError):
            while not stop.wait(0.05):
                connection.sendall(b"\0")

    threads = [threading.Thread(target=send_byte_by_byte, args=(connections[3][0],))]
    try:
        for connection, sent in connections:
            # A closed connection needs no more.
            with suppress(OSError):
                connection.sendall(sent)
        for thread in threads:
            thread.start()
        for connection, _ in connections:
            assert len(rest_of(connection)) < 16, "an alert, if anything"
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for connection, _ in connections:
            connection.close()
        for node in nodes:
            node.stop_and_wait()


def test_handshakes_in_the_wrong_order_end_as_in_kafka(tmp_path: Path) -> None:
    with sasl_table.locked_millstream(tmp_path) as addresses:
        responses = sasl_table.ask_all(addresses)
    table, recorded = sasl_table.RECORDED, sasl_table.RECORDED.recorded()
    differing = table.differences(recorded, responses)
    assert not differing, "\n".join(differing)
    assert all(responses[name] != recorded[name] for name in table.accepted)


# -- tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "token",
    [
        lambda issuer: "eyJhbGciOiJub25lIn0." + issuer.token("alice").split(".")[1] + ".",
        lambda issuer: issuer.token("alice", exp=int(time.time()) - 3600),
    ],
    ids=["unsigned", "expired"],
)
async def test_an_invalid_token_is_refused(locked: Locked, token: Callable[[Issuer], str]) -> None:
    tls = client_tls(locked.certificates.ca)
    who = Credentials(tls=tls, token=lambda: token(locked.issuer), mechanism=OAUTHBEARER)
    with pytest.raises(AuthenticationFailed):
        async with Client.connect(locked.server.kafka, timeout_s=WAIT_S, credentials=who):
            pass


# -- certificates change --------------------------------------------------------------------------------------------


def test_rotating_certificates_continuously_drops_no_connection(locked: Locked) -> None:
    """A client continues on its connection while others connect with each certificate."""
    acknowledged: list[Any] = []
    errors: list[Any] = []
    producer = Producer(
        {
            "bootstrap.servers": locked.server.kafka,
            "log_level": 0,
            "security.protocol": "SASL_SSL",
            "ssl.ca.location": str(locked.certificates.ca),
            "sasl.mechanism": "SCRAM-SHA-512",
            "sasl.username": ALICE[0],
            "sasl.password": ALICE[1],
            "linger.ms": 0,
            "error_cb": errors.append,
        }
    )
    serials = set()
    sent = 0
    context = client_tls(locked.certificates.ca)
    for _ in range(10):
        locked.certificates.renew_node()
        with connect(locked.server.kafka) as plain, context.wrap_socket(plain, server_hostname="localhost") as shown:
            certificate: Any = shown.getpeercert()
            serials.add(certificate["serialNumber"])
        for _ in range(20):
            sent += 1
            producer.produce(
                "alice-rotation", b"x", on_delivery=lambda error, _: (errors if error else acknowledged).append(error)
            )
        producer.poll(0.01)
    assert producer.flush(WAIT_S) == 0
    assert not errors
    assert len(acknowledged) == sent
    assert len(serials) == 10, "each certificate is used as soon as it is there"
