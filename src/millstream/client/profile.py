"""Profiles: named ways to connect, in a file of the user, for commands and programs.

    [prod]
    brokers = "broker.example:9092"
    tls-ca = "ca.pem"
    user = "alice"
    password-file = "alice-password"

A file that holds a password or a token itself is used only if no other user can read it.
"""

from __future__ import annotations

import os
import ssl
import tomllib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from millstream.core.errors import InvalidSetting, NotFound
from millstream.core.private_file import exposure_of, read_secret
from millstream.core.setting import HIDDEN, suggestion
from millstream.protocol.wire.credentials import client_tls

FILE_VARIABLE: Final = "MILLSTREAM_PROFILES"
_FILES: Final = ("tls-ca", "tls-cert", "tls-key", "password-file", "token-file")
_SECRETS: Final = ("password", "token")


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A way to connect; a field's name is its key in the file."""

    brokers: str = ""
    tls: bool = False
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    user: str = ""
    password: str = field(default="", repr=False)
    password_file: str = ""
    token: str = field(default="", repr=False)
    token_file: str = ""

    def check(self, name: str) -> None:
        """Raise `InvalidSetting` for contradictory fields."""
        has_password, has_token = bool(self.password or self.password_file), bool(self.token or self.token_file)
        if has_password != bool(self.user):
            raise InvalidSetting(f"profile {name!r} needs both a user and its password or password-file")
        if has_password and has_token:
            raise InvalidSetting(f"profile {name!r} has a user and a token; it takes one of them")
        if bool(self.tls_cert) != bool(self.tls_key):
            raise InvalidSetting(f"profile {name!r} needs both tls-cert and tls-key, or neither")

    @property
    def has_tls(self) -> bool:
        return self.tls or bool(self.tls_ca or self.tls_cert)

    def tls_context(self) -> ssl.SSLContext | None:
        """Return the TLS of connections; None for plain text."""
        if not self.has_tls:
            return None
        return client_tls(self.tls_ca or None, certificate=self.tls_cert or None, key=self.tls_key or None)

    def read_password(self) -> str:
        """Return the password of the user; empty if there is none."""
        return read_secret(self.password_file, flag="password-file") if self.password_file else self.password

    def read_token(self) -> str:
        """Return the token; empty if there is none."""
        return read_secret(self.token_file, flag="token-file") if self.token_file else self.token

    def shown(self) -> dict[str, Any]:
        """Return the settings that are given, without secrets."""
        values = {field.name.replace("_", "-"): getattr(self, field.name) for field in fields(self)}
        return {name: HIDDEN if name in _SECRETS else value for name, value in values.items() if value}


def profile_file() -> Path:
    """Return the path of this user's profiles."""
    if named := os.environ.get(FILE_VARIABLE):
        return Path(named)
    config = os.environ.get("XDG_CONFIG_HOME")
    return (Path(config) if config else Path("~/.config").expanduser()) / "millstream" / "profiles.toml"


def read_profiles() -> dict[str, Profile | InvalidSetting]:
    """Read every profile of this user, or why it cannot be used. No error contains a secret."""
    profiles: dict[str, Profile | InvalidSetting] = {}
    for name, table in _tables().items():
        try:
            profiles[name] = _profile(name, table, profile_file())
        except InvalidSetting as error:
            profiles[name] = error
    return profiles


def load_profile(name: str) -> Profile:
    """Return the profile with this name, or raise `NotFound`; mistakes in others do not matter."""
    tables = _tables()
    if name not in tables:
        known = suggestion(name, tables) or (f"; it has {', '.join(sorted(tables))}" if tables else "")
        raise NotFound(f"there is no profile {name!r} in {profile_file()}{known}")
    return _profile(name, tables[name], profile_file())


def _tables() -> dict[str, Any]:
    """Return the contents of the file; nothing if there is none."""
    path = profile_file()
    try:
        with path.open("rb") as file:
            exposed = exposure_of(os.fstat(file.fileno()))
            tables = tomllib.load(file)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InvalidSetting(f"profiles {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSetting(f"profiles {path} is not valid TOML: {_position(error)}") from None
    if exposed and any(isinstance(table, dict) and not table.keys().isdisjoint(_SECRETS) for table in tables.values()):
        raise InvalidSetting(f"profiles {path} holds a secret and is not used: {exposed}")
    return tables


def _profile(name: str, table: object, path: Path) -> Profile:
    kinds = {field.name.replace("_", "-"): bool if field.name == "tls" else str for field in fields(Profile)}
    if not isinstance(table, dict):
        raise InvalidSetting(f"profiles {path}: {name} is not a table; a profile begins with [{name}]")
    for key, value in table.items():
        if key not in kinds:
            raise InvalidSetting(
                f"profiles {path}: profile {name!r} has an unknown key {key!r}{suggestion(key, kinds)}"
            )
        if not isinstance(value, kinds[key]):
            kind = "true or false" if kinds[key] is bool else "a string"
            raise InvalidSetting(f"profiles {path}: {key} of profile {name!r} must be {kind}")
    # Relative paths start at the folder of the profiles.
    values: dict[str, Any] = {
        key: str(path.parent / os.path.expanduser(value)) if key in _FILES and value else value
        for key, value in table.items()
    }
    made = Profile(**{key.replace("-", "_"): value for key, value in values.items()})
    made.check(name)
    return made


def _position(error: Exception) -> str:
    # The content of the file is left out of the message: it may be a password.
    text = str(error)
    at = text.rfind("(at ")
    return f"it cannot be read {text[at + 1 : -1]}" if at >= 0 else "it is not UTF-8 text"
