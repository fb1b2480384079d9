"""Each planted fault of transactions must be found; a valid history must give no finding."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from millstream_testing.finding import Kind
from millstream_testing.transaction_check import check, main
from millstream_testing.transaction_history import (
    ConsumerStarted,
    EndRequested,
    Event,
    Input,
    OffsetObserved,
    Output,
    Polled,
    Positioned,
    Transaction,
    TransactionBegun,
    TransactionEnded,
    TransactionHistory,
)

PRODUCERS = ("w0", "w1")
FATES = ("committed", "aborted", "without a response, committed", "without a response, aborted", "killed before")
READERS = {"audit": True, "other": True, "all": False}
Where = tuple[str, int]
Message = tuple[str, int, int]


@dataclass
class Entry:
    """A record in a log: a message, or an undelivered marker or gap."""

    message: Message | None
    visible: bool = False
    visible_at: int = 0
    polled_at: dict[str, int] = field(default_factory=dict)
    hidden_from: set[str] = field(default_factory=set)
    seen_as: dict[str, Message] = field(default_factory=dict)


@dataclass
class Scenario:
    """The actual events, before they become a history."""

    begun: list[TransactionBegun] = field(default_factory=list)
    ends: list[EndRequested | TransactionEnded] = field(default_factory=list)
    logs: dict[Where, list[Entry]] = field(default_factory=dict)
    observed_offsets: list[OffsetObserved] = field(default_factory=list)
    more: dict[str, list[tuple[Where, int, bool]]] = field(default_factory=dict)
    fates: dict[tuple[str, int], str] = field(default_factory=dict)
    position: dict[int, int] = field(default_factory=dict)
    clock: count[int] = field(default_factory=lambda: count(1000, 10))

    def begin(self, producer: str, sources: int, partition: int, first: int | None = None) -> TransactionBegun:
        start = self.position.get(partition, 0) if first is None else first
        outputs = [
            Output(topic, place, partition, at)
            for at in range(start, start + sources)
            for topic, place in (("a", at % 2), ("b", at // 2 % 2))
        ]
        number = sum(transaction.producer == producer for transaction in self.begun)
        inputs = [Input(partition, start, start + sources)]
        transaction = TransactionBegun(producer, number, "group", "in", inputs, outputs, next(self.clock))
        self.begun.append(transaction)
        for index, output in enumerate(outputs):
            entry = Entry((producer, number, index))
            self.logs.setdefault((output.topic, output.partition), []).append(entry)
        return transaction

    def end(self, transaction: TransactionBegun, fate: str) -> None:
        key = (transaction.producer, transaction.number)
        self.fates[key] = fate
        commits = fate in ("committed", "without a response, committed")
        if fate != "killed before":
            self.ends.append(EndRequested(*key, fate != "aborted", next(self.clock)))
        if fate in ("committed", "aborted"):
            self.ends.append(TransactionEnded(*key, commits, next(self.clock)))
        for where in {(output.topic, output.partition) for output in transaction.outputs}:
            self.logs[where].append(Entry(None))
        for entry in self.entries(key):
            entry.visible, entry.visible_at = commits, next(self.clock)
        if commits:
            (consumed,) = transaction.inputs
            self.position[consumed.partition] = consumed.next
            self.observed_offsets.append(
                OffsetObserved("offsets", "group", "in", consumed.partition, consumed.next, next(self.clock))
            )

    def entries(self, key: tuple[str, int]) -> list[Entry]:
        return [entry for log in self.logs.values() for entry in log if entry.message and entry.message[:2] == key]

    def of(self, *fates: str) -> list[TransactionBegun]:
        return [
            transaction for transaction in self.begun if self.fates[transaction.producer, transaction.number] in fates
        ]

    def events(self) -> list[Event]:
        events: list[Event] = [*self.begun, *self.ends, *(ConsumerStarted(*reader) for reader in READERS.items())]
        for reader in READERS:
            for where, log in self.logs.items():
                events.append(Positioned(reader, *where, 0))
                events += [self.poll(reader, where, at) for at in range(len(log)) if self.may_see(reader, log[at])]
            for where, offset, sought in self.more.get(reader, ()):
                if sought:
                    events.append(Positioned(reader, *where, offset))
                events.append(self.poll(reader, where, offset))
        return [*events, *self.observed_offsets]

    def may_see(self, reader: str, entry: Entry) -> bool:
        if entry.message is None or reader in entry.hidden_from:
            return False
        return entry.visible or not READERS[reader] or reader in entry.polled_at

    def poll(self, reader: str, where: Where, offset: int) -> Polled:
        entry = self.logs[where][offset]
        message = entry.seen_as.get(reader) or entry.message
        assert message is not None
        producer, number, index = message
        at = entry.polled_at.get(reader, entry.visible_at)
        return Polled(reader, *where, offset, producer, number, index, at)

    def history(self) -> TransactionHistory:
        history = TransactionHistory()
        for event in self.events():
            history.add(event)
        return history

    def counts(self) -> dict[Kind, int]:
        return dict(check(self.history(), complete=["audit", "other", "all"]).counts)


@st.composite
def scenarios(draw: DrawFn) -> Scenario:
    """Two producers with interleaved transactions of every outcome; the last ones of each are always present."""
    scenario = Scenario()
    step = st.tuples(st.sampled_from((0, 1)), st.integers(1, 3), st.sampled_from(FATES))
    opened: dict[int, tuple[TransactionBegun, str]] = {}
    for partition, sources, fate in draw(st.lists(step, max_size=16)):
        if partition in opened:
            scenario.end(*opened.pop(partition))
        else:
            opened[partition] = scenario.begin(PRODUCERS[partition], sources, partition), fate
    for transaction, fate in opened.values():
        scenario.end(transaction, fate)
    for fate in (*FATES, "committed"):
        scenario.end(scenario.begin(PRODUCERS[0], draw(st.integers(1, 3)), 0), fate)
    scenario.end(scenario.begin(PRODUCERS[1], 1, 1), "committed")
    return scenario


def choose(scenario: Scenario, data: st.DataObject, *fates: str) -> tuple[TransactionBegun, Entry]:
    """Choose a transaction with one of these outcomes, and one of its records."""
    transaction = data.draw(st.sampled_from(scenario.of(*fates)))
    return transaction, data.draw(st.sampled_from(scenario.entries((transaction.producer, transaction.number))))


@given(scenarios())
def test_a_valid_history_gives_no_finding(scenario: Scenario) -> None:
    assert scenario.counts() == {}


@given(scenarios())
def test_an_incomplete_history_gives_no_finding(scenario: Scenario) -> None:
    scenario.observed_offsets.clear()
    assert check(scenario.history()).ok


@given(scenarios(), st.data())
def test_an_aborted_message_that_is_read_is_found(scenario: Scenario, data: st.DataObject) -> None:
    _, entry = choose(scenario, data, "aborted")
    entry.polled_at["audit"] = next(scenario.clock)
    assert scenario.counts() == {Kind.ABORTED_READ: 1}


@given(scenarios(), st.data())
def test_a_message_that_was_never_committed_is_found(scenario: Scenario, data: st.DataObject) -> None:
    _, entry = choose(scenario, data, "killed before")
    entry.polled_at["audit"] = next(scenario.clock)
    assert scenario.counts() == {Kind.EARLY_READ: 1}


@given(scenarios(), st.data())
def test_a_read_before_the_commit_is_found(scenario: Scenario, data: st.DataObject) -> None:
    transaction, entry = choose(scenario, data, "committed", "without a response, committed")
    end_requested = Transaction(
        transaction,
        [(end.commit, end.at) for end in scenario.ends if isinstance(end, EndRequested) and _is(end, transaction)],
    )
    assert end_requested.commit_requested_at is not None
    entry.polled_at["audit"] = end_requested.commit_requested_at
    assert scenario.counts() == {}
    entry.polled_at["audit"] -= 1
    assert scenario.counts() == {Kind.EARLY_READ: 1}


def _is(event: EndRequested | TransactionEnded, transaction: TransactionBegun) -> bool:
    return (event.producer, event.number) == (transaction.producer, transaction.number)


@given(scenarios(), st.data(), st.sampled_from(["committed", "without a response, committed"]))
def test_a_transaction_with_one_missing_message_is_torn(scenario: Scenario, data: st.DataObject, fate: str) -> None:
    _, entry = choose(scenario, data, fate)
    entry.hidden_from = set(READERS)
    assert scenario.counts() == {Kind.TORN: 1}


@given(scenarios(), st.data())
def test_a_partially_visible_transaction_without_a_response_is_torn(scenario: Scenario, data: st.DataObject) -> None:
    _, entry = choose(scenario, data, "without a response, aborted")
    for reader in ("audit", "other"):
        entry.polled_at[reader] = next(scenario.clock)
    counts = scenario.counts()
    assert counts.pop(Kind.TORN) == 1
    # Its source was processed again, unless this was the last attempt.
    assert set(counts) <= {Kind.DUPLICATED}


@given(scenarios())
def test_outputs_without_their_offsets_are_torn(scenario: Scenario) -> None:
    last = max(offset.offset for offset in scenario.observed_offsets if offset.partition == 0)
    scenario.observed_offsets = [
        offset for offset in scenario.observed_offsets if (offset.partition, offset.offset) != (0, last)
    ]
    assert scenario.counts() == {Kind.TORN: 1}


@given(scenarios())
def test_offsets_without_their_outputs_are_torn(scenario: Scenario) -> None:
    transaction = scenario.begin(PRODUCERS[0], 2, 0)
    scenario.end(transaction, "without a response, aborted")
    scenario.observed_offsets.append(
        OffsetObserved("offsets", "group", "in", 0, transaction.inputs[0].next, next(scenario.clock))
    )
    assert scenario.counts() == {Kind.TORN: 1}


@given(scenarios(), st.data())
def test_a_committed_transaction_without_records_is_lost(scenario: Scenario, data: st.DataObject) -> None:
    transaction, _ = choose(scenario, data, "committed")
    for entry in scenario.entries((transaction.producer, transaction.number)):
        entry.hidden_from = set(READERS)
    assert scenario.counts() == {Kind.LOST: 1}


@given(scenarios())
def test_an_unprocessed_source_behind_the_group_is_lost(scenario: Scenario) -> None:
    scenario.end(scenario.begin("w9", 1, 9, first=1), "committed")
    assert scenario.counts() == {Kind.LOST: 1}


@given(scenarios(), st.data())
def test_a_message_at_two_offsets_is_found(scenario: Scenario, data: st.DataObject) -> None:
    transaction, entry = choose(scenario, data, "committed")
    scenario.logs[_where(transaction, entry)].append(
        Entry(entry.message, visible=True, visible_at=next(scenario.clock))
    )
    assert scenario.counts() == {Kind.DUPLICATED: 1}


def _where(transaction: TransactionBegun, entry: Entry) -> Where:
    assert entry.message is not None
    output = transaction.outputs[entry.message[2]]
    return output.topic, output.partition


@given(scenarios(), st.data())
def test_a_source_that_was_processed_twice_is_found(scenario: Scenario, data: st.DataObject) -> None:
    (consumed,) = choose(scenario, data, "committed", "without a response, committed")[0].inputs
    scenario.end(scenario.begin("zombie", 1, consumed.partition, first=consumed.first), "without a response, committed")
    observed_offsets = scenario.observed_offsets.pop()
    scenario.position[consumed.partition] = max(scenario.position[consumed.partition], observed_offsets.offset)
    assert scenario.counts() == {Kind.DUPLICATED: 2}


@given(scenarios(), st.data(), st.sampled_from(["audit", "other", "all"]))
def test_a_message_skipped_by_one_reader_is_found(scenario: Scenario, data: st.DataObject, reader: str) -> None:
    _, entry = choose(scenario, data, "committed", "without a response, committed")
    entry.hidden_from = {reader}
    assert scenario.counts() == {Kind.SKIPPED: 1}


@given(scenarios(), st.data(), st.sampled_from(["audit", "all"]), st.booleans())
def test_a_reader_that_goes_back_without_a_seek_is_found(
    scenario: Scenario, data: st.DataObject, reader: str, sought: bool
) -> None:
    transaction, entry = choose(scenario, data, "committed")
    where = _where(transaction, entry)
    log = scenario.logs[where]
    again = [at for at in range(log.index(entry), len(log)) if scenario.may_see(reader, log[at])]
    scenario.more[reader] = [(where, at, sought and at == again[0]) for at in again]
    assert scenario.counts() == ({} if sought else {Kind.WENT_BACK: 1})


@given(scenarios())
def test_reordered_messages_are_found(scenario: Scenario) -> None:
    log = scenario.logs["a", 0]
    one, other = scenario.begin(PRODUCERS[0], 2, 0), scenario.begin(PRODUCERS[0], 2, 0, first=scenario.position[0] + 2)
    scenario.end(one, "committed")
    scenario.end(other, "committed")
    early, late = (
        next(entry for entry in log if entry in scenario.entries((x.producer, x.number))) for x in (one, other)
    )
    early.message, late.message = late.message, early.message
    early.visible_at = late.visible_at = next(scenario.clock)
    assert scenario.counts() == {Kind.REORDERED: 1}


@given(scenarios(), st.data())
def test_readers_that_disagree_are_found(scenario: Scenario, data: st.DataObject) -> None:
    _, entry = choose(scenario, data, "committed")
    other = scenario.begin("w9", 1, 9)
    scenario.end(other, "committed")
    entry.seen_as["other"] = ("w9", 0, 0)
    entry.polled_at["other"] = next(scenario.clock)
    assert scenario.counts() == {Kind.INCONSISTENT: 1}


@given(scenarios())
def test_a_message_that_was_never_written_is_found(scenario: Scenario) -> None:
    scenario.logs["a", 0].append(Entry(("ghost", 0, 0), visible=True))
    assert scenario.counts() == {Kind.PHANTOM: 1}


@given(scenarios())
def test_a_message_in_the_wrong_partition_is_found(scenario: Scenario) -> None:
    transaction = scenario.begin(PRODUCERS[0], 1, 0)
    scenario.end(transaction, "committed")
    entry = scenario.entries((transaction.producer, transaction.number))[0]
    log = scenario.logs[_where(transaction, entry)]
    log[log.index(entry)] = Entry(None)
    scenario.logs.setdefault(("elsewhere", 7), []).append(entry)
    assert scenario.counts() == {Kind.INCONSISTENT: 1}


@given(scenarios(), st.data())
def test_a_committed_offset_that_goes_back_is_found(scenario: Scenario, data: st.DataObject) -> None:
    before = data.draw(st.sampled_from(scenario.observed_offsets))
    at = scenario.observed_offsets.index(before) + 1
    scenario.observed_offsets[at:at] = [msgspec.structs.replace(before, offset=before.offset - 1), before]
    assert scenario.counts() == {Kind.WENT_BACK: 1}


@given(scenarios(), st.data())
def test_an_offset_reported_before_its_commit_is_found(scenario: Scenario, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(scenario.observed_offsets) - 1))
    scenario.observed_offsets[at] = msgspec.structs.replace(scenario.observed_offsets[at], at=0)
    assert scenario.counts() == {Kind.EARLY_READ: 1}


@given(scenarios())
def test_a_reported_aborted_offset_is_found(scenario: Scenario) -> None:
    transaction = scenario.begin("w9", 1, 9)
    scenario.end(transaction, "aborted")
    scenario.observed_offsets.append(
        OffsetObserved("offsets", "group", "in", 9, transaction.inputs[0].next, next(scenario.clock))
    )
    assert scenario.counts() == {Kind.ABORTED_READ: 1, Kind.TORN: 1}


@given(scenarios())
def test_an_offset_that_was_never_committed_is_found(scenario: Scenario) -> None:
    scenario.observed_offsets.append(OffsetObserved("offsets", "group", "in", 5, 3, next(scenario.clock)))
    assert scenario.counts()[Kind.INCONSISTENT] == 1


@given(scenarios())
def test_a_program_that_missed_a_message_of_its_source_is_found(scenario: Scenario) -> None:
    transaction = scenario.begin(PRODUCERS[0], 3, 0)
    scenario.begun[-1] = short = msgspec.structs.replace(
        transaction, outputs=transaction.outputs[:2] + transaction.outputs[4:]
    )
    for log in scenario.logs.values():
        log[:] = [
            entry
            for entry in log
            if entry.message is None or entry.message[:2] != (transaction.producer, transaction.number)
        ]
    scenario.end(short, "aborted")
    assert scenario.counts() == {Kind.SKIPPED: 1}


@given(scenarios())
def test_a_history_survives_saving_and_loading(tmp_path_factory: pytest.TempPathFactory, scenario: Scenario) -> None:
    path = tmp_path_factory.mktemp("history") / "history.jsonl"
    history = scenario.history()
    history.save(path)
    loaded = TransactionHistory.load(path)
    assert list(loaded.events()) == list(history.events())
    assert str(check(loaded, complete=["audit"])) == str(check(history, complete=["audit"]))


def test_the_command_reports_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.jsonl"
    history = TransactionHistory()
    history.add(ConsumerStarted("audit", committed=True))
    history.save(path)
    assert main([str(path), "--complete", "audit"]) == 0
    history.add(Polled("audit", "a", 0, 3, "ghost", 0, 0, 5))
    history.save(path)
    assert main([str(path)]) == 1
    assert "phantom: a-0 at offset 3: message 0 of transaction 0 of ghost" in capsys.readouterr().out
    path.write_text('{"event": "end_requested", "producer": "w", "number": 1, "commit": true, "at": 1}\n')
    assert main([str(path)]) == 2
    assert "line 1: transaction 1 of w has not begun" in capsys.readouterr().err
    path.write_text('{"event": "positioned", "consumer": "x", "topic": "t", "partition": 1}\n')
    assert main([str(path)]) == 2
    assert "reader x was never started" in capsys.readouterr().err
