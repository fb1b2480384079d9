"""The history checker: finds broker errors from what clients sent, had acknowledged and read.

    history = History()
    history.sent("producer-1", 7, "orders", 0)                      # before the message is sent
    history.acknowledged("producer-1", 7, "orders", 0, 41)          # when the broker has confirmed offset 41
    history.positioned("audit", "orders", 0, 0)                     # a reader was assigned, or sought
    history.read("audit", "orders", 0, 41, "producer-1", 7)         # in the order in which the reader saw it
    report = history.check(complete=["audit"])                      # "audit" has read everything to the end

A message is its producer and a sequence that the producer counts up with each message. The members of a group are
called `group/member`: each must read in order, and together they must miss nothing. Findings:

    lost          acknowledged, but never read
    duplicated    one message at two offsets, although its producer is idempotent
    reordered     a producer's messages are stored in a different order than they were sent
    skipped       a reader went past an offset without reading it
    inconsistent  an acknowledged offset that is not where the message is, two messages at one offset,
                  two readers that saw different messages at one offset, a message in another partition
    phantom       read or acknowledged, but never sent

Offsets are assumed to be dense, as in topics that are neither compacted nor transactional (for the latter, see
`transaction_history.py`). An event costs 12 to 24 bytes, and checking sorts arrays instead of keeping objects, so
histories of millions of events are fine.

As a command: `python -m millstream_testing.history FILE` reads one JSON object per line (as `History.save` writes
them), prints its findings and exits with 0 if there are none, 1 if there are some, 2 if the file cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from millstream_testing.finding import SHOWN_MAX, Finding, Kind

SEQUENCE_BITS = 40
UNKNOWN = -1
_POSITIONED = -1
_GAPS_MAX = 1000

Integers: TypeAlias = NDArray[np.int64]


@dataclass(slots=True)
class Report:
    """All findings. `findings` holds the first few of each kind, `counts` how many there are."""

    sent: int
    acknowledged: int
    read: int
    rewound: int = 0
    counts: Counter[Kind] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.counts

    def __str__(self) -> str:
        lines = [
            f"{self.sent:,} sent, {self.acknowledged:,} acknowledged, {self.read:,} read, {self.rewound:,} rewound"
        ]
        if self.ok:
            lines.append("nothing lost, duplicated, reordered, skipped, inconsistent or phantom")
        lines.extend(f"{kind}: {count:,}" for kind, count in self.counts.items())
        lines.extend(f"  {finding}" for finding in self.findings)
        return "\n".join(lines)


class Sent(msgspec.Struct, frozen=True, tag="sent", tag_field="event"):
    """A producer is about to send a message; partition -1 leaves the choice to the client."""

    producer: str
    sequence: int
    topic: str
    partition: int = UNKNOWN


class Acknowledged(msgspec.Struct, frozen=True, tag="acknowledged", tag_field="event"):
    """The broker has acknowledged a message; offset -1 if it did not return one."""

    producer: str
    sequence: int
    topic: str
    partition: int
    offset: int = UNKNOWN


class Positioned(msgspec.Struct, frozen=True, tag="positioned", tag_field="event"):
    """A reader continues from here; offset -1 means from its next read."""

    consumer: str
    topic: str
    partition: int
    offset: int = UNKNOWN


class Read(msgspec.Struct, frozen=True, tag="read", tag_field="event"):
    """A reader received a message."""

    consumer: str
    topic: str
    partition: int
    offset: int
    producer: str
    sequence: int


class Repeats(msgspec.Struct, frozen=True, tag="repeats", tag_field="event"):
    """A producer is not idempotent: its messages may be stored twice."""

    producer: str


Event: TypeAlias = Sent | Acknowledged | Positioned | Read | Repeats


class _Names:
    """Maps names to numbers, so that events consist of numbers only."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str, int], int] = {}
        self._names: list[tuple[str, int]] = []

    def number(self, name: str, index: int = 0) -> int:
        found = self._numbers.get((name, index))
        if found is None:
            found = self._numbers[name, index] = len(self._names)
            self._names.append((name, index))
        return found

    def name(self, number: int) -> tuple[str, int]:
        return self._names[number]

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self._names)


