"""The catalog on a full disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import event

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.catalog.database import RESERVE_BYTES, Reserve
from millstream.core.errors import StorageFailure
from millstream.core.topic import Topic


def topic(name: str, note: str = "") -> Topic:
    return Topic(name=name, topic_id=uuid4(), partitions=1, replication=1, overrides={"x": note}, created_ms=1)


def test_a_full_disk_is_a_storage_error_and_leaves_the_catalog_usable(tmp_path: Path) -> None:
    catalog = Catalog.open_folder(tmp_path)
    catalog.add_topics([topic("before")])

    def keep_small(connection: Any, _record: Any) -> None:
        connection.execute("PRAGMA max_page_count=1")

    catalog.close()
    event.listen(catalog._engine, "connect", keep_small)
    for number in range(3):
        with pytest.raises(StorageFailure, match="free space"):
            catalog.add_topics([topic(f"t{number}", "y" * 50_000)])
    assert "before" in {topic.name for topic in catalog.topics()}
    catalog.close()


def test_the_reserve_is_released_for_a_change_that_frees_space(tmp_path: Path) -> None:
    catalog = Catalog.open_folder(tmp_path)
    reserve = tmp_path / "catalog.reserve"
    assert reserve.stat().st_size == RESERVE_BYTES
    doomed = topic("doomed")
    catalog.add_topics([doomed])
    attempts = 0

    def refuse_once(connection: Any, cursor: Any, statement: str, *others: Any) -> None:
        nonlocal attempts
        if statement.startswith("DELETE FROM topics"):
            attempts += 1
            if reserve.exists():
                raise _full()

    event.listen(catalog._engine, "before_cursor_execute", refuse_once)
    catalog.delete_topics([doomed], now_ms=1)
    assert attempts == 2
    assert not reserve.exists()
    assert catalog.topics() == []
    event.remove(catalog._engine, "before_cursor_execute", refuse_once)
    catalog.forget_deleted([doomed.topic_id])
    assert reserve.stat().st_size == RESERVE_BYTES
    catalog.close()


def _full() -> Exception:
    from sqlite3 import OperationalError as Full

    from sqlalchemy.exc import OperationalError

    return OperationalError("DELETE", {}, Full("database or disk is full"))


def test_without_a_reserve_the_error_is_reported(tmp_path: Path) -> None:
    reserve = Reserve(tmp_path / "reserve")
    assert not reserve.free()
    reserve.fill()
    reserve.fill()
    assert reserve.free()
    assert not Reserve(None).free()
    Reserve(tmp_path / "no" / "such" / "folder").fill()
