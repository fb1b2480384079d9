"""The checker of transactions: finds broker errors from what programs did and readers saw.

Findings about a recorded history (`transaction_history.py`):

    aborted read        a reader of committed data received a message of an aborted transaction
    read before commit  ... or of a transaction whose commit had not been requested yet
    torn                some messages of a transaction are present and others are not, or its messages are present and
                        its committed offsets are not, or the other way round
    lost                a committed transaction left nothing; a source message before the group's offset was never
                        processed
    duplicated          a message at two offsets; two messages for one source message
    skipped             a reader skipped a message that it should have seen, or a program one of its source
    went back           a reader got an earlier offset, or a group's committed offset went back
    reordered           a producer's messages are stored in a different order than they were sent
    inconsistent        two messages at one offset, a message in another partition, an offset that no transaction
                        committed
    phantom             read, but never written

A transaction whose commit was requested without a response may have committed or not, but not in part.

As a command: `python -m millstream_testing.transaction_check FILE --complete audit` reads one JSON object per line (as
`TransactionHistory.save` writes them), prints its findings and exits with 0 if there are none, 1 if there are some,
2 if the file cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from millstream_testing.finding import SHOWN_MAX, Finding, Kind
from millstream_testing.transaction_history import (
    NOT_A_MESSAGE,
    Key,
    OffsetObserved,
    Output,
    Polls,
    Transaction,
    TransactionHistory,
)

Position = tuple[str, int, int]
"""Topic, partition and offset."""

Source = tuple[str, int, int]
"""A message of the source, as a group sees it: the group, its partition and its offset."""


@dataclass(slots=True)
class Report:
    """All findings. `findings` holds the first few of each kind, `counts` how many there are."""

    committed: int = 0
    aborted: int = 0
    unknown: int = 0
    visible: int = 0
    polled: int = 0
    counts: Counter[Kind] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return not self.counts

    def add(self, kind: Kind, position: Position, detail: str) -> None:
        """Count a finding, and keep it if it is one of the first."""
        self.counts[kind] += 1
        if self.counts[kind] <= SHOWN_MAX:
            self.findings.append(Finding(kind, *position, detail))

    def __str__(self) -> str:
        transactions = (
            f"{self.committed:,} transactions committed, {self.aborted:,} aborted, {self.unknown:,} without a response"
        )
        lines = [f"{transactions}; {self.visible:,} messages visible, polled {self.polled:,} times"]
        if self.ok:
            lines.append(
                "nothing torn, lost, duplicated, skipped, out of order, read too early or read although aborted"
            )
        lines.extend(f"{kind}: {count:,}" for kind, count in self.counts.items())
        lines.extend(f"  {finding}" for finding in self.findings)
        return "\n".join(lines)


def check(history: TransactionHistory, *, complete: Iterable[str] = ()) -> Report:
    """Return all findings. The readers named in `complete` have read everything to the end."""
    return _Check(history, complete).run()


class _Check:
    """A pass over a history; each method looks for one kind of finding."""

    def __init__(self, history: TransactionHistory, complete: Iterable[str]) -> None:
        self._history = history
        self._complete = frozenset(complete)
        self._report = Report()
        self._at: dict[Position, int] = {}
        """The message at each position, as the first reader saw it."""
        self._first: dict[int, Position] = {}
        """The first known position of each message."""
        self._visible: dict[int, Position] = {}
        """The messages that readers of committed data received and may receive."""
        self._reported: set[tuple[Kind, Position]] = set()
        self._torn: set[Key] = set()
        self._explained: set[Source] = set()
        """Source messages that were reported as lost or torn; they are not reported twice."""

    def run(self) -> Report:
        self._count()
        self._find_positions()
        self._find_wrong_reads()
        self._report.visible = len(self._visible)
        self._find_reordered()
        self._find_wrong_polls()
        self._find_wrong_inputs()
        self._find_wrong_offsets()
        effects = self._find_duplicate_effects()
        if self._complete:
            self._find_torn()
            self._find_wrong_effects(effects)
        return self._report

    # -- the contents ------------------------------------------------------------------------------------------

    def _count(self) -> None:
        for transaction in self._history.transactions.values():
            self._report.committed += transaction.committed is True
            self._report.aborted += transaction.is_aborted
            self._report.unknown += transaction.committed is None and not transaction.is_aborted

    def _polls(self, *, committed: bool = False) -> Iterator[tuple[str, Position, int, int]]:
        """Yield every poll of a message: reader, position, message and time."""
        for (consumer, topic, partition), polls in self._history.polls.items():
            if self._history.readers[consumer] or not committed:
                for offset, message, at in polls:
                    if message != NOT_A_MESSAGE:
                        yield consumer, (topic, partition, offset), message, at

    def _transaction(self, message: int) -> Transaction | None:
        producer, number, _ = self._history.messages[message]
        return self._history.transactions.get((producer, number))

    def _output(self, message: int) -> Output | None:
        transaction = self._transaction(message)
        return None if transaction is None else transaction.output(self._history.messages[message][2])

    def _describe(self, message: int) -> str:
        producer, number, index = self._history.messages[message]
        return f"message {index} of transaction {number} of {producer}"

    # -- positions and reads -----------------------------------------------------------------------------------

    def _find_positions(self) -> None:
        """Find the position of each message; report those never written, misplaced or stored twice."""
        for consumer, position, message, _ in self._polls():
            self._report.polled += 1
            known = self._at.setdefault(position, message)
            if known != message:
                self._add_once(
                    Kind.INCONSISTENT,
                    position,
                    f"holds {self._describe(known)}, for {consumer} {self._describe(message)}",
                )
                continue
            if self._first.setdefault(message, position) == position:
                continue
            self._add_once(
                Kind.DUPLICATED, position, f"{self._describe(message)} is at {_format(self._first[message])} too"
            )
        for message, position in self._first.items():
            output = self._output(message)
            if output is None:
                self._report.add(Kind.PHANTOM, position, f"{self._describe(message)} was read but never written")
            elif (output.topic, output.partition) != position[:2]:
                self._report.add(
                    Kind.INCONSISTENT, position, f"{self._describe(message)} was sent to another partition"
                )

    def _add_once(self, kind: Kind, position: Position, detail: str) -> None:
        """Add a finding unless the position already has one of that kind."""
        if (kind, position) not in self._reported:
            self._reported.add((kind, position))
            self._report.add(kind, position, detail)

    def _find_wrong_reads(self) -> None:
        """Find what readers of committed data received too early or should never have received."""
        for consumer, position, message, at in self._polls(committed=True):
            transaction = self._transaction(message)
            if transaction is None:
                continue
            what = f"{consumer} received {self._describe(message)}"
            asked_at = transaction.commit_requested_at
            if transaction.is_aborted:
                self._add_once(Kind.ABORTED_READ, position, f"{what}, which was aborted")
            elif asked_at is None:
                self._add_once(Kind.EARLY_READ, position, f"{what}, whose commit was never requested")
            else:
                self._visible.setdefault(message, position)
                if at < asked_at:
                    early_ms = (asked_at - at) / 1e6
                    self._add_once(
                        Kind.EARLY_READ, position, f"{what} {early_ms:.3f} ms before its commit was requested"
                    )

    def _find_reordered(self) -> None:
        last: dict[tuple[str, int, str], int] = {}
        for position in sorted(self._at):
            message = self._at[position]
            if self._first.get(message) != position:
                continue
            stream = (position[0], position[1], self._history.messages[message][0])
            before = last.get(stream)
            last[stream] = message
            if before is not None and self._history.messages[before] > self._history.messages[message]:
                self._report.add(
                    Kind.REORDERED, position, f"{self._describe(message)} is stored after {self._describe(before)}"
                )

    # -- polls -------------------------------------------------------------------------------------------------

    def _find_wrong_polls(self) -> None:
        everything, committed = self._offsets(self._first), self._offsets(self._committed_messages())
        for (consumer, topic, partition), polls in self._history.polls.items():
            readable = committed if self._history.readers[consumer] else everything
            self._check_reader(consumer, (topic, partition), polls, readable[topic, partition])
        for consumer in sorted(self._complete):
            readable = committed if self._history.readers.get(consumer, True) else everything
            for position in set(readable) - {key[1:] for key in self._history.polls if key[0] == consumer}:
                self._find_skipped(consumer, position, readable[position], 0, None)

    def _committed_messages(self) -> dict[int, Position]:
        """Return the messages that readers of committed data must receive."""
        committed = dict(self._visible)
        for message, position in self._first.items():
            transaction = self._transaction(message)
            if transaction is not None and transaction.committed:
                committed[message] = position
        return committed

    def _offsets(self, positions: Mapping[int, Position]) -> defaultdict[tuple[str, int], list[int]]:
        offsets: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for topic, partition, offset in sorted(set(positions.values())):
            offsets[topic, partition].append(offset)
        return offsets

    def _check_reader(self, consumer: str, where: tuple[str, int], polls: Polls, readable: Sequence[int]) -> None:
        """Check what one reader received of one partition, in order."""
        next_offset = -1
        for offset, message, _ in polls:
            if message == NOT_A_MESSAGE:
                next_offset = offset
                continue
            if offset < next_offset:
                detail = f"{consumer} received this after {next_offset - 1}"
                self._report.add(Kind.WENT_BACK, (*where, offset), detail)
            elif next_offset >= 0:
                self._find_skipped(consumer, where, readable, next_offset, offset)
            next_offset = offset + 1
        if consumer in self._complete:
            self._find_skipped(consumer, where, readable, max(next_offset, 0), None)

    def _find_skipped(
        self, consumer: str, where: tuple[str, int], readable: Sequence[int], start: int, end: int | None
    ) -> None:
        first = bisect_left(readable, start)
        last = len(readable) if end is None else bisect_left(readable, end)
        if first < last:
            on = "stopped before it" if end is None else f"went on to {end}"
            self._report.add(Kind.SKIPPED, (*where, readable[first]), f"{consumer} {on}; {last - first} not read")

    def _find_wrong_inputs(self) -> None:
        for (producer, number), transaction in self._history.transactions.items():
            got = {(output.source_partition, output.source_offset) for output in transaction.begun.outputs}
            for input_ in transaction.begun.inputs:
                missing = [at for at in range(input_.first, input_.next) if (input_.partition, at) not in got]
                if missing:
                    position = (transaction.begun.source, input_.partition, missing[0])
                    self._report.add(Kind.SKIPPED, position, f"transaction {number} of {producer} did not receive it")

    # -- offsets of groups -------------------------------------------------------------------------------------

    def _find_wrong_offsets(self) -> None:
        committing: defaultdict[Position, list[Transaction]] = defaultdict(list)
        for transaction in self._history.transactions.values():
            for input_ in transaction.begun.inputs:
                committing[transaction.begun.group, input_.partition, input_.next].append(transaction)
        last: dict[tuple[str, str, int], int] = {}
        for observed in self._history.observed_offsets:
            stream = (observed.observer, observed.group, observed.partition)
            before = last.get(stream, 0)
            last[stream] = observed.offset
            if observed.offset < before:
                position = (observed.topic, observed.partition, observed.offset)
                self._report.add(Kind.WENT_BACK, position, f"the offset of {observed.group} was {before} before")
            elif observed.offset > before:
                self._check_offset(
                    observed,
                    committing[observed.group, observed.partition, observed.offset],
                )

    def _check_offset(self, observed: OffsetObserved, by: Sequence[Transaction]) -> None:
        position = (observed.topic, observed.partition, observed.offset)
        what = f"{observed.observer} saw this offset of {observed.group}"
        if not by:
            self._report.add(Kind.INCONSISTENT, position, f"{what}, which no transaction committed")
            return
        if any(
            transaction.may_be_committed and (transaction.commit_requested_at or 0) <= observed.at for transaction in by
        ):
            return
        if all(transaction.is_aborted for transaction in by):
            self._report.add(Kind.ABORTED_READ, position, f"{what}; every transaction that commits it was aborted")
        else:
            self._report.add(Kind.EARLY_READ, position, f"{what} before any commit with it was requested")

    # -- whole transactions ------------------------------------------------------------------------------------

    def _find_torn(self) -> None:
        seen: defaultdict[Key, set[int]] = defaultdict(set)
        for message in self._visible:
            producer, number, index = self._history.messages[message]
            seen[producer, number].add(index)
        for key, transaction in self._history.transactions.items():
            readable = seen.get(key, set())
            missing = [index for index in range(len(transaction.begun.outputs)) if index not in readable]
            if missing and (readable or transaction.committed):
                self._report_missing(key, transaction, missing, torn=bool(readable))

    def _report_missing(self, key: Key, transaction: Transaction, missing: Sequence[int], *, torn: bool) -> None:
        self._torn.add(key)
        outputs = [transaction.begun.outputs[index] for index in missing]
        self._explained.update(_source(transaction, output) for output in outputs)
        total = len(transaction.begun.outputs)
        ended = "was committed" if transaction.committed else "may be committed"
        detail = f"transaction {key[1]} of {key[0]} {ended}, and {len(missing)} of its {total} messages are missing"
        self._report.add(Kind.TORN if torn else Kind.LOST, (outputs[0].topic, outputs[0].partition, -1), detail)

    def _find_duplicate_effects(self) -> dict[tuple[Source, str], int]:
        """Map source messages to their outputs in each topic, and find duplicates."""
        effects: dict[tuple[Source, str], int] = {}
        for message, position in self._visible.items():
            transaction, output = self._transaction(message), self._output(message)
            if transaction is None or output is None:
                continue
            source = _source(transaction, output)
            other = effects.setdefault((source, output.topic), message)
            if other != message:
                what = f"{self._describe(message)} and {self._describe(other)} at {_format(self._visible[other])}"
                self._report.add(Kind.DUPLICATED, position, f"{what} both come from {_format(source)}")
        return effects

    def _find_wrong_effects(self, effects: Mapping[tuple[Source, str], int]) -> None:
        """Check that each source message has its outputs if and only if the group's offset is past it."""
        ends = {(observed.group, observed.partition): observed for observed in self._history.observed_offsets}
        for (source, _), message in effects.items():
            end, key = ends.get(source[:2]), self._history.messages[message][:2]
            if end is not None and source[2] >= end.offset and key not in self._torn:
                self._torn.add(key)
                detail = f"{self._describe(message)} comes from {_format(source)}, but the group is at {end.offset}"
                self._report.add(Kind.TORN, self._visible[message], detail)
        self._find_missing_effects(ends.values(), effects)

    def _find_missing_effects(self, ends: Iterable[OffsetObserved], effects: Mapping[tuple[Source, str], int]) -> None:
        attempts: defaultdict[Source, dict[str, Key]] = defaultdict(dict)
        for key, transaction in self._history.transactions.items():
            for output in transaction.begun.outputs:
                attempts[_source(transaction, output)][output.topic] = key
        for end in ends:
            for offset in range(end.offset):
                source, position = (end.group, end.partition, offset), (end.topic, end.partition, offset)
                if source not in attempts:
                    self._report.add(Kind.LOST, position, f"{end.group} is past it but never processed it")
                for topic, key in attempts.get(source, {}).items():
                    if (source, topic) not in effects and source not in self._explained and key not in self._torn:
                        self._torn.add(key)
                        detail = f"{end.group} is past it, but its output in {topic} is missing"
                        self._report.add(
                            Kind.TORN, position, f"{detail}; last tried by transaction {key[1]} of {key[0]}"
                        )


def _source(transaction: Transaction, output: Output) -> Source:
    return transaction.begun.group, output.source_partition, output.source_offset


def _format(position: Position | Source) -> str:
    return f"{position[0]}-{position[1]}@{position[2]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a file."""
    parser = argparse.ArgumentParser(
        prog="python -m millstream_testing.transaction_check", description="Check a history of transactions."
    )
    parser.add_argument("file", type=Path, help="one JSON event per line")
    parser.add_argument("--complete", action="append", default=[], help="a reader that has read everything")
    given = parser.parse_args(arguments)
    try:
        history = TransactionHistory.load(given.file)
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    report = check(history, complete=given.complete)
    print(report)
    return 0 if report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
