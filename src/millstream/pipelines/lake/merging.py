"""The merge of changes into rows by key: one row per key, regardless of the order and the repetition of changes.

Of the stored row and all changes to a key, the one with the greatest (order value, offset, partition) wins. A delete is
a change like any other: its position is kept as a tombstone for a while, so that a late update does not revive the key.
A delete without an order value, such as a message without a payload, takes the greatest order value of its key before
it in its partition, so it deletes what it follows. The result depends only on the set of changes, not on how they were
divided into batches.

Keys are divided into buckets by hash. A bucket is a range of hashes that shares its first bits, so it can be split
in two without touching the others.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.core.errors import InvalidSetting
from millstream.pipelines.lake.columns import TOPIC_ID
from millstream.protocol.records.arrow import binary_column
from millstream.protocol.records.partitioner import choose_partitions

KEY: Final = "=key"
ORDER: Final = "=order"
DELETED: Final = "=deleted"
DELETED_MS: Final = "=deleted_ms"
"""Additional columns of changes. No column of a table can have such a name."""

HASH_BITS: Final = 31
DEPTH_MAX: Final = 12
"""The most bits that identify a bucket: up to 4,096 buckets."""

_NAME: Final = re.compile(r"bucket-(\d\d)-([0-9a-f]{8})_")


class Bucket(NamedTuple):
    """The keys whose hashes begin with `prefix`, a number of `depth` bits."""

    depth: int
    prefix: int

    @property
    def start(self) -> int:
        return self.prefix << (HASH_BITS - self.depth)

    @property
    def end(self) -> int:
        return (self.prefix + 1) << (HASH_BITS - self.depth)

    @property
    def stem(self) -> str:
        return f"bucket-{self.depth:02d}-{self.prefix:08x}_"

    def divided(self, levels: int) -> list[Bucket]:
        """Return the buckets that replace it when it is halved repeatedly."""
        return [Bucket(self.depth + levels, (self.prefix << levels) + part) for part in range(1 << levels)]

    def holds(self, other: Bucket) -> bool:
        return self.start <= other.start and other.end <= self.end


ROOT: Final = Bucket(0, 0)
"""All keys."""


def bucket_of(path: str) -> Bucket | None:
    """Return the bucket that a file holds, from its name; None for files of other programs."""
    match = _NAME.match(path.rpartition("/")[2])
    return None if match is None else Bucket(int(match[1]), int(match[2], 16))


def completed(buckets: Iterable[Bucket]) -> list[Bucket]:
    """Return disjoint buckets in order, with others in the gaps, so that every key has one."""
    ordered = sorted(set(buckets), key=lambda bucket: bucket.start)
    return list(_completed(ROOT, ordered))


def _completed(around: Bucket, buckets: Sequence[Bucket]) -> Iterable[Bucket]:
    if not buckets or around in buckets:
        yield around
        return
    for half in around.divided(1):
        yield from _completed(half, [bucket for bucket in buckets if half.holds(bucket)])


def key_hashes(keys: pa.Array) -> npt.NDArray[np.int32]:
    """Return the hash of every key, of `HASH_BITS` bits; no key is null."""
    return choose_partitions(binary_column(keys), 1 << HASH_BITS)


def canonical_keys(columns: Sequence[pa.Array]) -> pa.Array:
    """Return one byte string per row that is equal where all columns are; null where one of them is null."""
    parts: list[pa.Array] = []
    for column in columns:
        text = column if pa.types.is_binary(column.type) else column.cast(pa.string()).cast(pa.binary())
        if len(columns) > 1:
            # Prefixed with its length, the value of one column cannot run into the next.
            length = pc.binary_length(text).cast(pa.string()).cast(pa.binary())
            parts += [length, text]
        else:
            parts.append(text)
    if len(parts) == 1:
        return parts[0]
    return pc.binary_join_element_wise(*parts, pa.scalar(b":", pa.binary()))


@dataclass(frozen=True, slots=True, kw_only=True)
class MergedBucket:
    rows: pa.Table
    """The current row of every key, with the columns of the table."""
    tombstones: pa.Table
    """The deletes that are remembered, with the columns of `tombstone_schema`."""
    upserted: int = 0
    """Keys whose row is new or another one."""
    deleted: int = 0
    """Deletes of a row that was there, stored or earlier in the same partition of the batch."""
    late: int = 0
    """Changes that came after a newer one of their key, stored or in the same partition of the batch."""


def tombstone_schema(order: pa.DataType) -> pa.Schema:
    return pa.schema(
        [
            pa.field(KEY, pa.binary()),
            pa.field(ORDER, order),
            pa.field(TOPIC_ID, pa.string()),
            pa.field("partition", pa.int32()),
            pa.field("offset", pa.int64()),
            pa.field(DELETED_MS, pa.int64()),
        ]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeRule:
    """The rule by which changes are compared, and the time for which deletes are remembered."""

    topic_id: str
    """The current topic: its messages follow those of topics that had its name before."""
    key: tuple[str, ...]
    """The columns of the key, for error messages."""
    is_ordered: bool
    """Whether rows have an order value; otherwise all changes of a key must be in one partition."""
    now_ms: int
    remembered_ms: int

    def merge(self, schema: pa.Schema, stored: pa.Table, tombstones: pa.Table, changes: pa.Table) -> MergedBucket:
        """Merge changes into a bucket.

        `schema` has the columns of the table's files. Stored rows and changes have `KEY` and `ORDER` in addition,
        changes also `DELETED`.
        """
        # Most rows of a bucket have keys without changes and stay as they are.
        met, recalled = _rows_with_changed_keys(stored, changes), _rows_with_changed_keys(tombstones, changes)
        present, gone, new = len(met), len(recalled), len(changes)
        shared = [KEY, ORDER, TOPIC_ID, "partition", "offset"]
        rivals = (stored.select(shared).take(met), tombstones.select(shared).take(recalled), changes.select(shared))
        every = pa.concat_tables(rivals)
        if not len(every):
            return MergedBucket(rows=stored.select(schema.names), tombstones=self._remembered(tombstones))
        codes = _codes(every.column(KEY))
        offsets = every.column("offset").to_numpy()
        partitions = every.column("partition").to_numpy()
        is_current = pc.equal(every.column(TOPIC_ID), self.topic_id).to_numpy()
        source = np.repeat(np.array([0, 0, 1], np.int8), [present, gone, new])
        if not self.is_ordered:
            self._check_one_partition(every, codes, partitions, is_current)
        deleted = np.concatenate(
            [np.zeros(present, np.bool_), np.ones(gone, np.bool_), changes.column(DELETED).to_numpy()]
        )
        arrivals = _Arrivals(codes, np.lexsort((source, offsets, is_current, partitions, codes)), partitions)
        ranks, values = np.zeros(len(every), np.int64), every.column(ORDER)
        if self.is_ordered:
            ranks, values = _ranked(values, deleted, arrivals, ~is_current)
        order = np.lexsort((source, partitions, offsets, is_current, ranks, codes))
        sorted_codes = codes[order]
        is_last = np.append(sorted_codes[1:] != sorted_codes[:-1], True)
        has_won = np.zeros(len(every), np.bool_)
        has_won[order[is_last]] = True
        position = np.empty(len(every), np.int64)
        position[order] = np.arange(len(every))
        before = np.maximum(arrivals.greatest_before(position), arrivals.greatest_of(position, source == 0))
        is_late = before > position
        deletes_row = deleted & ~is_late & (before >= 0) & ~deleted[order[before]]
        moments = pa.chunked_array([pa.repeat(pa.scalar(self.now_ms, pa.int64()), new)])
        at = changes.schema.get_field_index(ORDER)
        deletes = changes.set_column(at, changes.schema.field(at), values.slice(present + gone))
        deletes = deletes.append_column(DELETED_MS, moments)
        of_stored, of_tombstones, of_changes = np.split(has_won, [present, present + gone])
        is_delete = deleted[present + gone :]
        return MergedBucket(
            rows=_merge_rows(schema.names, (stored, met, of_stored), (changes, of_changes & ~is_delete)),
            tombstones=self._remembered(
                _merge_rows(
                    tombstones.schema.names, (tombstones, recalled, of_tombstones), (deletes, of_changes & is_delete)
                )
            ),
            upserted=int(np.count_nonzero(of_changes & ~is_delete)),
            deleted=int(np.count_nonzero(deletes_row[present + gone :])),
            late=int(np.count_nonzero(is_late[present + gone :])),
        )

    def _remembered(self, tombstones: pa.Table) -> pa.Table:
        """Return the deletes that are not too old."""
        return tombstones.filter(pc.greater(tombstones.column(DELETED_MS), self.now_ms - self.remembered_ms))

    def _check_one_partition(
        self,
        every: pa.Table,
        codes: npt.NDArray[np.int64],
        partitions: npt.NDArray[np.int32],
        is_current: npt.NDArray[np.bool_],
    ) -> None:
        """Raise `InvalidSetting` if changes of one key are in two partitions, whose offsets cannot be compared."""
        rows = np.flatnonzero(is_current)
        order = rows[np.lexsort((partitions[rows], codes[rows]))]
        is_odd = (codes[order][1:] == codes[order][:-1]) & (partitions[order][1:] != partitions[order][:-1])
        if not is_odd.any():
            return
        at = int(np.flatnonzero(is_odd)[0])
        key = every.column(KEY)[int(order[at])].as_py()
        name = ", ".join(self.key) or "message key"
        raise InvalidSetting(
            f"the {name} {key.decode('utf-8', 'replace')[:100]!r} has changes in partitions "
            f"{partitions[order[at]]} and {partitions[order[at + 1]]}, whose order is not known; name a column that "
            "orders them with order.by (--order-by), or publish each key to one partition"
        )


def _rows_with_changed_keys(rows: pa.Table, changes: pa.Table) -> npt.NDArray[np.int64]:
    """Return the positions of rows whose keys changes name."""
    return np.flatnonzero(pc.is_in(rows.column(KEY), changes.column(KEY).combine_chunks()).to_numpy())


def _merge_rows(
    names: list[str],
    compared: tuple[pa.Table, npt.NDArray[np.int64], npt.NDArray[np.bool_]],
    new: tuple[pa.Table, npt.NDArray[np.bool_]],
) -> pa.Table:
    """Return the rows that stay, in their order, followed by the new ones.

    `compared` are rows, the positions of those that were compared with changes, and which of these have won.
    """
    rows, met, has_won = compared
    stays = np.ones(len(rows), np.bool_)
    stays[met] = has_won
    kept = rows.select(names).filter(pa.array(stays))
    return pa.concat_tables([kept, new[0].select(names).filter(pa.array(new[1]))]).combine_chunks()


def _codes(keys: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """Return the same number for equal keys."""
    encoded = keys.combine_chunks().dictionary_encode()
    return np.asarray(encoded.indices.to_numpy(zero_copy_only=False)).astype(np.int64)


class _Arrivals:
    """The order in which rows of each key arrived in each partition."""

    def __init__(
        self, codes: npt.NDArray[np.int64], order: npt.NDArray[np.int64], partitions: npt.NDArray[np.int32]
    ) -> None:
        self._codes = codes
        self._order = order
        ordered, of = codes[order], partitions[order]
        self._is_first = np.append(True, (ordered[1:] != ordered[:-1]) | (of[1:] != of[:-1]))

    def greatest_until(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return for each row the greatest of the values, none negative, up to it in its key and partition."""
        groups = np.cumsum(self._is_first) * (int(values.max()) + 1)
        found = np.empty_like(values)
        found[self._order] = np.maximum.accumulate(values[self._order] + groups) - groups
        return found

    def greatest_before(self, values: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return for each row the greatest of the values before it in its key and partition; -1 if it is the first."""
        until = self.greatest_until(values)[self._order]
        found = np.empty_like(values)
        found[self._order] = np.where(self._is_first, -1, np.append(-1, until[:-1]))
        return found

    def greatest_of(self, values: npt.NDArray[np.int64], some: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """Return for each row the greatest of the values of some rows of its key; -1 if there are none."""
        found = np.full(int(self._codes.max()) + 1, -1, np.int64)
        np.maximum.at(found, self._codes[some], values[some])
        return found[self._codes]


def _ranked(
    values: pa.ChunkedArray, deleted: npt.NDArray[np.bool_], arrivals: _Arrivals, is_old: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], pa.ChunkedArray]:
    """Return the ranks of order values, equal ones for equal values, and the values.

    A delete without a value takes that of what it deletes: rows before it in its partition, or of an earlier topic.
    """
    ranked = pc.rank(values.combine_chunks(), sort_keys="ascending", tiebreaker="dense")
    ranks = np.asarray(ranked.to_numpy(zero_copy_only=False)).astype(np.int64)
    is_null = np.asarray(values.is_null().to_numpy())
    ranks[is_null] = 0
    lacks = deleted & is_null
    if not lacks.any():
        return ranks, values
    holder = np.zeros(int(ranks.max()) + 1, np.int64)
    holder[ranks] = np.arange(len(ranks))
    taken = np.maximum(arrivals.greatest_until(ranks), arrivals.greatest_of(ranks, is_old))
    ranks = np.where(lacks, taken, ranks)
    return ranks, values.take(pa.array(holder[ranks]))
