"""The merge of changes by key, against a model that applies them one by one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.core.errors import InvalidSetting
from millstream.pipelines.lake.merging import (
    DELETED,
    KEY,
    ORDER,
    ROOT,
    Bucket,
    MergedBucket,
    MergeRule,
    bucket_of,
    canonical_keys,
    completed,
    key_hashes,
    tombstone_schema,
)

SCHEMA = pa.schema(
    [
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("topic_id", pa.string()),
        pa.field("name", pa.string()),
        pa.field("text", pa.string()),
    ]
)
CHANGES = pa.schema([*SCHEMA, pa.field(KEY, pa.binary()), pa.field(ORDER, pa.int64()), pa.field(DELETED, pa.bool_())])


@dataclass(frozen=True)
class Change:
    key: int
    order: int | None
    is_delete: bool
    text: str


def table_of(changes: Sequence[tuple[int, Change]], *, topic_id: str = "t") -> pa.Table:
    rows = [
        {
            "partition": change.key % 3,
            "offset": offset,
            "topic_id": topic_id,
            "name": str(change.key),
            "text": change.text,
            KEY: str(change.key).encode(),
            ORDER: change.order,
            DELETED: change.is_delete,
        }
        for offset, change in changes
    ]
    return pa.Table.from_pylist(rows, schema=CHANGES)


def rule(*, is_ordered: bool = True, now_ms: int = 0, remembered_ms: int = 10**9, topic_id: str = "t") -> MergeRule:
    return MergeRule(
        topic_id=topic_id, key=("name",), is_ordered=is_ordered, now_ms=now_ms, remembered_ms=remembered_ms
    )


def keyed(rows: pa.Table, orders: dict[int, int | None]) -> pa.Table:
    """Stored rows as read back: key and order come from their columns."""
    names = rows.column("name").to_pylist()
    keys = canonical_keys([rows.column("name").combine_chunks()]) if len(rows) else pa.array([], pa.binary())
    order = pa.array([orders[offset] for offset in rows.column("offset").to_pylist()], pa.int64())
    assert len(names) == len(keys)
    return rows.append_column(KEY, keys).append_column(ORDER, order)


def model(changes: Sequence[tuple[int, Change]], *, is_ordered: bool) -> tuple[dict[int, str], int, int]:
    """Return the rows, how many deletes removed one, and how many changes were late."""
    best: dict[int, tuple[tuple[int, int], Change]] = {}
    deleted = late = 0
    for offset, change in changes:
        newest = best.get(change.key)
        order = change.order if is_ordered else 0
        if order is None:
            order = -1 if newest is None else newest[0][0]
        if newest is not None and (order, offset) < newest[0]:
            late += 1
            continue
        deleted += change.is_delete and newest is not None and not newest[1].is_delete
        best[change.key] = ((order, offset), change)
    return {key: change.text for key, (_place, change) in best.items() if not change.is_delete}, deleted, late


change_lists = st.lists(
    st.builds(Change, st.integers(0, 6), st.integers(0, 5), st.booleans(), st.text(max_size=3))
    | st.builds(Change, st.integers(0, 6), st.none(), st.just(True), st.just("")),
    max_size=40,
)


@given(changes=change_lists, cuts=st.lists(st.integers(0, 40), max_size=5), is_ordered=st.booleans(), data=st.data())
def test_the_rows_equal_the_model_for_any_division_of_the_changes(
    changes: list[Change], cuts: list[int], is_ordered: bool, data: st.DataObject
) -> None:
    numbered = list(enumerate(changes))
    orders = {offset: change.order for offset, change in numbered}
    # Some changes are merged twice, as by a backfill beside the running pipeline.
    again = data.draw(st.lists(st.sampled_from(numbered), max_size=10)) if numbered else []
    bounds = sorted({0, len(numbered), *(cut for cut in cuts if cut < len(numbered))})
    steps = [numbered[start:end] for start, end in itertools.pairwise(bounds)] + [again]
    rows, tombstones = SCHEMA.empty_table(), tombstone_schema(pa.int64()).empty_table()
    merging = rule(is_ordered=is_ordered)
    counts = []
    for step in steps:
        merged = merging.merge(SCHEMA, keyed(rows, orders), tombstones, table_of(step))
        rows, tombstones = merged.rows, merged.tombstones
        counts.append((merged.deleted, merged.late))
    texts = {int(row["name"]): row["text"] for row in rows.to_pylist()}
    assert len(texts) == len(rows)
    deleted, late = (sum(numbers) for numbers in zip(*counts[:-1], strict=True)) if numbered else (0, 0)
    assert (texts, deleted, late) == model(numbered, is_ordered=is_ordered)


def test_the_result_counts_changes() -> None:
    first = table_of([(0, Change(1, 5, False, "a")), (1, Change(2, 5, False, "b")), (2, Change(1, 4, False, "late"))])
    merged = merge_all(first)
    assert (merged.upserted, merged.deleted, merged.late) == (2, 0, 1)
    stored = keyed(merged.rows, {0: 5, 1: 5})
    second = table_of([(3, Change(1, 6, True, "")), (4, Change(2, 1, False, "late")), (5, Change(3, 1, False, "c"))])
    merged = rule().merge(SCHEMA, stored, merged.tombstones, second)
    assert (merged.upserted, merged.deleted, merged.late) == (1, 1, 1)
    assert [row["text"] for row in merged.rows.to_pylist()] == ["b", "c"]


def test_a_delete_without_an_order_deletes_what_precedes_it_in_its_partition() -> None:
    row, bare = Change(1, 5, False, "a"), Change(1, None, True, "")
    merged = merge_all(table_of([(0, row), (1, bare)]))
    assert len(merged.rows) == 0
    assert merged.tombstones.column(ORDER).to_pylist() == [5]
    late = rule().merge(SCHEMA, keyed(merged.rows, {}), merged.tombstones, table_of([(2, Change(1, 4, False, "b"))]))
    assert (len(late.rows), late.late) == (0, 1)
    elsewhere = merge_all(table_of([(0, row)]))
    bare_elsewhere = table_of([(9, bare)]).set_column(0, "partition", pa.array([2], pa.int32()))
    kept_merged = rule().merge(SCHEMA, keyed(elsewhere.rows, {0: 5}), elsewhere.tombstones, bare_elsewhere)
    assert (len(kept_merged.rows), kept_merged.deleted, kept_merged.late) == (1, 0, 1)
    recreated = table_of([(0, bare)], topic_id="t2").set_column(0, "partition", pa.array([2], pa.int32()))
    gone = rule(topic_id="t2").merge(SCHEMA, keyed(elsewhere.rows, {0: 5}), elsewhere.tombstones, recreated)
    assert (len(gone.rows), gone.deleted) == (0, 1)


def merge_all(changes: pa.Table, merging: MergeRule | None = None) -> MergedBucket:
    empty = pa.schema([*SCHEMA, pa.field(KEY, pa.binary()), pa.field(ORDER, pa.int64())]).empty_table()
    return (merging or rule()).merge(SCHEMA, empty, tombstone_schema(pa.int64()).empty_table(), changes)


def test_a_delete_is_forgotten_after_its_retention() -> None:
    deleted = merge_all(table_of([(0, Change(1, 9, True, ""))]), rule(now_ms=1000, remembered_ms=500))
    assert len(deleted.tombstones) == 1
    stored = keyed(deleted.rows, {})
    late = table_of([(1, Change(1, 8, False, "late"))])
    merged = rule(now_ms=1400, remembered_ms=500).merge(SCHEMA, stored, deleted.tombstones, late)
    assert len(merged.rows) == 0
    assert merged.late == 1
    none = table_of([])
    gone = rule(now_ms=1600, remembered_ms=500).merge(SCHEMA, stored, deleted.tombstones, none)
    assert len(gone.tombstones) == 0


def test_messages_of_a_recreated_topic_are_newer() -> None:
    old = merge_all(table_of([(100, Change(1, 0, False, "old"))]), rule(is_ordered=False))
    new = table_of([(0, Change(1, 0, False, "new"))], topic_id="t2")
    merged = rule(is_ordered=False, topic_id="t2").merge(SCHEMA, keyed(old.rows, {100: 0}), old.tombstones, new)
    assert [row["text"] for row in merged.rows.to_pylist()] == ["new"]


def test_a_key_in_two_partitions_requires_an_order() -> None:
    changes = table_of([(0, Change(1, 1, False, "a")), (5, Change(1, 2, False, "b"))])
    odd = changes.set_column(0, "partition", pa.array([0, 1], pa.int32()))
    with pytest.raises(InvalidSetting, match=r"name '1' has changes in partitions 0 and 1.*order\.by"):
        merge_all(odd, rule(is_ordered=False))
    assert merge_all(odd).rows.to_pylist()[0]["text"] == "b"


@given(columns=st.lists(st.tuples(st.text(max_size=4), st.integers(-3, 3)), max_size=30))
def test_composite_keys_are_equal_only_if_all_parts_are(columns: list[tuple[str, int]]) -> None:
    texts = pa.array([text for text, _ in columns], pa.string())
    numbers = pa.array([number for _, number in columns], pa.int64())
    keys = canonical_keys([texts, numbers, texts]).to_pylist()
    assert len(set(keys)) == len(set(columns))
    assert canonical_keys([pa.array(["a", None]), pa.array([None, 1])]).to_pylist() == [None, None]


@given(depths=st.lists(st.integers(0, 2**6 - 1), max_size=10))
def test_buckets_cover_every_key_once(depths: list[int]) -> None:
    there: list[Bucket] = []
    for number in depths:
        bucket = Bucket(6, number)
        if not any(file.holds(bucket) for file in there):
            there.append(bucket)
    cover = completed(there)
    assert set(there) <= set(cover)
    assert [bucket_range.start for bucket_range in cover] == [0, *(bucket_range.end for bucket_range in cover[:-1])]
    assert cover[-1].end == ROOT.end
    assert [bucket_of(f"buckets/{bucket_range.stem}0123.parquet") for bucket_range in cover] == cover


def test_hashes_spread_keys() -> None:
    keys = pa.array([str(number).encode() for number in range(20_000)], pa.binary())
    hashes: Any = key_hashes(keys)
    for bucket in ROOT.divided(3):
        share = ((hashes >= bucket.start) & (hashes < bucket.end)).mean()
        assert 0.11 < share < 0.14
    assert bucket_of("part-0001.parquet") is None
