"""The catalog of an older Millstream is brought up to date, whatever interrupts it; a newer one is left alone."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from uuid import UUID

import pytest
from sqlalchemy import Connection

from millstream.broker.catalog.catalog import STEPS, Catalog, migrate
from millstream.broker.catalog.tables import SCHEMA_VERSION, metadata
from millstream.core.errors import DataFolderInvalid
from millstream.core.quota import CLIENT_ID, DEFAULT, PRODUCER_BYTE_RATE, USER, QuotaEntity

TOPIC_ID = UUID("6ac5c9c5-43b4-4fcd-bde8-572c50521f54")

# As version 1 of the schema wrote it; never to be changed.
VERSION_1 = f"""
CREATE TABLE about (name VARCHAR(64) NOT NULL, value VARCHAR(255) NOT NULL, PRIMARY KEY (name));
CREATE TABLE topics (topic_id VARCHAR(36) NOT NULL, name VARCHAR(249) NOT NULL, partitions INTEGER NOT NULL,
    replication INTEGER NOT NULL, overrides JSON NOT NULL, created_ms BIGINT NOT NULL,
    PRIMARY KEY (topic_id), UNIQUE (name));
CREATE TABLE deleted_topics (topic_id VARCHAR(36) NOT NULL, name VARCHAR(249) NOT NULL, deleted_ms BIGINT NOT NULL,
    PRIMARY KEY (topic_id));
CREATE TABLE counters (name VARCHAR(64) NOT NULL, next_value BIGINT NOT NULL, PRIMARY KEY (name));
INSERT INTO about VALUES ('schema-version', '1'), ('cluster-id', 'Xq8uS3pGTDe0b1zv0aVvNA');
INSERT INTO topics VALUES ('{TOPIC_ID}', 'orders', 3, 1, '{{"retention.ms": "77"}}', 1700000000000);
INSERT INTO counters VALUES ('producer-id', 5000);
"""


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with sqlite3.connect(tmp_path / "catalog.sqlite") as connection:
        connection.executescript(VERSION_1)
    connection.close()
    return tmp_path


def ask_file(folder: Path, question: str) -> list[tuple[object, ...]]:
    connection = sqlite3.connect(folder / "catalog.sqlite")
    try:
        return connection.execute(question).fetchall()
    finally:
        connection.close()


def check(folder: Path) -> None:
    """Everything of the old catalog is there, and everything of the new one works."""
    catalog = Catalog.open_folder(folder)
    try:
        (topic,) = catalog.topics()
        assert (topic.name, topic.topic_id, topic.partitions) == ("orders", TOPIC_ID, 3)
        assert dict(topic.overrides) == {"retention.ms": "77"}
        assert catalog.cluster_id == "Xq8uS3pGTDe0b1zv0aVvNA"
        assert catalog.take_block("producer-id", 10) == 5000
        assert catalog.client_quotas() == {}
        catalog.change_client_quotas({QuotaEntity(((CLIENT_ID, "x"),)): {PRODUCER_BYTE_RATE: 5.0}})
    finally:
        catalog.close()
    assert ask_file(folder, "SELECT value FROM about WHERE name = 'schema-version'") == [(str(SCHEMA_VERSION),)]


def test_a_catalog_of_version_1_is_upgraded_with_all_it_holds(old: Path) -> None:
    check(old)


def test_an_interrupted_upgrade_is_finished_by_the_next_start(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash_after(connection: Connection, found: int) -> None:
        migrate(connection, found)
        raise KeyboardInterrupt

    monkeypatch.setattr("millstream.broker.catalog.catalog.migrate", crash_after)
    with pytest.raises(KeyboardInterrupt):
        Catalog.open_folder(old)
    monkeypatch.undo()
    assert ask_file(old, "SELECT value FROM about WHERE name = 'schema-version'") == [("1",)]
    check(old)


def test_there_is_a_step_to_every_version() -> None:
    assert sorted(STEPS) == list(range(2, SCHEMA_VERSION + 1))


def test_an_upgraded_catalog_has_the_tables_of_a_new_one(old: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    new.mkdir()
    for folder in (old, new):
        Catalog.open_folder(folder).close()
    tables = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
    assert ask_file(old, tables) == ask_file(new, tables) == [(name,) for name in sorted(metadata.tables)]
    for name in metadata.tables:
        columns = f"SELECT name, type, \"notnull\", pk FROM pragma_table_info('{name}')"
        assert ask_file(old, columns) == ask_file(new, columns)


@pytest.mark.parametrize(("version", "says"), [("99", "newer Millstream"), ("two", "which no Millstream writes")])
def test_what_this_version_does_not_know_is_left_as_it_is(old: Path, version: str, says: str) -> None:
    connection = sqlite3.connect(old / "catalog.sqlite")
    connection.execute("UPDATE about SET value = ? WHERE name = 'schema-version'", (version,))
    connection.commit()
    connection.close()
    with pytest.raises(DataFolderInvalid, match=says):
        Catalog.open_folder(old)
    assert ask_file(old, "SELECT count(*) FROM sqlite_master WHERE name = 'client_quotas'") == [(0,)]


def test_quotas_are_kept(tmp_path: Path) -> None:
    some = QuotaEntity(((USER, DEFAULT), (CLIENT_ID, 'ü, [] "x"')))
    other = QuotaEntity(((CLIENT_ID, DEFAULT),))
    catalog = Catalog.open_folder(tmp_path)
    catalog.change_client_quotas({some: {PRODUCER_BYTE_RATE: 1e15}, other: {PRODUCER_BYTE_RATE: 2.0}})
    catalog.change_client_quotas({other: {}, some: {PRODUCER_BYTE_RATE: 3.0}})
    catalog.close()
    again = Catalog.open_folder(tmp_path)
    assert again.client_quotas() == {some: {PRODUCER_BYTE_RATE: 3.0}}
    again.close()
