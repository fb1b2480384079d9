"""The catalog file: another version is left untouched, and declarations are kept."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from millstream.broker.catalog.catalog import Catalog
from millstream.core.errors import DataFolderInvalid
from millstream.core.quota import CLIENT_ID, DEFAULT, PRODUCER_BYTE_RATE, USER, QuotaEntity


@pytest.mark.parametrize("version", ["99", "0", "two"])
def test_a_catalog_file_of_another_version_is_left_untouched(tmp_path: Path, version: str) -> None:
    file = tmp_path / "catalog.sqlite"
    connection = sqlite3.connect(file)
    connection.execute("CREATE TABLE about (name VARCHAR(64) PRIMARY KEY, value VARCHAR(255) NOT NULL)")
    connection.execute("INSERT INTO about VALUES ('schema-version', ?)", (version,))
    connection.commit()
    with pytest.raises(DataFolderInvalid, match=f"the catalog has schema {version}"):
        Catalog.open_folder(tmp_path)
    assert connection.execute("SELECT count(*) FROM sqlite_master WHERE name = 'client_quotas'").fetchall() == [(0,)]
    connection.close()


def test_quotas_survive_reopening(tmp_path: Path) -> None:
    some = QuotaEntity(((USER, DEFAULT), (CLIENT_ID, 'ü, [] "x"')))
    other = QuotaEntity(((CLIENT_ID, DEFAULT),))
    catalog = Catalog.open_folder(tmp_path)
    catalog.change_client_quotas({some: {PRODUCER_BYTE_RATE: 1e15}, other: {PRODUCER_BYTE_RATE: 2.0}})
    catalog.change_client_quotas({other: {}, some: {PRODUCER_BYTE_RATE: 3.0}})
    catalog.close()
    again = Catalog.open_folder(tmp_path)
    assert again.client_quotas() == {some: {PRODUCER_BYTE_RATE: 3.0}}
    again.close()
