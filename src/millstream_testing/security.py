"""Certificates, users and signed tokens for tests of a locked server."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from joserfc import jwt
from joserfc.jwk import RSAKey

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.security.assertion import Assertions
from millstream.broker.security.gate import AuthenticationContext
from millstream.broker.security.sasl import Authenticator, FailedAttempts, Passwords
from millstream.broker.security.state import SecurityState
from millstream.broker.security.tls import PrincipalRules
from millstream.cli import certs
from millstream.cli.local_process import ReservedPort
from millstream.core.acl import Acl, Operation, PatternType, ResourceType
from millstream.core.credential import SecurityChange, new_credentials
from millstream.core.ids import NodeId
from millstream_testing.server import Server

ISSUER: Final = "https://issuer.example"
AUDIENCE: Final = "millstream"


def owner_rules(user: str, prefix: str, *, transactions: str = "pipeline/") -> list[Acl]:
    """Return the rules for a pipeline owner: its topics, groups and transactions, and declaring pipelines."""
    prefixed = (
        (ResourceType.TOPIC, prefix),
        (ResourceType.GROUP, f"pipeline-{prefix}"),
        (ResourceType.TRANSACTIONAL_ID, transactions),
        (ResourceType.TRANSACTIONAL_ID, f"spark/{transactions}"),
    )
    found = [
        Acl(
            resource_type=kind,
            resource_name=text,
            pattern=PatternType.PREFIXED,
            principal=f"User:{user}",
            operation=Operation.ALL,
        )
        for kind, text in prefixed
    ]
    alter = Acl(
        resource_type=ResourceType.CLUSTER,
        resource_name="kafka-cluster",
        principal=f"User:{user}",
        operation=Operation.ALTER,
    )
    return [*found, alter]


@asynccontextmanager
async def authenticating(folder: Path, user: str, password: str) -> AsyncIterator[AuthenticationContext]:
    """What a node authenticates clients with, which knows one user."""
    catalog = Catalog.open_folder(folder)
    state = SecurityState(CatalogDeclarations(catalog), ())
    await state.change_users(new_credentials(user, password))
    passwords = Passwords(state)
    yield AuthenticationContext(
        state=state,
        authenticator=Authenticator(passwords, None),
        attempts=FailedAttempts(),
        rules=PrincipalRules("DEFAULT"),
        cluster="c",
        node_id=NodeId(1),
        node_secret=b"",
        assertions=Assertions(state, "c", NodeId(1), Ed25519PrivateKey.generate()),
    )
    passwords.close()
    catalog.close()


class Certificates:
    """An authority in a folder, with a node's certificate."""

    def __init__(self, folder: Path, *, hosts: list[str] | None = None) -> None:
        self.folder = folder
        certs.make_node_certificate(folder, hosts or ["localhost", "127.0.0.1"], "millstream", NodeId(1))
        self.ca = folder / "ca.pem"
        self.node = folder / "node.pem"
        self.node_key = folder / "node.key"

    def client(self, name: str) -> tuple[Path, Path]:
        """Return a client's certificate and its key."""
        certs.client(name, self.folder, as_json=True)
        return self.folder / f"{name}.pem", self.folder / f"{name}.key"

    def renew_node(self, **more: Any) -> None:
        """Replace the node's certificate with another one of the same authority, as a renewal does."""
        certificate, key = self.sign("node 1", **{"hosts": ("localhost", "127.0.0.1"), **more})
        certificate.replace(self.node)
        key.replace(self.node_key)

    def sign(
        self, name: str, *, hosts: Sequence[str] = (), uri: str = "", begins_days: float = -1, lasts_days: float = 2
    ) -> tuple[Path, Path]:
        """Create a certificate with its key and validity; it replaces an earlier one of that name."""
        authority = x509.load_pem_x509_certificate(self.ca.read_bytes())
        signing = serialization.load_pem_private_key((self.folder / "ca.key").read_bytes(), None)
        if not isinstance(signing, ec.EllipticCurvePrivateKey):
            raise TypeError("the authority is not one that `millstream certs init` made")
        key = ec.generate_private_key(ec.SECP256R1())
        begins = datetime.now(UTC) + timedelta(days=begins_days)
        names = [certs.host_name(host) for host in hosts]
        names += [x509.UniformResourceIdentifier(uri)] if uri else []
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
            .issuer_name(authority.subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(begins)
            .not_valid_after(begins + timedelta(days=lasts_days))
        )
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False) if names else builder
        files = self.folder / f"{name}.signed.pem", self.folder / f"{name}.signed.key"
        files[0].write_bytes(builder.sign(signing, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
        files[1].write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        return files


class Issuer:
    """Signs tokens, and publishes its keys in a file."""

    def __init__(self, jwks: Path) -> None:
        self.key = RSAKey.generate_key(2048, {"kid": "one"})
        self.jwks = jwks
        self.publish(self.key)

    def publish(self, *keys: RSAKey) -> None:
        """Write the public keys."""
        document = {"keys": [key.as_dict(private=False) for key in keys]}
        self.jwks.write_text(json.dumps(document), encoding="utf-8")

    def token(self, subject: str, *, lifetime_s: float = 300.0, **claims: Any) -> str:
        """Return a token as clients send it; claims that are None are left out."""
        now = int(time.time())
        all_claims: Mapping[str, Any] = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": subject,
            "iat": now,
            "exp": now + lifetime_s,
            **claims,
        }
        given = {name: value for name, value in all_claims.items() if value is not None}
        return jwt.encode({"alg": "RS256", "kid": self.key.kid}, given, self.key)


def declare_security(data: Path, passwords: Mapping[str, str], acls: frozenset[Acl] = frozenset()) -> None:
    """Store users and access rules in the catalog of a stopped node."""
    data.mkdir(parents=True, exist_ok=True)
    catalog = Catalog.open_folder(data)
    try:
        credentials = tuple(
            credential for user, word in passwords.items() for credential in new_credentials(user, word)
        )
        catalog.change_security(SecurityChange(put_credentials=credentials, add_acls=acls))
    finally:
        catalog.close()


class Locked(NamedTuple):
    """A server with TLS and authentication."""

    server: Server
    certificates: Certificates
    issuer: Issuer
    clear: str
    """The address of another listener, without TLS."""


ADMIN, ALICE, MALLORY = ("admin", "admin-password"), ("alice", "alice-password"), ("mallory", "mallory-password")


@contextmanager
def locked_server(folder: Path, **settings: Any) -> Iterator[Locked]:
    """Run a locked server; alice may use topics and groups with her prefix, however she authenticates."""
    certificates, issuer = Certificates(folder / "certs"), Issuer(folder / "jwks.json")
    rules = frozenset(
        Acl(
            resource_type=kind,
            resource_name="alice",
            pattern=PatternType.PREFIXED,
            principal=principal,
            operation=Operation.ALL,
        )
        for kind in (ResourceType.TOPIC, ResourceType.GROUP)
        for principal in ("User:alice", "User:CN=alice", "User:oauth:alice")
    )
    declare_security(folder / "data", dict((ADMIN, ALICE, MALLORY)), rules)
    clear = ReservedPort()
    (folder / "node.toml").write_text(
        f'[[listeners]]\nname = "clear"\naddress = "{clear.address}"\nauth = "required"\n', encoding="utf-8"
    )
    all_settings = {
        "config": folder / "node.toml",
        "auth": "required",
        "tls-cert": certificates.node,
        "tls-key": certificates.node_key,
        "tls-client-ca": certificates.ca,
        "super-users": "admin",
        "oauth-jwks": issuer.jwks,
        "oauth-issuer": ISSUER,
        "oauth-audience": AUDIENCE,
        **{name.replace("_", "-"): value for name, value in settings.items()},
    }
    with Server(folder / "data", settings=all_settings) as server:
        yield Locked(server, certificates, issuer, clear.address)