class History:
    """The actions of clients and their results, in columns."""

    def __init__(self) -> None:
        self._producers = _Names()
        self._consumers = _Names()
        self._partitions = _Names()
        self._repeating: set[int] = set()
        self._sent_message, self._sent_partition = array("q"), array("i")
        self._acked_message, self._acked_partition, self._acked_offset = array("q"), array("i"), array("q")
        self._read_consumer, self._read_partition = array("i"), array("i")
        self._read_offset, self._read_message = array("q"), array("q")

    def allow_duplicates(self, producer: str) -> None:
        """Declare that a producer is not idempotent: its messages may be stored twice."""
        self._repeating.add(self._producers.number(producer))

    def sent(self, producer: str, sequence: int, topic: str, partition: int = UNKNOWN) -> None:
        """Record a message before it is sent; -1 leaves the partition to the client."""
        self._sent_message.append(self._message(producer, sequence))
        self._sent_partition.append(UNKNOWN if partition < 0 else self._partitions.number(topic, partition))

    def acknowledged(self, producer: str, sequence: int, topic: str, partition: int, offset: int = UNKNOWN) -> None:
        """Record an acknowledged message; the offset is negative if the broker did not return one."""
        self._acked_message.append(self._message(producer, sequence))
        self._acked_partition.append(self._partitions.number(topic, partition))
        self._acked_offset.append(max(offset, UNKNOWN))

    def positioned(self, consumer: str, topic: str, partition: int, offset: int = UNKNOWN) -> None:
        """Record that a reader continues from `offset`; -1 means from its next read."""
        self._record_read(consumer, topic, partition, max(offset, UNKNOWN), _POSITIONED)

    def read(self, consumer: str, topic: str, partition: int, offset: int, producer: str, sequence: int) -> None:
        """Record that a reader received a message. A member of a group is called `group/member`."""
        self._record_read(consumer, topic, partition, offset, self._message(producer, sequence))

    def _record_read(self, consumer: str, topic: str, partition: int, offset: int, message: int) -> None:
        self._read_consumer.append(self._consumers.number(consumer))
        self._read_partition.append(self._partitions.number(topic, partition))
        self._read_offset.append(offset)
        self._read_message.append(message)

    def _message(self, producer: str, sequence: int) -> int:
        if not 0 <= sequence < 1 << SEQUENCE_BITS:
            raise ValueError(f"a sequence lies between 0 and 2**{SEQUENCE_BITS}, not {sequence}")
        return self._producers.number(producer) << SEQUENCE_BITS | sequence

    def _unpack(self, message: int) -> tuple[str, int]:
        return self._producers.name(message >> SEQUENCE_BITS)[0], message & (1 << SEQUENCE_BITS) - 1

    def check(self, *, complete: Iterable[str] = ()) -> Report:
        """Return all findings. The readers named in `complete` have read everything to the end."""
        return _Check(self, complete).run()

    @property
    def acknowledgements(self) -> int:
        return len(self._acked_message)

    def next_offsets(self, consumer: str, topic: str) -> dict[int, int]:
        """Return, by partition, the offset after the last one that a reader, or any member of a group, has read."""
        of_consumer = [name.partition("/")[0] == consumer or name == consumer for name, _ in self._consumers]
        reads = _column(self._read_message) != _POSITIONED
        reads &= np.array([*of_consumer, False], dtype=np.bool_)[_column(self._read_consumer)]
        partitions, offsets = _column(self._read_partition)[reads], _column(self._read_offset)[reads]
        found = {}
        for number in np.unique(partitions).tolist():
            name, index = self._partitions.name(number)
            if name == topic:
                found[index] = int(offsets[partitions == number].max()) + 1
        return found

    def add(self, event: Event) -> None:
        match event:
            case Sent():
                self.sent(event.producer, event.sequence, event.topic, event.partition)
            case Acknowledged():
                self.acknowledged(event.producer, event.sequence, event.topic, event.partition, event.offset)
            case Positioned():
                self.positioned(event.consumer, event.topic, event.partition, event.offset)
            case Read():
                self.read(event.consumer, event.topic, event.partition, event.offset, event.producer, event.sequence)
            case Repeats():
                self.allow_duplicates(event.producer)

    def events(self) -> Iterator[Event]:
        """Return everything recorded, as events of a file."""
        for number in sorted(self._repeating):
            yield Repeats(self._producers.name(number)[0])
        for message, place in zip(self._sent_message, self._sent_partition, strict=True):
            yield Sent(*self._unpack(message), *(("", UNKNOWN) if place < 0 else self._partitions.name(place)))
        for message, place, offset in zip(self._acked_message, self._acked_partition, self._acked_offset, strict=True):
            yield Acknowledged(*self._unpack(message), *self._partitions.name(place), offset)
        reads = zip(self._read_consumer, self._read_partition, self._read_offset, self._read_message, strict=True)
        for consumer, place, offset, message in reads:
            where = (self._consumers.name(consumer)[0], *self._partitions.name(place), offset)
            yield Positioned(*where) if message == _POSITIONED else Read(*where, *self._unpack(message))

    def save(self, path: Path) -> None:
        """Write one JSON object per line."""
        encoder = msgspec.json.Encoder()
        with path.open("wb") as file:
            for event in self.events():
                file.write(encoder.encode(event) + b"\n")

    @classmethod
    def load(cls, path: Path) -> History:
        """Read what `save` wrote; raise `ValueError` with the number of the line that cannot be read."""
        history = cls()
        decoder = msgspec.json.Decoder(Event)
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                try:
                    if line.strip():
                        history.add(decoder.decode(line))
                except (msgspec.MsgspecError, ValueError) as error:
                    raise ValueError(f"{path}, line {number}: {error}") from error
        return history


