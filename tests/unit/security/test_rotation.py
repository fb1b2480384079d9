"""Certificates, authorities and token keys are rotated while a node runs."""

from __future__ import annotations

import inspect
import json
import logging
import shutil
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cryptography import x509
from joserfc.jwk import RSAKey

from millstream.broker.security import oauth
from millstream.broker.security.oauth import OAuthSettings, TokenChecker
from millstream.broker.security.tls import ReloadingTls, TlsFiles
from millstream.core.errors import AuthenticationFailed
from millstream.protocol.wire.credentials import client_tls
from millstream_testing.security import AUDIENCE, ISSUER, Certificates, Issuer


def connect(
    server: ReloadingTls, client: ssl.SSLContext, session: ssl.SSLSession | None = None
) -> tuple[ssl.SSLObject, ssl.SSLObject]:
    """Connect in memory; return the client's end and the server's."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    here = server.context.wrap_bio(to_server, to_client, server_side=True)
    there = client.wrap_bio(to_client, to_server, server_hostname="localhost", session=session)
    is_done = {here: False, there: False}
    for _ in range(10):
        for side in (there, here):
            if not is_done[side]:
                try:
                    side.do_handshake()
                    is_done[side] = True
                except ssl.SSLWantReadError:
                    continue
    assert all(is_done.values())
    return there, here


def shake_hands(server: ReloadingTls, client: ssl.SSLContext) -> tuple[bytes | None, bytes | None]:
    """Connect in memory; return the certificates that the server and the client presented."""
    there, here = connect(server, client)
    return there.getpeercert(binary_form=True), here.getpeercert(binary_form=True)


def files_of(certificates: Certificates, client_ca: Path) -> TlsFiles:
    return TlsFiles(certificate=str(certificates.node), key=str(certificates.node_key), client_ca=str(client_ca))


def with_certificate(trusted: Certificates, own: Certificates, name: str) -> ssl.SSLContext:
    certificate, key = own.client(name)
    return client_tls(trusted.ca, certificate=certificate, key=key)


def test_a_replaced_certificate_is_presented_from_the_next_connection_on(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certs")
    followed = ReloadingTls(files_of(certificates, certificates.ca))
    client = client_tls(certificates.ca)
    before, _ = shake_hands(followed, client)
    certificates.renew_node()
    after, _ = shake_hands(followed, client)
    assert after != before
    assert after == ssl.PEM_cert_to_DER_cert(certificates.node.read_text())
    # A missing or invalid file leaves the last certificate in use.
    certificates.node_key.write_text("nonsense")
    assert shake_hands(followed, client)[0] == after


def test_tls_records_are_read_without_python_overhead_per_call(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certs")
    followed = ReloadingTls(files_of(certificates, certificates.ca))
    connection = followed.context.wrap_bio(ssl.MemoryBIO(), ssl.MemoryBIO(), server_side=True)
    assert all(inspect.isbuiltin(method) for method in (connection.read, connection.write, connection.pending))


def test_clients_of_another_authority_are_accepted_once_its_file_exists(tmp_path: Path) -> None:
    node, first, second = (Certificates(tmp_path / name) for name in ("node", "first", "second"))
    client_ca = tmp_path / "clients.pem"
    shutil.copy(first.ca, client_ca)
    followed = ReloadingTls(files_of(node, client_ca))
    alice, bob = with_certificate(node, first, "alice"), with_certificate(node, second, "bob")

    def shown(client: ssl.SSLContext) -> str:
        encoded = shake_hands(followed, client)[1]
        assert encoded is not None
        return x509.load_der_x509_certificate(encoded).subject.rfc4514_string()

    assert shown(alice) == "CN=alice"
    with pytest.raises(ssl.SSLError):
        shake_hands(followed, bob)
    client_ca.write_bytes(first.ca.read_bytes() + second.ca.read_bytes())
    assert (shown(alice), shown(bob)) == ("CN=alice", "CN=bob")
    shutil.copy(second.ca, client_ca)
    assert shown(bob) == "CN=bob"
    with pytest.raises(ssl.SSLError):
        shake_hands(followed, alice)


def test_a_certificate_of_a_withdrawn_authority_resumes_no_session(tmp_path: Path) -> None:
    node, first, second = (Certificates(tmp_path / name) for name in ("node", "first", "second"))
    client_ca = tmp_path / "clients.pem"
    shutil.copy(first.ca, client_ca)
    followed = ReloadingTls(files_of(node, client_ca))
    alice = with_certificate(node, first, "alice")
    alice.maximum_version = ssl.TLSVersion.TLSv1_2
    # Both stay open: OpenSSL forgets the session of a connection that is dropped.
    began = connect(followed, alice)
    session = began[0].session
    resumed = connect(followed, alice, session)
    assert resumed[0].session_reused
    shutil.copy(second.ca, client_ca)
    with pytest.raises(ssl.SSLError):
        connect(followed, alice, session)


def test_a_key_readable_by_others_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    certificates = Certificates(tmp_path / "certs")
    with caplog.at_level(logging.WARNING):
        ReloadingTls(files_of(certificates, certificates.ca))
        assert not caplog.records
        certificates.node_key.chmod(0o644)
        ReloadingTls(files_of(certificates, certificates.ca))
    assert "0644" in caplog.text
    assert str(certificates.node_key) in caplog.text


class Published:
    """The keys of an issuer at an https address."""

    def __init__(self, certificates: Certificates) -> None:
        self.keys: list[RSAKey] = []
        published = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                document = {"keys": [key.as_dict(private=False) for key in published.keys]}
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(document).encode())

            def log_message(self, format: str, *args: object) -> None:
                return

        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificates.node, certificates.node_key)
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"https://localhost:{self.server.server_port}/jwks"


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Published]:
    certificates = Certificates(tmp_path / "certs")
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates.ca))
    made = Published(certificates)
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    made.server.server_close()
    thread.join()


async def test_keys_of_a_url_rotate_without_a_restart(
    published: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oauth, "REFRESH_S_MIN", 0.0)
    issuer = Issuer(tmp_path / "unused")
    published.keys = [issuer.key]
    tokens = TokenChecker(OAuthSettings(jwks=published.url, issuer=ISSUER, audience=AUDIENCE))
    old = issuer.token("alice")
    assert (await tokens.check(old)).principal == "User:oauth:alice"
    # The issuer signs with another key: the token itself makes the node look for it.
    issuer.key = RSAKey.generate_key(2048, {"kid": "two"})
    published.keys = [issuer.key]
    assert (await tokens.check(issuer.token("bob"))).principal == "User:oauth:bob"
    with pytest.raises(AuthenticationFailed):
        await tokens.check(old)
    # An endless key set is not read to its end; as while the issuer is unavailable, the last keys stay in use.
    monkeypatch.setattr(oauth, "KEYS_BYTES_MAX", 100)
    published.keys = [RSAKey.generate_key(2048, {"kid": "three"})]
    with pytest.raises(AuthenticationFailed, match="not known"):
        await tokens.check(old)
    assert (await tokens.check(issuer.token("bob"))).principal == "User:oauth:bob"
    published.server.shutdown()
    published.server.server_close()
    assert (await tokens.check(issuer.token("bob"))).principal == "User:oauth:bob"
