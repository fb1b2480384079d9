"""The checker of transactions: finds errors of the broker from what programs did and readers saw.

What is found, in addition to what the clients did (`transaction_history.py`):

    aborted read        a reader of what is committed was given a message of an aborted transaction
    read before commit  ... or of one that no client had asked to commit at that time
    torn                of a transaction some messages are there and others not; or its messages are there and the
                        offsets that it committed are not, or the other way round
    lost                a transaction that was committed left nothing; a message of the source that the group is past
                        was never worked on
    doubled             a message at two offsets; two messages for one source message
    skipped             a reader skipped a message that it should have seen, or a program one of its source
    went back           a reader got an earlier offset, or a group's committed offset went back
    reordered           a producer's messages lie in a partition in another order than they were sent in
    inconsistent        two messages at one offset, a message in another partition, an offset that no transaction
                        committed
    phantom             read, but never written

A transaction that was asked to commit and did not say how it ended may have committed or not, but not in part.

As a command: `python -m millstream_testing.transaction_check FILE --complete audit` reads one JSON object a line (as
`TransactionHistory.save` writes them), prints what it found and exits with 0 if all is well, 1 if something was found,
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
from millstream_testing.transaction_events import OffsetObserved, Output
from millstream_testing.transaction_history import NOT_A_MESSAGE, Key, Polls, Transaction, TransactionHistory

Place = tuple[str, int, int]
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

    def add(self, kind: Kind, place: Place, detail: str) -> None:
        """Count a finding, and keep it if it is one of the first."""
        self.counts[kind] += 1
        if self.counts[kind] <= SHOWN_MAX:
            self.findings.append(Finding(kind, *place, detail))

    def __str__(self) -> str:
        transactions = (
            f"{self.committed:,} transactions committed, {self.aborted:,} aborted, {self.unknown:,} without a response"
        )
        lines = [f"{transactions}; {self.visible:,} messages visible, polled {self.polled:,} times"]
        if self.ok:
            lines.append(
                "nothing torn, lost, doubled, skipped or out of order, and nothing read too early or after all"
            )
        lines.extend(f"{kind}: {count:,}" for kind, count in self.counts.items())
        lines.extend(f"  {finding}" for finding in self.findings)
        return "\n".join(lines)


def check(history: TransactionHistory, *, complete: Iterable[str] = ()) -> Report:
    """Find everything that is wrong. The readers named in `complete` have read everything to the end."""
    return _Check(history, complete).run()


class _Check:
    """One pass over a history; each method looks for one kind of fault."""

    def __init__(self, history: TransactionHistory, complete: Iterable[str]) -> None:
        self._history = history
        self._complete = frozenset(complete)
        self._report = Report()
        self._at: dict[Place, int] = {}
        """The message at each position, as the first reader saw it."""
        self._first: dict[int, Place] = {}
        """The first known position of each message."""
        self._visible: dict[int, Place] = {}
        """What readers of committed data were given, and should have been given at some time."""
        self._reported_places: set[tuple[Kind, Place]] = set()
        self._torn: set[Key] = set()
        self._explained: set[Source] = set()
        """What was reported as lost or torn, and is not reported twice."""

    def run(self) -> Report:
        self._count()
        self._find_places()
        self._find_wrong_reads()
        self._report.visible = len(self._visible)
        self._find_reordered()
        self._find_wrong_polls()
        self._find_wrong_inputs()
        self._find_wrong_offsets()
        effects = self._find_doubled_effects()
        if self._complete:
            self._find_torn()
            self._find_wrong_effects(effects)
        return self._report

    # -- the contents ------------------------------------------------------------------------------------------

    def _count(self) -> None:
        for one in self._history.transactions.values():
            self._report.committed += one.committed is True
            self._report.aborted += one.is_aborted
            self._report.unknown += one.committed is None and not one.is_aborted

    def _polls(self, *, committed: bool = False) -> Iterator[tuple[str, Place, int, int]]:
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
        one = self._transaction(message)
        return None if one is None else one.output(self._history.messages[message][2])

    def _call(self, message: int) -> str:
        producer, number, index = self._history.messages[message]
        return f"message {index} of transaction {number} of {producer}"

    # -- places and reads --------------------------------------------------------------------------------------

    def _find_places(self) -> None:
        """Find the position of each message; report those never written, misplaced or stored twice."""
        for consumer, place, message, _ in self._polls():
            self._report.polled += 1
            known = self._at.setdefault(place, message)
            if known != message:
                self._add_once(
                    Kind.INCONSISTENT, place, f"holds {self._call(known)}, for {consumer} {self._call(message)}"
                )
                continue
            if self._first.setdefault(message, place) == place:
                continue
            self._add_once(Kind.DOUBLED, place, f"{self._call(message)} is at {_show(self._first[message])} too")
        for message, place in self._first.items():
            output = self._output(message)
            if output is None:
                self._report.add(Kind.PHANTOM, place, f"{self._call(message)} was read but never written")
            elif (output.topic, output.partition) != place[:2]:
                self._report.add(Kind.INCONSISTENT, place, f"{self._call(message)} was sent to another partition")

    def _add_once(self, kind: Kind, place: Place, detail: str) -> None:
        """Check that all readers see the same."""
        if (kind, place) not in self._reported_places:
            self._reported_places.add((kind, place))
            self._report.add(kind, place, detail)

    def _find_wrong_reads(self) -> None:
        """Find what readers of committed data should never have been given, or not yet."""
        for consumer, place, message, at in self._polls(committed=True):
            one = self._transaction(message)
            if one is None:
                continue
            what = f"{consumer} was given {self._call(message)}"
            asked_at = one.commit_requested_at
            if one.is_aborted:
                self._add_once(Kind.ABORTED_READ, place, f"{what}, which was aborted")
            elif asked_at is None:
                self._add_once(Kind.EARLY_READ, place, f"{what}, which no client asked to commit")
            else:
                self._visible.setdefault(message, place)
                if at < asked_at:
                    early_ms = (asked_at - at) / 1e6
                    self._add_once(
                        Kind.EARLY_READ, place, f"{what} {early_ms:.3f} ms before a client asked to commit it"
                    )

    def _find_reordered(self) -> None:
        last: dict[tuple[str, int, str], int] = {}
        for place in sorted(self._at):
            message = self._at[place]
            if self._first.get(message) != place:
                continue
            stream = (place[0], place[1], self._history.messages[message][0])
            before = last.get(stream)
            last[stream] = message
            if before is not None and self._history.messages[before] > self._history.messages[message]:
                self._report.add(Kind.REORDERED, place, f"{self._call(message)} lies behind {self._call(before)}")

    # -- polls -------------------------------------------------------------------------------------------------

    def _find_wrong_polls(self) -> None:
        everything, committed = self._offsets(self._first), self._offsets(self._certain())
        for (consumer, topic, partition), polls in self._history.polls.items():
            there = committed if self._history.readers[consumer] else everything
            self._follow(consumer, (topic, partition), polls, there[topic, partition])
        for consumer in sorted(self._complete):
            there = committed if self._history.readers.get(consumer, True) else everything
            for place in set(there) - {key[1:] for key in self._history.polls if key[0] == consumer}:
                self._find_skipped(consumer, place, there[place], 0, None)

    def _certain(self) -> dict[int, Place]:
        """Find what readers of committed data have passed without being given it."""
        certain = dict(self._visible)
        for message, place in self._first.items():
            one = self._transaction(message)
            if one is not None and one.committed:
                certain[message] = place
        return certain

    def _offsets(self, placed: Mapping[int, Place]) -> defaultdict[tuple[str, int], list[int]]:
        offsets: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
        for topic, partition, offset in sorted(set(placed.values())):
            offsets[topic, partition].append(offset)
        return offsets

    def _follow(self, consumer: str, where: tuple[str, int], polls: Polls, there: Sequence[int]) -> None:
        """Follow one reader of one partition."""
        next_offset = -1
        for offset, message, _ in polls:
            if message == NOT_A_MESSAGE:
                next_offset = offset
                continue
            if offset < next_offset:
                detail = f"{consumer} was given this after {next_offset - 1}"
                self._report.add(Kind.WENT_BACK, (*where, offset), detail)
            elif next_offset >= 0:
                self._find_skipped(consumer, where, there, next_offset, offset)
            next_offset = offset + 1
        if consumer in self._complete:
            self._find_skipped(consumer, where, there, max(next_offset, 0), None)

    def _find_skipped(
        self, consumer: str, where: tuple[str, int], there: Sequence[int], start: int, end: int | None
    ) -> None:
        first = bisect_left(there, start)
        last = len(there) if end is None else bisect_left(there, end)
        if first < last:
            on = "stopped before it" if end is None else f"went on to {end}"
            self._report.add(Kind.SKIPPED, (*where, there[first]), f"{consumer} {on}; {last - first} not read")

    def _find_wrong_inputs(self) -> None:
        """Find offsets of the source that a program skipped."""
        for (producer, number), one in self._history.transactions.items():
            got = {(output.source_partition, output.source_offset) for output in one.begun.outputs}
            for each in one.begun.inputs:
                missing = [at for at in range(each.first, each.next) if (each.partition, at) not in got]
                if missing:
                    place = (one.begun.source, each.partition, missing[0])
                    self._report.add(Kind.SKIPPED, place, f"transaction {number} of {producer} was not given it")

    # -- offsets of groups -------------------------------------------------------------------------------------

    def _find_wrong_offsets(self) -> None:
        committing: defaultdict[Place, list[Transaction]] = defaultdict(list)
        for one in self._history.transactions.values():
            for each in one.begun.inputs:
                committing[one.begun.group, each.partition, each.next].append(one)
        last: dict[tuple[str, str, int], int] = {}
        for observed_offsets in self._history.observed_offsets:
            stream = (observed_offsets.observer, observed_offsets.group, observed_offsets.partition)
            before = last.get(stream, 0)
            last[stream] = observed_offsets.offset
            if observed_offsets.offset < before:
                place = (observed_offsets.topic, observed_offsets.partition, observed_offsets.offset)
                self._report.add(Kind.WENT_BACK, place, f"the offset of {observed_offsets.group} was {before} before")
            elif observed_offsets.offset > before:
                self._judge_offset(
                    observed_offsets,
                    committing[observed_offsets.group, observed_offsets.partition, observed_offsets.offset],
                )

    def _judge_offset(self, observed_offsets: OffsetObserved, by: Sequence[Transaction]) -> None:
        place = (observed_offsets.topic, observed_offsets.partition, observed_offsets.offset)
        what = f"{observed_offsets.observer} saw this offset of {observed_offsets.group}"
        if not by:
            self._report.add(Kind.INCONSISTENT, place, f"{what}, which no transaction committed")
            return
        if any(one.may_be_committed and (one.commit_requested_at or 0) <= observed_offsets.at for one in by):
            return
        if all(one.is_aborted for one in by):
            self._report.add(Kind.ABORTED_READ, place, f"{what}; every transaction with it was aborted")
        else:
            self._report.add(Kind.EARLY_READ, place, f"{what} before any transaction with it was asked to commit")

    # -- whole transactions ------------------------------------------------------------------------------------

    def _find_torn(self) -> None:
        seen: defaultdict[Key, set[int]] = defaultdict(set)
        for message in self._visible:
            producer, number, index = self._history.messages[message]
            seen[producer, number].add(index)
        for key, one in self._history.transactions.items():
            there = seen.get(key, set())
            missing = [index for index in range(len(one.begun.outputs)) if index not in there]
            if missing and (there or one.committed):
                self._report_missing(key, one, missing, torn=bool(there))

    def _report_missing(self, key: Key, one: Transaction, missing: Sequence[int], *, torn: bool) -> None:
        self._torn.add(key)
        outputs = [one.begun.outputs[index] for index in missing]
        self._explained.update(_source(one, output) for output in outputs)
        total = len(one.begun.outputs)
        ended = "was committed" if one.committed else "may be committed"
        detail = f"transaction {key[1]} of {key[0]} {ended}, and {len(missing)} of its {total} messages are missing"
        self._report.add(Kind.TORN if torn else Kind.LOST, (outputs[0].topic, outputs[0].partition, -1), detail)

    def _find_doubled_effects(self) -> dict[tuple[Source, str], int]:
        """Find what was made from each message of the source in each topic; twice is a fault."""
        effects: dict[tuple[Source, str], int] = {}
        for message, place in self._visible.items():
            one, output = self._transaction(message), self._output(message)
            if one is None or output is None:
                continue
            source = _source(one, output)
            other = effects.setdefault((source, output.topic), message)
            if other != message:
                what = f"{self._call(message)} and {self._call(other)} at {_show(self._visible[other])}"
                self._report.add(Kind.DOUBLED, place, f"{what} were both made from {_show(source)}")
        return effects

    def _find_wrong_effects(self, effects: Mapping[tuple[Source, str], int]) -> None:
        """Check that each source message has its outputs if and only if the group is past it."""
        ends = {
            (observed_offsets.group, observed_offsets.partition): observed_offsets
            for observed_offsets in self._history.observed_offsets
        }
        for (source, _), message in effects.items():
            end, key = ends.get(source[:2]), self._history.messages[message][:2]
            if end is not None and source[2] >= end.offset and key not in self._torn:
                self._torn.add(key)
                detail = f"{self._call(message)} was made from {_show(source)}, and the group is at {end.offset}"
                self._report.add(Kind.TORN, self._visible[message], detail)
        self._find_missing_effects(ends.values(), effects)

    def _find_missing_effects(self, ends: Iterable[OffsetObserved], effects: Mapping[tuple[Source, str], int]) -> None:
        attempts: defaultdict[Source, dict[str, Key]] = defaultdict(dict)
        for key, one in self._history.transactions.items():
            for output in one.begun.outputs:
                attempts[_source(one, output)][output.topic] = key
        for end in ends:
            for offset in range(end.offset):
                source, place = (end.group, end.partition, offset), (end.topic, end.partition, offset)
                if source not in attempts:
                    self._report.add(Kind.LOST, place, f"{end.group} is past it and never worked on it")
                for topic, key in attempts.get(source, {}).items():
                    if (source, topic) not in effects and source not in self._explained and key not in self._torn:
                        self._torn.add(key)
                        detail = f"{end.group} is past it, and its output in {topic} is not there"
                        self._report.add(Kind.TORN, place, f"{detail}; last tried by transaction {key[1]} of {key[0]}")


def _source(one: Transaction, output: Output) -> Source:
    return one.begun.group, output.source_partition, output.source_offset


def _show(place: Place | Source) -> str:
    return f"{place[0]}-{place[1]}@{place[2]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Check a file."""
    parser = argparse.ArgumentParser(
        prog="python -m millstream_testing.transaction_check", description="Check a history of transactions."
    )
    parser.add_argument("file", type=Path, help="one JSON event a line")
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
