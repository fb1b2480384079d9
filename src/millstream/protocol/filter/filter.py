"""Filters of subscriptions: SQL conditions on messages, compiled once and evaluated on whole batches.

    filter_ = compile_filter("payload.total > 1000 AND headers['region'] = 'eu'")
    filter_.matches(batch)

docs/filters.md has the language.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from hashlib import sha256
from operator import or_
from typing import TYPE_CHECKING, Any

from millstream.protocol.filter.batch import ColumnBatch, DecodedBatch, RecordBatch
from millstream.protocol.filter.code import Program
from millstream.protocol.filter.node import Uses, canonical_text
from millstream.protocol.private.subscriptions import LeasedMessage
from millstream.protocol.records.batch import Buffer
from millstream.protocol.records.record import decode_records

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


VERSION_LENGTH = 16


@dataclass(frozen=True, slots=True)
class Filter:
    """A compiled filter. Two filters are equal if their canonical text is."""

    text: str = field(compare=False)
    """The condition as its owner wrote it."""
    canonical: str
    """The canonical text, which differs only if the meaning may."""
    uses: Uses = field(compare=False)
    _program: Program = field(compare=False, repr=False)

    @property
    def version(self) -> str:
        """Identify the filter in the ledger: a digest of the canonical text."""
        return sha256(self.canonical.encode()).hexdigest()[:VERSION_LENGTH]

    def matches(self, batch: DecodedBatch) -> npt.NDArray[np.bool_]:
        """Return for every message whether the condition is TRUE; FALSE and NULL both exclude it."""
        import numpy as np

        program = self._program
        of_batch = [batch.of_batch(source) for source in program.of_batch]
        if not program.columns:
            return np.full(len(batch), program.run(*of_batch), np.bool_)
        return np.array(program.run(*(batch.column(source) for source in program.columns), *of_batch), np.bool_)


def compile_filter(text: str, *, bare_fields: bool = False) -> Filter:
    """Compile a filter; raise `FilterError`, which points at the location, for anything that is not part of the
    language.

    It takes half a millisecond for an ordinary filter, a tenth of a second for the worst, and more for the first one of
    a process, which loads the parser and the evaluation. An event loop that must not stall compiles in a thread. With
    `bare_fields`, payload fields need no `payload.` before them.
    """
    import numpy as np  # noqa: F401

    from millstream.protocol.filter.translation import translate

    node = translate(text, bare_fields=bare_fields)
    program = Program(node)
    return Filter(text, canonical_text(node), Uses.of((*program.columns, *program.of_batch)), program)


def matcher(text: str) -> Callable[[LeasedMessage], bool]:
    """Compile a filter into a predicate on single messages."""
    condition = compile_filter(text)

    def matches(message: LeasedMessage) -> bool:
        batch: Any = RecordBatch(
            [message.record], topic=message.topic, partition=message.partition, uses=condition.uses
        )
        return bool(condition.matches(batch)[0])

    return matches


SCAN_OFFSET_MAX = 2**63 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Messages:
    """Messages to evaluate: stored record batches, and where they come from."""

    topic: str
    partition: int
    batches: Buffer
    start_offset: int = 0
    end_offset: int = SCAN_OFFSET_MAX
    """Messages from this offset on are excluded."""
    aborted: Collection[tuple[int, int]] = ()
    """Aborted transactions, each as producer id and first offset, whose messages are excluded."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The offsets of the messages, and for every filter whether each of them matches."""

    offsets: npt.NDArray[np.int64]
    matches: tuple[npt.NDArray[np.bool_], ...]


def evaluate(messages: Messages, filters: Sequence[Filter]) -> Evaluation:
    """Evaluate with the compiled codec, a few thousand messages at a time; raises `CorruptBatch`."""
    # For a few batches, loading the codec takes longer than it saves.
    from millstream.protocol.records.decoder import decode_columns

    uses = used_by(filters)
    parts = decode_columns(
        messages.batches,
        fields=uses.fields,
        start_offset=messages.start_offset,
        end_offset=messages.end_offset,
        aborted=messages.aborted,
        verify_crc=False,
    )
    batches = (
        (columns.offsets, ColumnBatch(columns, topic=messages.topic, partition=messages.partition, uses=uses))
        for columns in parts
    )
    return _joined(batches, filters)


def evaluate_few(messages: Messages, filters: Sequence[Filter], *, decompressed_bytes_max: int) -> Evaluation:
    """Evaluate in plain Python, for a handful of messages; raises `CorruptBatch` for what decompresses to more."""
    import numpy as np

    decoded = decode_records(
        messages.batches,
        aborted=messages.aborted,
        verify_crc=False,
        decompressed_bytes_max=decompressed_bytes_max,
    )
    records = [record for record in decoded if messages.start_offset <= record.offset < messages.end_offset]
    batch = RecordBatch(records, topic=messages.topic, partition=messages.partition, uses=used_by(filters))
    return _joined([(np.array([record.offset for record in records], np.int64), batch)], filters)


def used_by(filters: Sequence[Filter]) -> Uses:
    """Return the parts that all filters read together."""
    return reduce(or_, (compiled.uses for compiled in filters), Uses())


def _joined(parts: Iterable[tuple[npt.NDArray[np.int64], DecodedBatch]], filters: Sequence[Filter]) -> Evaluation:
    import numpy as np

    offsets = [np.empty(0, np.int64)]
    matches: list[list[npt.NDArray[np.bool_]]] = [[np.empty(0, np.bool_)] for _ in filters]
    for found, batch in parts:
        offsets.append(found)
        for compiled, column in zip(filters, matches, strict=True):
            column.append(compiled.matches(batch))
    return Evaluation(np.concatenate(offsets), tuple(np.concatenate(column) for column in matches))
