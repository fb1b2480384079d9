"""The addresses of etcd and the credentials for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import grpc

_SCHEMES = ("http", "https")


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAddress:
    """The members of an etcd cluster, and how to authenticate."""

    endpoints: tuple[str, ...]
    """`host:port` of each member."""
    encrypted: bool = False
    user: str | None = None
    password: str = ""
    ca: str = ""
    """File with the authority that signed etcd's certificate; without it, those that the machine trusts."""
    certificate: str = ""
    """File with this node's certificate, if etcd requires one; `key` has its private key."""
    key: str = ""

    @classmethod
    def parse(cls, urls: str, *, ca: str = "", certificate: str = "", key: str = "") -> EtcdAddress:
        """Parse URLs separated by commas; a user and password may be in the first."""
        parts = [urlsplit(text.strip()) for text in urls.split(",") if text.strip()]
        if not parts or any(part.scheme not in _SCHEMES or not part.hostname for part in parts):
            raise ValueError(f"etcd's addresses look like http://host:2379,http://other:2379, not {urls!r}")
        if len({part.scheme for part in parts}) > 1:
            raise ValueError(f"either all of etcd's addresses are https or none, not {urls!r}")
        return cls(
            endpoints=tuple(part.netloc.rpartition("@")[2] for part in parts),
            encrypted=parts[0].scheme == "https",
            user=unquote(parts[0].username) if parts[0].username else None,
            password=unquote(parts[0].password or ""),
            ca=ca,
            certificate=certificate,
            key=key,
        )

    def credentials(self) -> Any:
        """Return gRPC's credentials for an encrypted channel; None for a plain one."""
        if not self.encrypted:
            return None
        contents = (Path(name).read_bytes() if name else None for name in (self.ca, self.key, self.certificate))
        return grpc.ssl_channel_credentials(*contents)
