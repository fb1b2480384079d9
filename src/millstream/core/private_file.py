"""Files that hold secrets: keys, passwords, profiles. Only their owner may read them."""

from __future__ import annotations

import logging
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from millstream.core.errors import InvalidSetting

_logger = logging.getLogger(__name__)

_BYTES_MAX: Final = 1024 * 1024


def exposure_of(status: os.stat_result) -> str:
    """Return a clause that names the others who can read a file; empty if only its owner can.

    The group may read files of root, as in volumes that Kubernetes and systemd mount for a service.
    """
    mode = stat.S_IMODE(status.st_mode)
    allowed = 0o640 if status.st_uid == 0 and os.geteuid() != 0 else 0o600
    if mode & 0o077 & ~allowed:
        return f"other users can access it (mode {mode:04o}); run chmod 600 on it"
    if os.geteuid() != 0 and status.st_uid not in (0, os.geteuid()):
        return "it belongs to another user"
    return ""


def warn_if_exposed(path: str, *, flag: str) -> None:
    """Warn about a private key that others can read; it is no error, since the mode may be intended."""
    try:
        exposed = exposure_of(os.stat(path))
    except OSError:
        return
    if exposed:
        _logger.warning("%s %s is a private key: %s", flag, path, exposed)


def read_private(path: str | os.PathLike[str], *, flag: str) -> bytes:
    """Read a file that only its owner may read; raise `InvalidSetting`, which never contains its content."""
    try:
        with open(path, "rb") as file:
            exposed = exposure_of(os.fstat(file.fileno()))
            content = file.read(_BYTES_MAX + 1)
    except OSError as error:
        raise InvalidSetting(f"{flag} {path} cannot be read: {error.strerror or error}") from None
    if exposed:
        raise InvalidSetting(f"{flag} {path} is not used: {exposed}")
    if len(content) > _BYTES_MAX:
        raise InvalidSetting(f"{flag} {path} has more than {_BYTES_MAX} bytes")
    return content


def read_secret(path: str | os.PathLike[str], *, flag: str) -> str:
    """Read a password or token from such a file, without the end of its line."""
    try:
        secret = read_private(path, flag=flag).decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise InvalidSetting(f"{flag} {path} is not UTF-8 text") from None
    if not secret:
        raise InvalidSetting(f"{flag} {path} is empty")
    return secret


def write_private(path: Path, content: bytes, *, replace: bool = False) -> None:
    """Write a file that only its owner may read, atomically; without `replace` it must not exist."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        if replace:
            os.replace(temporary, path)
        else:
            os.link(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
