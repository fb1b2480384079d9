"""The storage of a table, and one object store for all lake tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.pipelines.lake.storage import Storage
from millstream_testing.object_store import ObjectStore, object_store


@pytest.fixture(scope="session")
def s3_store() -> Iterator[ObjectStore]:
    with object_store() as store:
        store.make_bucket("lake")
        yield store


@pytest.fixture
def s3(s3_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> str:
    """The location of the lake, accessed with credentials from the environment, as by any program."""
    for name, value in s3_store.environment.items():
        monkeypatch.setenv(name, value)
    return "s3://lake"


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    """Where the files of a table are."""
    return Storage.at(str(tmp_path / "orders"))
