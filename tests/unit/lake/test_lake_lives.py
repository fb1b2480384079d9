"""Topics recreated under their old names share a table in which the topic of each row is unambiguous."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import deltalake
import pytest

from millstream.pipelines.lake.columns import QUARANTINE, RAW, TOPIC_ID
from millstream.pipelines.lake.table import LakeTable, open_table
from millstream_testing.lake_rows import LANDED, TOPIC, rows

OTHER = "3f2b8c1e-0000-4000-8000-000000000002"


def land_both(table: LakeTable) -> None:
    """Land the same offsets of a topic and of a recreated topic of the same name."""
    for topic_id, word in ((TOPIC, b"old"), (OTHER, b"new")):
        writer, odd = table.writer(RAW, topic_id, landed=LANDED), table.quarantine_writer(topic_id, landed=LANDED)
        writer.write(rows(0, range(4), value=[word] * 4))
        odd.write(rows(0, [4], QUARANTINE, value=[word]))
        assert table.commit(writer.close(), {(topic_id, 0): (0, 5)}, schema=RAW, quarantined=odd.close())


def values(table: LakeTable, topic_id: str) -> list[bytes]:
    batches = [*table.scan(topic_id, 0, 0, 9, ["value"]), *table.scan_quarantined(topic_id, 0, 0, 9, ["value"])]
    return [value for batch in batches for value in batch.column("value").to_pylist()]


@pytest.mark.parametrize("format", ["delta", "parquet"])
def test_each_row_identifies_its_topic(tmp_path: Path, format: str) -> None:
    table = open_table(str(tmp_path / "orders"), format=format)
    land_both(table)
    assert table.reached([(TOPIC, 0), (OTHER, 0), (OTHER, 1)]) == {(TOPIC, 0): 5, (OTHER, 0): 5}
    assert values(table, TOPIC) == [b"old"] * 5
    assert values(table, OTHER) == [b"new"] * 5
    table.compact(before=LANDED + timedelta(days=1))
    assert values(table, TOPIC) == [b"old"] * 5
    assert [batch.column(TOPIC_ID).to_pylist() for batch in table.scan(OTHER, 0, 0, 9)] == [[OTHER] * 4]


def test_rows_merged_by_another_program_are_distinguished(tmp_path: Path) -> None:
    table = open_table(str(tmp_path / "orders"))
    land_both(table)
    for name in ("orders", "orders__quarantine"):
        deltalake.DeltaTable(str(tmp_path / name)).optimize.compact()
    assert values(table, TOPIC) == [b"old"] * 5
    assert values(table, OTHER) == [b"new"] * 5
    table.compact(before=LANDED + timedelta(days=1), small_bytes=1 << 30)
    assert values(table, OTHER) == [b"new"] * 5
