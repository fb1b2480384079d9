"""Where tables of a lake are: folders, and the kinds of URLs that mean something."""

from __future__ import annotations

from typing import Final

from millstream.core.errors import InvalidSetting

SCHEMES: Final = ("file", "s3", "s3a", "gs", "az", "abfs", "abfss")
QUARANTINE_SUFFIX: Final = "__quarantine"
"""With the name of a table before it, the table of messages that do not fit it."""


def check_lake_url(url: str) -> None:
    """Raise `InvalidSetting` for a URL that means nothing here; a path is taken as it is."""
    scheme, colon, rest = url.partition("://")
    if colon and scheme not in SCHEMES:
        raise InvalidSetting(f"tables are kept in folders and at {', '.join(SCHEMES[1:])}://, not at {url!r}")
    if colon and not rest.strip("/"):
        raise InvalidSetting(f"{url!r} names no {'folder' if scheme == 'file' else 'bucket'}")


def check_absolute_lake_url(url: str) -> None:
    """The same for a place that nodes are to find: what a path is relative to differs from process to process."""
    check_lake_url(url)
    if "://" not in url and not url.startswith("/"):
        raise InvalidSetting(f"give the whole path of the folder {url!r}, from / on, or a URL such as s3://bucket/path")
