"""Locations of lake tables: folders and the supported URL schemes."""

from __future__ import annotations

from typing import Final

from millstream.core.errors import InvalidSetting

SCHEMES: Final = ("file", "s3", "s3a", "gs", "az", "abfs", "abfss")
QUARANTINE_SUFFIX: Final = "__quarantine"
"""Appended to a table's name: the table of messages that do not fit it."""


def check_lake_url(url: str) -> None:
    """Raise `InvalidSetting` for an unsupported URL; paths are not checked."""
    scheme, colon, rest = url.partition("://")
    if colon and scheme not in SCHEMES:
        raise InvalidSetting(f"tables can be stored in folders and at {', '.join(SCHEMES[1:])}://, not at {url!r}")
    if colon and not rest.strip("/"):
        raise InvalidSetting(f"{url!r} names no {'folder' if scheme == 'file' else 'bucket'}")


def check_absolute_lake_url(url: str) -> None:
    """Also reject relative paths, which mean different folders in different processes."""
    check_lake_url(url)
    if "://" not in url and not url.startswith("/"):
        raise InvalidSetting(f"use the absolute path of folder {url!r}, or a URL such as s3://bucket/path")
