"""Each planted fault must be found; a valid history must give no finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from millstream_testing.finding import Kind
from millstream_testing.history import History, main

Message = tuple[str, int]


@dataclass
class Scenario:
    """The actual events, before they become a history. A log entry of None is an invisible offset."""

    sent: list[tuple[str, int, int]] = field(default_factory=list)
    logs: dict[int, list[Message | None]] = field(default_factory=dict)
    acked: dict[Message, tuple[int, int]] = field(default_factory=dict)
    skipped: dict[str, set[tuple[int, int]]] = field(default_factory=dict)
    seen: dict[tuple[str, int, int], Message] = field(default_factory=dict)
    rewinds: set[int] = field(default_factory=set)
    repeating: set[str] = field(default_factory=set)

    def history(self) -> History:
        history = History()
        for producer in self.repeating:
            history.allow_duplicates(producer)
        for producer, sequence, partition in self.sent:
            history.sent(producer, sequence, "t", partition)
        for (producer, sequence), (partition, offset) in self.acked.items():
            history.acknowledged(producer, sequence, "t", partition, offset)
        for consumer in ("audit", "group"):
            for partition in self.logs:
                self.write_reading(history, consumer, partition)
        return history

    def write_reading(self, history: History, consumer: str, partition: int) -> None:
        history.positioned(consumer, "t", partition, 0 if consumer == "audit" else -1)
        for offset, message in enumerate(self.logs[partition]):
            again = 2 if consumer == "group" and offset in self.rewinds else 1
            seen = self.seen.get((consumer, partition, offset), message)
            if seen is None or (partition, offset) in self.skipped.get(consumer, ()):
                continue
            for _ in range(again):
                history.read(consumer, "t", partition, offset, *seen)

    def counts(self) -> dict[Kind, int]:
        return dict(self.history().check(complete=["audit", "group"]).counts)


@st.composite
def scenarios(draw: DrawFn) -> Scenario:
    scenario = Scenario()
    partitions = draw(st.integers(1, 3))
    scenario.logs = {partition: [] for partition in range(partitions)}
    next_sequence: dict[str, int] = {}
    fate = st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, partitions - 1),
        st.sampled_from(["acked", "acked", "acked", "acked without offset", "unanswered", "never arrived"]),
        st.integers(1, 3),
    )
    for producer, partition, end, step in draw(st.lists(fate, max_size=40)):
        sequence = next_sequence.get(producer, 0)
        next_sequence[producer] = sequence + step
        scenario.sent.append((producer, sequence, partition))
        if end == "never arrived":
            continue
        scenario.logs[partition].append((producer, sequence))
        if end.startswith("acked"):
            offset = len(scenario.logs[partition]) - 1
            scenario.acked[producer, sequence] = (partition, offset if end == "acked" else -1)
    scenario.rewinds = draw(st.sets(st.integers(0, 40)))
    return scenario


def choose_acked(draw: Callable[..., int], scenario: Scenario) -> tuple[Message, int, int]:
    """Choose an acknowledged message and its position; create one if there is none."""
    if all(offset < 0 for _, offset in scenario.acked.values()):
        scenario.logs[0].append(("new", 0))
        scenario.sent.append(("new", 0, 0))
        scenario.acked["new", 0] = (0, len(scenario.logs[0]) - 1)
    known = [(message, place) for message, place in scenario.acked.items() if place[1] >= 0]
    message, (partition, offset) = known[draw(st.integers(0, len(known) - 1))]
    return message, partition, offset


@settings(deadline=None)
@given(scenarios())
def test_a_valid_history_gives_no_finding(scenario: Scenario) -> None:
    assert scenario.counts() == {}


@settings(deadline=None)
@given(scenarios(), st.data())
def test_a_lost_message_is_found(scenario: Scenario, data: st.DataObject) -> None:
    _, partition, offset = choose_acked(data.draw, scenario)
    scenario.logs[partition][offset] = None
    assert scenario.counts() == {Kind.LOST: 1}


@settings(deadline=None)
@given(scenarios(), st.data())
def test_a_duplicate_message_is_found_unless_its_producer_may_repeat(scenario: Scenario, data: st.DataObject) -> None:
    message, partition, _ = choose_acked(data.draw, scenario)
    scenario.logs[partition].append(message)
    assert scenario.counts() == {Kind.DUPLICATED: 1}
    scenario.repeating.add(message[0])
    assert scenario.counts() == {}


@settings(deadline=None)
@given(scenarios(), st.data())
def test_reordered_messages_are_found(scenario: Scenario, data: st.DataObject) -> None:
    message, partition, offset = choose_acked(data.draw, scenario)
    producer = message[0]
    later = (producer, 1 + max(sequence for name, sequence, _ in scenario.sent if name == producer))
    scenario.sent.append((*later, partition))
    scenario.logs[partition].insert(offset, later)
    for other, (place, at) in list(scenario.acked.items()):
        if place == partition and at >= offset:
            scenario.acked[other] = (place, at + 1)
    scenario.acked[later] = (partition, offset)
    assert scenario.counts() == {Kind.REORDERED: 1}


@settings(deadline=None)
@given(scenarios(), st.data(), st.sampled_from(["audit", "group"]))
def test_an_offset_skipped_by_one_reader_is_found(scenario: Scenario, data: st.DataObject, reader: str) -> None:
    _, partition, offset = choose_acked(data.draw, scenario)
    scenario.skipped[reader] = {(partition, offset)}
    assert scenario.counts() == {Kind.SKIPPED: 1}


@settings(deadline=None)
@given(scenarios(), st.data())
def test_a_wrong_acknowledged_offset_is_found(scenario: Scenario, data: st.DataObject) -> None:
    message, partition, _ = choose_acked(data.draw, scenario)
    scenario.acked[message] = (partition, len(scenario.logs[partition]) + 3)
    assert scenario.counts() == {Kind.INCONSISTENT: 1}


@settings(deadline=None)
@given(scenarios(), st.data())
def test_readers_that_disagree_are_found(scenario: Scenario, data: st.DataObject) -> None:
    _, partition, offset = choose_acked(data.draw, scenario)
    scenario.sent.append(("z", 0, partition))
    scenario.seen["group", partition, offset] = ("z", 0)
    assert scenario.counts() == {Kind.INCONSISTENT: 1}


@settings(deadline=None)
@given(scenarios(), st.data())
def test_a_message_in_the_wrong_partition_is_found(scenario: Scenario, data: st.DataObject) -> None:
    partition = data.draw(st.sampled_from(sorted(scenario.logs)))
    scenario.sent.append(("z", 0, partition + 1))
    scenario.logs[partition].append(("z", 0))
    assert scenario.counts() == {Kind.INCONSISTENT: 1}


@settings(deadline=None)
@given(scenarios(), st.data())
def test_a_message_that_was_never_sent_is_found(scenario: Scenario, data: st.DataObject) -> None:
    partition = data.draw(st.sampled_from(sorted(scenario.logs)))
    scenario.logs[partition].append(("z", 0))
    assert scenario.counts() == {Kind.PHANTOM: 1}


def test_an_offset_that_was_acknowledged_twice_is_found() -> None:
    history = History()
    for sequence in (0, 1):
        history.sent("p", sequence, "t", 0)
        history.acknowledged("p", sequence, "t", 0, 0)
    history.read("c", "t", 0, 0, "p", 1)
    assert history.check().counts == {Kind.INCONSISTENT: 1, Kind.LOST: 1}


def test_an_acknowledgement_of_something_never_sent_is_found() -> None:
    history = History()
    history.acknowledged("p", 0, "t", 0, 0)
    assert history.check().counts == {Kind.PHANTOM: 1}


def test_a_reader_that_stops_early_is_found_only_if_it_must_be_complete() -> None:
    history = _two_messages()
    history.read("early", "t", 0, 0, "p", 0)
    assert history.check(complete=["audit"]).ok
    report = history.check(complete=["audit", "early"])
    assert report.counts == {Kind.SKIPPED: 1}
    assert "early" in str(report)


def test_a_missing_reader_is_found_if_it_must_be_complete() -> None:
    assert _two_messages().check(complete=["absent"]).counts == {Kind.SKIPPED: 1}


def test_a_member_that_starts_beyond_the_position_of_its_group_is_found() -> None:
    history = _two_messages()
    history.sent("p", 2, "t", 0)
    history.read("audit", "t", 0, 2, "p", 2)
    history.read("group/one", "t", 0, 0, "p", 0)
    history.read("group/two", "t", 0, 2, "p", 2)
    assert history.check().counts == {Kind.SKIPPED: 1}
    history.read("group/two", "t", 0, 1, "p", 1)
    assert history.check(complete=["group"]).ok


def test_a_reader_that_starts_beyond_its_position_is_found() -> None:
    history = _two_messages()
    history.positioned("late", "t", 0, 0)
    history.read("late", "t", 0, 1, "p", 1)
    assert history.check().counts == {Kind.SKIPPED: 1}


def test_a_jump_is_found_even_if_the_reader_returns_for_the_rest() -> None:
    history = _two_messages()
    history.sent("p", 2, "t", 0)
    history.read("audit", "t", 0, 2, "p", 2)
    for offset in (0, 2, 1, 2):
        history.read("jumpy", "t", 0, offset, "p", offset)
    report = history.check()
    assert report.counts == {Kind.SKIPPED: 1}
    assert report.rewound == 1


def test_the_position_of_a_group() -> None:
    history = _two_messages()
    history.read("group/one", "t", 0, 0, "p", 0)
    history.read("group/two", "t", 0, 1, "p", 1)
    history.positioned("group/one", "t", 0, 7)
    history.read("group/one", "other", 0, 5, "p", 1)
    assert history.next_offsets("group", "t") == {0: 2}
    assert history.next_offsets("group/one", "t") == {0: 1}
    assert history.next_offsets("absent", "t") == {}
    assert history.acknowledgements == 2


def test_an_empty_history_is_valid() -> None:
    assert History().check().ok


def test_a_sequence_beyond_the_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence"):
        History().sent("p", 1 << 40, "t", 0)


def test_many_findings_are_counted_and_the_first_described() -> None:
    history = History()
    for sequence in range(1000):
        history.sent("p", sequence, "t", 0)
        history.acknowledged("p", sequence, "t", 0, sequence)
    report = history.check()
    assert report.counts == {Kind.LOST: 1000}
    assert len(report.findings) == 20
    assert "message 0 of p" in str(report)


@settings(deadline=None)
@given(scenarios())
def test_a_history_survives_saving_and_loading(tmp_path_factory: pytest.TempPathFactory, scenario: Scenario) -> None:
    scenario.repeating.add("c")
    history = scenario.history()
    path = tmp_path_factory.mktemp("history") / "history.jsonl"
    history.save(path)
    assert list(History.load(path).events()) == list(history.events())


def test_the_command_reports_by_its_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "history.jsonl"
    history = _two_messages()
    history.save(path)
    assert main([str(path), "--complete", "audit"]) == 0
    history.acknowledged("p", 1, "t", 0, 7)
    history.save(path)
    assert main([str(path)]) == 1
    assert "inconsistent: t-0 at offset 7" in capsys.readouterr().out
    path.write_text('{"event": "sent", "producer": "p"}\n')
    assert main([str(path)]) == 2
    assert "line 1" in capsys.readouterr().err
    assert main([str(tmp_path / "absent")]) == 2


def _two_messages() -> History:
    history = History()
    for sequence in (0, 1):
        history.sent("p", sequence, "t", 0)
        history.acknowledged("p", sequence, "t", 0, sequence)
        history.read("audit", "t", 0, sequence, "p", sequence)
    return history
