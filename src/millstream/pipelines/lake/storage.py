"""The location of a table: a folder, or an object store that the environment configures."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.fs
from deltalake import DeltaTable
from deltalake.exceptions import DeltaError
from deltalake.fs import DeltaStorageHandler

from millstream.core.errors import InvalidSetting
from millstream.core.lake_url import check_lake_url

STAGED: Final = "_staged"


def environment_options() -> dict[str, str]:
    """Return the options of this process's environment, for tasks on other machines that use the same object store."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}


@dataclass(frozen=True)
class Storage:
    """A folder of files. It is small and is sent to tasks; connections are made where it is used."""

    url: str
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Options of the object store, in addition to the environment (`AWS_ACCESS_KEY_ID`, `AWS_ENDPOINT_URL` …)."""

    @classmethod
    def at(cls, url: str, options: Mapping[str, str] | None = None) -> Storage:
        """Return the storage at a path or URL; raise `InvalidSetting` for unsupported URLs."""
        check_lake_url(url)
        scheme, colon, _rest = url.partition("://")
        if not colon:
            return cls(str(Path(url).absolute()))
        if scheme == "file":
            return cls(unquote(urlsplit(url).path).rstrip("/") or "/")
        return cls(url.rstrip("/"), _with_plain_http(options or {}))

    @classmethod
    def reached_from_here(cls, url: str) -> Storage:
        """Return the storage with the options of the environment, so that tasks on other machines can reach it."""
        return cls.at(url, environment_options())

    def table(self, version: int | None = None) -> DeltaTable:
        """Open the Delta table at a version or at its latest one."""
        return DeltaTable(self.url, version=version, storage_options=dict(self.options))

    @property
    def folder(self) -> Path | None:
        return None if "://" in self.url else Path(self.url)

    def suffixed(self, ending: str) -> Storage:
        return Storage(f"{self.url}{ending}", self.options)

    def staged(self) -> Storage:
        """Return the staging folder, a sibling of this one that no pattern for tables matches."""
        parent, _slash, name = self.url.rpartition("/")
        if not name or parent.endswith(":/"):
            raise InvalidSetting(f"{self.url!r} is a root; choose a folder in it")
        if name == STAGED:
            raise InvalidSetting(f"{self.url!r} is a staging folder; choose another name")
        return Storage(f"{parent}/{STAGED}/{name}", self.options)

    def publish(self, path: str, shown: str) -> None:
        """Move a staged file into place atomically, unless another run has moved it."""
        source = self.staged()
        if self.folder is not None and source.folder is not None:
            self.make_parent(shown)
            with contextlib.suppress(FileNotFoundError):
                (source.folder / path).replace(self.folder / shown)
                self.sync(shown)
            return
        parent, _slash, name = self.url.rpartition("/")
        around = Storage(parent, self.options).files()
        with contextlib.suppress(FileNotFoundError):
            # The store copies the file and deletes the original; a second mover writes the same bytes.
            around.move(f"{STAGED}/{name}/{path}", f"{name}/{shown}")

    def data_files(self, folder: str = "") -> Iterator[str]:
        """Return the data files of all hours, or of one folder."""
        files = self.files()
        if folder:
            for entry in files.get_file_info(pyarrow.fs.FileSelector(folder, allow_not_found=True)):
                if entry.type == pyarrow.fs.FileType.File:
                    yield entry.path
            return
        for day in files.get_file_info(pyarrow.fs.FileSelector("", allow_not_found=True)):
            if day.type == pyarrow.fs.FileType.Directory and not day.base_name.startswith("_"):
                for entry in files.get_file_info(pyarrow.fs.FileSelector(day.path, recursive=True)):
                    if entry.type == pyarrow.fs.FileType.File:
                        yield entry.path

    def files(self) -> Any:
        """Return an Arrow file system rooted here."""
        if self.folder is not None:
            return pyarrow.fs.SubTreeFileSystem(self.url, pyarrow.fs.LocalFileSystem())
        return pyarrow.fs.PyFileSystem(DeltaStorageHandler(self.url, dict(self.options)))

    def make_parent(self, path: str) -> None:
        """Create the folder of a file; object stores have none."""
        if self.folder is not None:
            (self.folder / path).parent.mkdir(parents=True, exist_ok=True)

    def delete(self, path: str) -> None:
        """Delete an unreferenced file if possible; otherwise the vacuum does."""
        with contextlib.suppress(OSError, pa.ArrowException, DeltaError):
            self.files().delete_file(path)

    def sync(self, path: str) -> None:
        """Sync a file and all folders of its path; object stores respond only once data is durable."""
        if self.folder is not None:
            file = self.folder / path
            _sync(file)
            for folder in file.parents[: len(file.parents) - len(self.folder.parents) + 1]:
                _sync(folder)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _with_plain_http(options: Mapping[str, str]) -> dict[str, str]:
    """Allow an endpoint without TLS if the configured one has none."""
    options_by_name = {name.lower(): value for name, value in options.items()}
    names = ("aws_endpoint_url", "aws_endpoint_url_s3", "aws_endpoint", "endpoint_url", "endpoint")
    endpoints = [options_by_name.get(name, os.environ.get(name.upper(), "")) for name in names]
    if any(endpoint.startswith("http://") for endpoint in endpoints) and "allow_http" not in options_by_name:
        return {**options, "allow_http": "true"}
    return dict(options)
