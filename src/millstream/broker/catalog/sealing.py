"""Secrets at rest: the catalog holds them sealed, by keys in a file outside the data folder.

A sealed secret names its key and is bound to its setting: copied to another subscription or setting, it cannot be
opened. The last key of the file seals and all of them open, so that keys can be rotated without downtime. The file is
read again when it changes.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, Protocol, TypeVar

from millstream.core.errors import InvalidSetting
from millstream.core.private_file import read_private, write_private
from millstream.core.setting import SealedValue, secret_names

FLAG: Final = "--secrets-key-file"
_KEY_BYTES: Final = 32
_NONCE_BYTES: Final = 12
_KEYS_MAX: Final = 100
_PREFIX: Final = "sealed:1:"
_HEADER: Final = b"# Keys that seal the secrets in Millstream's catalog. The last one seals, all of them open.\n"

_NO_KEY: Final = (
    f"there is no key to seal a secret with; start every node with the same {FLAG}, outside its data folder "
    "(`millstream secrets init --file FILE` creates one)"
)


class Sealable(Protocol):
    """A declaration, a frozen dataclass, some of whose settings are secrets."""

    noun: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...
    @property
    def overrides(self) -> Mapping[str, str]: ...
    @property
    def sealed(self) -> Mapping[str, SealedValue]: ...
    @property
    def settings_class(self) -> type: ...


N = TypeVar("N", bound=Sealable)


class CannotUnseal(Exception):
    """A sealed secret cannot be opened here; the text says why."""


@dataclass(frozen=True, slots=True)
class SecretKey:
    """A key; its id is derived from it, so that it cannot name another one."""

    key: bytes = field(repr=False)

    @classmethod
    def new(cls) -> SecretKey:
        return cls(secrets.token_bytes(_KEY_BYTES))

    @property
    def key_id(self) -> str:
        """The public name of the key."""
        return hashlib.sha256(b"millstream key id" + self.key).hexdigest()[:12]

    @property
    def line(self) -> bytes:
        return f"{self.key_id} {base64.b64encode(self.key).decode()}\n".encode()


def read_keys(path: Path) -> list[SecretKey]:
    """Read a file of keys, the newest last; no error holds a key."""
    lines = read_private(path, flag=FLAG).split(b"\n")
    keys = [
        _parse_line(line, path, number) for number, line in enumerate(lines, 1) if line.strip() and line[:1] != b"#"
    ]
    if not 0 < len(keys) <= _KEYS_MAX:
        raise InvalidSetting(f"{FLAG} {path} holds {len(keys)} keys; it needs 1 to {_KEYS_MAX}")
    return keys


def _parse_line(line: bytes, path: Path, number: int) -> SecretKey:
    key_id, _, encoded = line.strip().partition(b" ")
    try:
        key = SecretKey(base64.b64decode(encoded, validate=True))
    except binascii.Error:
        key = SecretKey(b"")
    if len(key.key) != _KEY_BYTES or key.key_id.encode() != key_id:
        raise InvalidSetting(f"{FLAG} {path}: line {number} is not a key created by `millstream secrets`")
    return key


def write_keys(path: Path, keys: Sequence[SecretKey], *, replace: bool = False) -> None:
    """Write a file of keys, the newest last."""
    write_private(path, _HEADER + b"".join(key.line for key in keys), replace=replace)


def default_key_file() -> Path | None:
    """Return the default path of a single node's keys, or None if the user has no home folder."""
    state = os.environ.get("XDG_STATE_HOME")
    if state and os.path.isabs(state):
        return Path(state) / "millstream" / "secrets.keys"
    try:
        return Path.home() / ".local" / "state" / "millstream" / "secrets.keys"
    except RuntimeError:
        return None


class SealedSecret(NamedTuple):
    """A secret of the catalog, without its value."""

    noun: str
    name: str
    setting: str
    key_id: str
    problem: str
    """The reason why it cannot be opened here; empty if it can."""


