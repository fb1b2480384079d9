"""What a locked server needs in tests: certificates, users, signed tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from joserfc import jwt
from joserfc.jwk import RSAKey

from millstream.broker.catalog.catalog import Catalog
from millstream.cli import certs
from millstream.core.acl import Acl
from millstream.core.credential import SecurityChange, new_credentials

ISSUER: Final = "https://issuer.example"
AUDIENCE: Final = "millstream"


class Certificates:
    """An authority in a folder, with a node's certificate."""

    def __init__(self, folder: Path, *, hosts: list[str] | None = None) -> None:
        self.folder = folder
        certs.init(folder, hosts or ["localhost", "127.0.0.1"], as_json=True)
        self.ca = folder / "ca.pem"
        self.node = folder / "node.pem"
        self.node_key = folder / "node.key"

    def client(self, name: str) -> tuple[Path, Path]:
        """A client's certificate and its key."""
        certs.client(name, self.folder, as_json=True)
        return self.folder / f"{name}.pem", self.folder / f"{name}.key"

    def renew_node(self) -> None:
        """Replace the node's certificate by another one of the same authority."""
        self.node.unlink()
        self.node_key.unlink()
        certs.init(self.folder, ["localhost", "127.0.0.1"], as_json=True)


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

    def token(self, subject: str, *, lasts_s: float = 300.0, **claims: Any) -> str:
        """A token as clients send it; claims that are None are left out."""
        now = int(time.time())
        all_claims: Mapping[str, Any] = {
            "iss": ISSUER,
            "aud": AUDIENCE,
            "sub": subject,
            "iat": now,
            "exp": now + lasts_s,
            **claims,
        }
        given = {name: value for name, value in all_claims.items() if value is not None}
        return jwt.encode({"alg": "RS256", "kid": self.key.kid}, given, self.key)


def declare_security(data: Path, passwords: Mapping[str, str], acls: frozenset[Acl] = frozenset()) -> None:
    """Put users and access rules into the catalog of a node that does not run."""
    data.mkdir(parents=True, exist_ok=True)
    catalog = Catalog.open_folder(data)
    try:
        credentials = tuple(one for user, word in passwords.items() for one in new_credentials(user, word))
        catalog.change_security(SecurityChange(put_credentials=credentials, add_acls=acls))
    finally:
        catalog.close()