class _Gap(NamedTuple):
    """Offsets that a reader skipped."""

    consumer: int
    partition: int
    start: int
    end: int

    def within(self, other: _Gap) -> bool:
        same = self.consumer == other.consumer and self.partition == other.partition
        return same and self.start >= other.start and self.end <= other.end


class _Check:
    """A pass over a history; each method looks for one kind of finding."""

    def __init__(self, history: History, complete: Iterable[str]) -> None:
        self._history = history
        self._complete = [history._consumers.number(name) for name in complete]
        self._sent = _unique_rows(history._sent_message, history._sent_partition)
        # Both tables have the columns partition, offset and message, sorted in that order, each row once.
        self._acked = _unique_rows(history._acked_partition, history._acked_offset, history._acked_message)
        is_read = _column(history._read_message) != _POSITIONED
        self._consumer = _column(history._read_consumer)
        self._partition = _column(history._read_partition)
        self._offset = _column(history._read_offset)
        self._is_read = is_read
        self._placed = _unique_rows(
            self._partition[is_read], self._offset[is_read], _column(history._read_message)[is_read]
        )
        self._lost: Integers = np.empty((0, 3), dtype=np.int64)
        self._report = Report(
            sent=len(np.unique(self._sent[:, 0])),
            acknowledged=len(np.unique(self._acked[:, 2])),
            read=int(is_read.sum()),
        )

    def run(self) -> Report:
        self._find_phantoms()
        self._find_lost()
        self._find_wrong_places()
        certain = self._find_conflicts()
        first = self._find_duplicated(certain)
        self._find_reordered(first)
        self._find_skipped()
        return self._report

    def _add(self, kind: Kind, rows: Integers, describe: Callable[[int], str]) -> None:
        """Count rows of (partition, offset, message) as findings, and describe the first few."""
        shown = min(len(rows), max(0, SHOWN_MAX - self._report.counts[kind]))
        if len(rows):
            self._report.counts[kind] += len(rows)
        for row in range(shown):
            partition, offset, _ = rows[row].tolist()
            topic, index = self._history._partitions.name(partition)
            self._report.findings.append(Finding(kind, topic, index, offset, describe(row)))

    def _describe(self, message: int) -> str:
        producer, sequence = self._history._unpack(int(message))
        return f"message {sequence} of {producer}"

    def _find_phantoms(self) -> None:
        read = self._placed[~np.isin(self._placed[:, 2], self._sent[:, 0])]
        self._add(Kind.PHANTOM, read, lambda row: f"{self._describe(read[row, 2])} was read but never sent")
        unsent = ~np.isin(self._acked[:, 2], self._sent[:, 0]) & ~np.isin(self._acked[:, 2], self._placed[:, 2])
        acked = self._acked[unsent]
        self._add(Kind.PHANTOM, acked, lambda row: f"{self._describe(acked[row, 2])} was acknowledged but never sent")

    def _find_lost(self) -> None:
        unread = np.isin(self._acked[:, 2], self._sent[:, 0]) & ~np.isin(self._acked[:, 2], self._placed[:, 2])
        lost = self._acked[unread]
        self._add(Kind.LOST, lost, lambda row: f"{self._describe(lost[row, 2])} was acknowledged and never read")
        self._lost = lost

    def _find_wrong_places(self) -> None:
        """Find acknowledgements with a position that readers contradict, and messages in the wrong partition."""
        seen = np.isin(self._acked[:, 2], self._placed[:, 2]) & (self._acked[:, 1] >= 0)
        acked = self._acked[seen]
        wrong = acked[~_in_rows(acked, self._placed)]
        self._add(
            Kind.INCONSISTENT,
            wrong,
            lambda row: (
                f"{self._describe(wrong[row, 2])} was acknowledged here, read at {self._places_of(wrong[row, 2])}"
            ),
        )
        sent = self._sent[self._sent[:, 1] >= 0]
        placed = self._placed[np.isin(self._placed[:, 2], sent[:, 0])]
        strayed = placed[~_in_rows(placed[:, [2, 0]], sent)]
        self._add(
            Kind.INCONSISTENT, strayed, lambda row: f"{self._describe(strayed[row, 2])} was sent to another partition"
        )

    def _places_of(self, message: int) -> str:
        places = self._placed[self._placed[:, 2] == message][:3].tolist()
        named = [(*self._history._partitions.name(partition), offset) for partition, offset, _ in places]
        return ", ".join(f"{topic}-{index}@{offset}" for topic, index, offset in named)

    def _find_conflicts(self) -> Integers:
        """Find offsets that were assigned to two messages; return the positions that are certain."""
        known = self._acked[self._acked[:, 1] >= 0]
        claims = _unique_rows(*np.concatenate([self._placed, known]).T)
        rows = np.flatnonzero((np.diff(claims[:, :2], axis=0) == 0).all(axis=1))
        one, other = claims[rows], claims[rows + 1]
        self._add(
            Kind.INCONSISTENT,
            one,
            lambda row: f"holds both {self._describe(one[row, 2])} and {self._describe(other[row, 2])}",
        )
        certain: Integers = self._placed[~_in_rows(self._placed[:, :2], one[:, :2])]
        return certain

    def _find_duplicated(self, placed: Integers) -> Integers:
        """Find messages at two offsets; return the first position of each message."""
        by_message = placed[np.lexsort((placed[:, 1], placed[:, 0], placed[:, 2]))]
        again = ~_starts(by_message[:, 2:])
        idempotent = ~np.isin(by_message[:, 2] >> SEQUENCE_BITS, list(self._history._repeating))
        duplicated = by_message[again & idempotent]
        self._add(
            Kind.DUPLICATED,
            duplicated,
            lambda row: f"{self._describe(duplicated[row, 2])} is at {self._places_of(duplicated[row, 2])}",
        )
        first: Integers = by_message[~again]
        return first

    def _find_reordered(self, first: Integers) -> None:
        ordered = first[np.lexsort((first[:, 1], first[:, 2] >> SEQUENCE_BITS, first[:, 0]))]
        owner = np.stack([ordered[:, 0], ordered[:, 2] >> SEQUENCE_BITS], axis=1)
        rows = np.flatnonzero((np.diff(owner, axis=0) == 0).all(axis=1) & (np.diff(ordered[:, 2]) < 0))
        before, behind = ordered[rows], ordered[rows + 1]
        self._add(
            Kind.REORDERED,
            behind,
            lambda row: f"{self._describe(behind[row, 2])} is stored after {self._describe(before[row, 2])}",
        )

    def _find_skipped(self) -> None:
        # Wider gaps come first, so that a gap within a reported one is not reported again.
        gaps = sorted(self._gaps_in_order() | self._gaps_in_cover(), key=lambda gap: gap.start - gap.end)
        reported: list[_Gap] = []
        for gap in gaps[:_GAPS_MAX]:
            if not any(gap.within(other) for other in reported) and not self._is_only_lost(gap):
                reported.append(gap)
        reported.extend(gaps[_GAPS_MAX:])
        rows = np.array([(gap.partition, gap.start, UNKNOWN) for gap in reported], dtype=np.int64).reshape(-1, 3)
        self._add(
            Kind.SKIPPED,
            rows,
            lambda row: (
                f"{self._history._consumers.name(reported[row].consumer)[0]} went past it and on to {reported[row].end}"
            ),
        )

    def _gaps_in_order(self) -> set[_Gap]:
        """Find jumps forward from one read to the next, or from a stated position to the first read."""
        order = np.lexsort((np.arange(len(self._consumer)), self._partition, self._consumer))
        consumer, partition = self._consumer[order], self._partition[order]
        offset, is_read = self._offset[order], self._is_read[order]
        expected = np.where(is_read, offset + 1, offset)[:-1]
        same = (np.diff(consumer) == 0) & (np.diff(partition) == 0) & is_read[1:] & (expected >= 0)
        self._report.rewound += int((same & is_read[:-1] & (offset[1:] < expected)).sum())
        rows = np.flatnonzero(same & (offset[1:] > expected))
        columns = (consumer[rows], partition[rows], expected[rows], offset[rows + 1])
        return set(map(_Gap, *(column.tolist() for column in columns)))

    def _gaps_in_cover(self) -> set[_Gap]:
        """Find offsets that a reader or group never read between its first and last, or up to the log's end."""
        groups = [name.partition("/")[0] for name, _ in self._history._consumers]
        group_of = np.array([self._history._consumers.number(group) for group in groups], dtype=np.int64)
        rows = self._is_read
        read = _unique_rows(group_of[self._consumer[rows]], self._partition[rows], self._offset[rows])
        same = (np.diff(read[:, :2], axis=0) == 0).all(axis=1)
        rows = np.flatnonzero(same & (np.diff(read[:, 2]) > 1))
        begin, end = read[rows].tolist(), read[rows + 1].tolist()
        gaps = {_Gap(before[0], before[1], before[2] + 1, after[2]) for before, after in zip(begin, end, strict=True)}
        for consumer in self._complete:
            gaps |= self._gaps_at_ends(consumer, read[read[:, 0] == consumer])
        return gaps

    def _gaps_at_ends(self, consumer: int, read: Integers) -> set[_Gap]:
        gaps = set()
        for partition in np.unique(self._placed[:, 0]).tolist():
            offsets = self._placed[self._placed[:, 0] == partition][:, 1]
            first, end = int(offsets[0]), int(offsets[-1]) + 1
            mine = read[read[:, 1] == partition][:, 2]
            if not len(mine):
                gaps.add(_Gap(consumer, partition, first, end))
                continue
            if mine[0] > first:
                gaps.add(_Gap(consumer, partition, first, int(mine[0])))
            if mine[-1] + 1 < end:
                gaps.add(_Gap(consumer, partition, int(mine[-1]) + 1, end))
        return gaps

    def _is_only_lost(self, gap: _Gap) -> bool:
        """Whether everything in a gap is lost, so that the reader could not have read it."""
        lost = self._lost[self._lost[:, 0] == gap.partition][:, 1]
        return len(np.unique(lost[(lost >= gap.start) & (lost < gap.end)])) == gap.end - gap.start


