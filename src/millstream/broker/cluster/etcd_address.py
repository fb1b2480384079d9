"""The addresses of etcd and the credentials for it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import grpc

from millstream.core.config import Config
from millstream.core.errors import InvalidSetting
from millstream.core.private_file import read_secret, warn_if_exposed
from millstream.core.setting import without_password

_SCHEMES = ("http", "https")


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAddress:
    """The members of an etcd cluster, and how to authenticate."""

    endpoints: tuple[str, ...]
    """`host:port` of each member."""
    encrypted: bool = False
    user: str | None = None
    password: str = field(default="", repr=False)
    password_file: str = ""
    ca: str = ""
    """File with the authority that signed etcd's certificate; without it, those that the machine trusts."""
    certificate: str = ""
    """File with this node's certificate, if etcd requires one; `key` has its private key."""
    key: str = ""

    @classmethod
    def parse(
        cls,
        urls: str,
        *,
        ca: str = "",
        certificate: str = "",
        key: str = "",
        user: str = "",
        password_file: str = "",
    ) -> EtcdAddress:
        """Parse URLs separated by commas; a user and password may be in the first."""
        shown = without_password(urls)
        parts = [urlsplit(text.strip()) for text in urls.split(",") if text.strip()]
        if not parts or any(part.scheme not in _SCHEMES or not part.hostname for part in parts):
            raise ValueError(f"etcd's addresses must look like http://host:2379,http://other:2379, not {shown!r}")
        if len({part.scheme for part in parts}) > 1:
            raise ValueError(f"all of etcd's addresses must use https, or none, not {shown!r}")
        user_name = user or unquote(parts[0].username or "")
        password = unquote(parts[0].password or "")
        if user and not (password or password_file):
            raise ValueError(f"there is no password for user {user!r}; name a file with --etcd-password-file")
        if password_file and not user_name:
            raise ValueError("--etcd-password-file needs --etcd-user")
        return cls(
            endpoints=tuple(part.netloc.rpartition("@")[2] for part in parts),
            encrypted=parts[0].scheme == "https",
            user=user_name or None,
            password=password,
            password_file=password_file,
            ca=ca,
            certificate=certificate,
            key=key,
        )

    @classmethod
    def of(cls, config: Config) -> EtcdAddress:
        """Return the address that a node's configuration names, or raise `InvalidSetting`."""
        try:
            address = cls.parse(
                config.etcd,
                ca=config.etcd_ca,
                certificate=config.etcd_certificate,
                key=config.etcd_key,
                user=config.etcd_user,
                password_file=config.etcd_password_file,
            )
        except ValueError as error:
            raise InvalidSetting(f"etcd cannot be queried: {error}") from None
        if address.key:
            warn_if_exposed(address.key, flag="--etcd-key")
        address.read_password()
        return address

    def read_password(self) -> str:
        """Return the password of the user, as its file has it now, or raise `InvalidSetting`."""
        if not self.password_file:
            return self.password
        return read_secret(self.password_file, flag="--etcd-password-file")

    def stamp(self) -> tuple[int, ...]:
        """Return a value that changes with the TLS files."""
        statuses = (os.stat(name) for name in (self.ca, self.key, self.certificate) if name)
        return tuple(number for status in statuses for number in (status.st_ino, status.st_mtime_ns))

    def credentials(self) -> Any:
        """Return gRPC's credentials for an encrypted channel; None for a plain one."""
        if not self.encrypted:
            return None
        contents = (Path(name).read_bytes() if name else None for name in (self.ca, self.key, self.certificate))
        return grpc.ssl_channel_credentials(*contents)


class EtcdCredentials:
    """gRPC's credentials of the files as they are now. Each thread has its own."""

    def __init__(self, address: EtcdAddress) -> None:
        self._address = address
        try:
            self._stamp = address.stamp() if address.encrypted else ()
            self.current = address.credentials()
        except OSError as error:
            raise InvalidSetting(f"etcd cannot be queried: {error}") from error

    def follow(self) -> bool:
        """Load files that have changed; return whether any did."""
        if not self._address.encrypted:
            return False
        try:
            stamp = self._address.stamp()
            if stamp == self._stamp:
                return False
            self.current = self._address.credentials()
        except OSError:
            # The files are being replaced: the last ones stay in use.
            return False
        self._stamp = stamp
        return True
