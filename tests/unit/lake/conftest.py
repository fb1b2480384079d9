"""One object store for all tests of tables."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millstream_testing.object_store import ObjectStore, object_store


@pytest.fixture(scope="session")
def a_store() -> Iterator[ObjectStore]:
    with object_store() as store:
        store.make_bucket("lake")
        yield store


@pytest.fixture
def s3(a_store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> str:
    """Where the lake is, reached by the environment as any program would."""
    for name, value in a_store.environment.items():
        monkeypatch.setenv(name, value)
    return "s3://lake"