def _column(values: Sequence[int] | Integers) -> Integers:
    if isinstance(values, array):
        return np.frombuffer(values, dtype=f"i{values.itemsize}").astype(np.int64)
    return np.asarray(values, dtype=np.int64)


def _starts(table: Integers) -> NDArray[np.bool_]:
    """Return which rows of a sorted table differ from the row before."""
    starts = np.ones(len(table), dtype=np.bool_)
    starts[1:] = (np.diff(table, axis=0) != 0).any(axis=1)
    return starts


def _unique_rows(*columns: Sequence[int] | Integers) -> Integers:
    table = np.stack([_column(column) for column in columns], axis=1)
    table = table[np.lexsort(tuple(reversed(table.T)))]
    unique: Integers = table[_starts(table)]
    return unique


def _in_rows(rows: Integers, table: Integers) -> NDArray[np.bool_]:
    """Return which rows of the first table are also in the second."""
    both = np.concatenate([rows, table])
    order = np.lexsort(tuple(reversed(both.T)))
    group = np.cumsum(_starts(both[order])) - 1
    in_table = np.zeros(len(both), dtype=np.bool_)
    in_table[group[order >= len(rows)]] = True
    found = np.zeros(len(both), dtype=np.bool_)
    found[order] = in_table[group]
    return found[: len(rows)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a file."""
    parser = argparse.ArgumentParser(prog="python -m millstream_testing.history", description="Check a history.")
    parser.add_argument("file", type=Path, help="one JSON event per line")
    parser.add_argument("--complete", action="append", default=[], help="a reader that has read everything")
    given = parser.parse_args(arguments)
    try:
        history = History.load(given.file)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    report = history.check(complete=given.complete)
    print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