class Sealing:
    """Seals and opens secrets with the keys of a file; `path` is None where no keys were given.

    With `is_created`, a file that does not exist is made when the first secret is sealed.
    """

    def __init__(self, path: Path | None, *, is_created: bool = False) -> None:
        self.path = path
        self._is_created = is_created
        self._stamp = self._tried = None  # type: tuple[int, ...] | None
        self._keys: list[SecretKey] = []
        # Calls of the catalog come from several threads.
        self._lock = threading.Lock()

    @classmethod
    def of_node(cls, key_file: str, data: str, *, in_cluster: bool) -> Sealing:
        """Return how a node seals secrets; raise `InvalidSetting` for keys in the data folder."""
        path = Path(key_file) if key_file else None if in_cluster else default_key_file()
        if path is None:
            return cls(None)
        if Path(data).resolve() in path.resolve().parents:
            if not key_file:
                return cls(None)
            raise InvalidSetting(f"{FLAG} {path} is in the data folder; move it, so that backups do not contain it")
        if key_file:
            if not path.exists():
                raise InvalidSetting(
                    f"{FLAG} {path} does not exist; create it: `millstream secrets init --file {path}`"
                )
            read_keys(path)
        return cls(path, is_created=not key_file)

    def has_changed(self) -> bool:
        """Whether the file has changed since it was last read, successfully or not."""
        return self._stamp_now() != self._tried

    def current(self) -> SecretKey:
        """Return the key that seals; raise `InvalidSetting` without one."""
        with self._lock:
            if self.path is None:
                raise InvalidSetting(_NO_KEY)
            return self._read()[-1]

    def seal(self, text: str, noun: str, name: str, setting: str) -> str:
        """Seal a secret, bound to the setting that holds it."""
        if self._is_created and self.path is not None and not self.path.exists():
            self._create(self.path)
        key = self.current()
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = nonce + _cipher(key).encrypt(nonce, text.encode(), _associated_data(noun, name, setting))
        return f"{_PREFIX}{key.key_id}:{base64.b64encode(sealed).decode()}"

    def open(self, sealed: str, noun: str, name: str, setting: str) -> str:
        """Open a secret, or raise `CannotUnseal`."""
        from cryptography.exceptions import InvalidTag

        key_id, encoded = _parse_sealed(sealed)
        with self._lock:
            if self.path is None:
                raise CannotUnseal(f"it is sealed with key {key_id}, but this node has no {FLAG}")
            try:
                keys = self._read()
            except InvalidSetting as error:
                raise CannotUnseal(str(error)) from None
        key = next((key for key in keys if key.key_id == key_id), None)
        if key is None:
            raise CannotUnseal(f"it is sealed with key {key_id}, which is not in {self.path}")
        try:
            content = _cipher(key).decrypt(
                encoded[:_NONCE_BYTES], encoded[_NONCE_BYTES:], _associated_data(noun, name, setting)
            )
        except (InvalidTag, ValueError):
            raise CannotUnseal("it was changed or copied from elsewhere; set it again") from None
        return str(content, "utf-8")

    def open_all(self, stored: N) -> N:
        """Open the secrets of a declaration; those that cannot be opened stay sealed, with the reason."""
        overrides, sealed = dict(stored.overrides), dict[str, SealedValue]()
        for setting in secret_names(stored.settings_class) & overrides.keys():
            text = overrides[setting]
            if not text:
                continue
            try:
                overrides[setting] = self.open(text, stored.noun, stored.name, setting)
            except CannotUnseal as error:
                sealed[setting] = SealedValue(overrides.pop(setting), f"{setting} cannot be opened: {error}")
        return dataclasses.replace(stored, overrides=overrides, sealed=sealed)

    def seal_all(self, declared: N, before: N | None = None, stored: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the settings as the catalog stores them.

        With `before`, which was opened from `stored`, secrets that have not changed stay sealed as they are: another
        node may not have the newest key yet.
        """
        texts = {**declared.overrides, **{name: value.text for name, value in declared.sealed.items()}}
        for setting in secret_names(declared.settings_class) & declared.overrides.keys():
            text = declared.overrides[setting]
            if before is not None and stored is not None and before.overrides.get(setting) == text:
                texts[setting] = stored[setting]
            elif text:
                texts[setting] = self.seal(text, declared.noun, declared.name, setting)
        return texts

    def describe(self, stored: Sealable) -> list[SealedSecret]:
        """Return the secrets of a declaration, without their values."""
        problems = self.open_all(stored).sealed
        return [
            SealedSecret(
                noun=stored.noun,
                name=stored.name,
                setting=setting,
                key_id=_key_id_of(stored.overrides[setting]),
                problem=problems[setting].problem if setting in problems else "",
            )
            for setting in sorted(secret_names(stored.settings_class) & stored.overrides.keys())
            if stored.overrides[setting]
        ]

    def reseal(self, stored: Sealable) -> dict[str, str]:
        """Return the settings with the secrets that an older key sealed under the newest one."""
        opened, texts = self.open_all(stored), dict(stored.overrides)
        for setting in secret_names(stored.settings_class) & opened.overrides.keys():
            if texts[setting] and _key_id_of(texts[setting]) != self.current().key_id:
                texts[setting] = self.seal(opened.overrides[setting], stored.noun, stored.name, setting)
        return texts

    def _create(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_keys(path, [SecretKey.new()])
        except FileExistsError:
            # Another node of this user has created it.
            pass
        except OSError as error:
            raise InvalidSetting(
                f"the key that seals secrets cannot be written to {path} ({error.strerror}); name a file outside the "
                f"data folder with {FLAG} (`millstream secrets init --file FILE` creates one)"
            ) from None

    def _read(self) -> list[SecretKey]:
        if self.path is None:
            return []
        self._tried = self._stamp_now()
        if self._tried is None or self._tried != self._stamp:
            self._keys = read_keys(self.path)
            self._stamp = self._tried
        return self._keys

    def _stamp_now(self) -> tuple[int, ...] | None:
        if self.path is None:
            return None
        try:
            status = os.stat(self.path)
        except OSError:
            return None
        return (status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode, status.st_uid)


def _parse_sealed(text: str) -> tuple[str, bytes]:
    """Return the id of the key and the sealed bytes, or raise `CannotUnseal`."""
    key_id, colon, encoded = text.removeprefix(_PREFIX).partition(":")
    try:
        if text.startswith(_PREFIX) and colon and key_id.isalnum():
            return key_id, base64.b64decode(encoded, validate=True)
    except binascii.Error:
        pass
    raise CannotUnseal("it is not sealed; set it again")


def _key_id_of(text: str) -> str:
    try:
        return _parse_sealed(text)[0]
    except CannotUnseal:
        return ""


def _cipher(key: SecretKey) -> Any:
    # Imported on use: it takes a while, and most catalogs hold no secret.
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key.key)


def _associated_data(noun: str, name: str, setting: str) -> bytes:
    return json.dumps(["millstream", noun, name, setting]).encode()
