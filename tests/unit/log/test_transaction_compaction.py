"""Compaction of a log with transactions: aborted records are removed, markers are kept while they are needed."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.log.log import Log
from millstream.core.ids import Epoch, PartitionIndex, ProducerEpoch, ProducerId
from millstream.core.topic import TopicPartition, TopicSettings
from millstream.protocol.records.batch import DELETE_HORIZON_FLAG, BatchHeader, iterate_headers
from millstream.protocol.records.control import Marker, encode_marker
from millstream.protocol.records.record import NewRecord, decode_records, encode_batch
from millstream_testing.clock import ManualClock
from millstream_testing.files import MemoryFiles
from millstream_testing.logs import memory_store

SETTINGS = TopicSettings(
    cleanup_policy="compact",
    segment_bytes=400,
    index_interval_bytes=100,
    segment_ms=60_000,
    min_cleanable_dirty_ratio=0.0,
    delete_retention_ms=10_000,
    retention_ms=-1,
)
PRODUCER_EXPIRY_MS = 5_000
RecordOf = tuple[int, bytes | None, bytes | None]


class Machine:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.files = MemoryFiles(open_files_max=64)
        self.sequences: dict[tuple[int, int], int] = {}
        self.epochs: dict[int, int] = {}
        self.reopen()

    def reopen(self) -> None:
        self.store = memory_store(self.files, self.clock, journal_bytes=100_000, producer_expiry_ms=PRODUCER_EXPIRY_MS)
        self.log: Log = self.store.open_log(UUID(int=9), TopicPartition("t", PartitionIndex(0)), SETTINGS)

    def kill(self) -> None:
        self.sync()
        self.files.kill()
        self.reopen()

    def put(self, producer: int, key: bytes, value: bytes | None) -> None:
        producers, epoch = self.log.producers, self.epochs.get(producer, 0)
        sequence = self.sequences.get((producer, epoch), 0)
        guard = producers.start_guard(producer, epoch, sequence, 0, bumps_epoch=False) if producer else None
        batch = encode_batch(
            [NewRecord(key, value, (), self.clock.now_ms())],
            producer_id=producer or -1,
            producer_epoch=epoch if producer else -1,
            base_sequence=sequence if producer else -1,
            transactional=bool(producer),
        )
        self.log.append(batch, leader_epoch=Epoch(1), guard=guard)
        self.sequences[producer, epoch] = sequence + 1

    def end(self, producer: int, commit: bool, bump: int = 1) -> None:
        epoch = self.epochs[producer] = self.epochs.get(producer, 0) + bump
        marker = Marker(
            producer_id=ProducerId(producer),
            producer_epoch=ProducerEpoch(epoch),
            commit=commit,
            coordinator_epoch=0,
        )
        if self.log.producers.check_marker(marker):
            self.log.append(encode_marker(marker, self.clock.now_ms()), leader_epoch=Epoch(1), internal=True)

    def sync(self) -> None:
        self.store.sync_soon(self.log)
        self.store.commit_once()

    def compact(self) -> None:
        self.sync()
        if self.log.segments and self.log.segments[-1].size:
            self.log.roll()
        while self.store.checkpoint_once():
            pass
        self.store.compact_once()
        while self.store.checkpoint_once():
            pass

    def later(self) -> None:
        """Advance the clock until tombstones may be removed and producers have expired."""
        self.clock.advance_ms(20_000)
        self.log.producers.expire(self.clock.now_ms())

    # -- the view of a consumer -----------------------------------------------------------------------------

    @property
    def stable(self) -> int:
        return self.log.producers.transactions.stable_offset(self.log.end_offset)

    def headers(self) -> list[BatchHeader]:
        pieces, at = [], int(self.log.start_offset)
        while at < self.log.end_offset:
            lost = self.log.damage.at(at)
            if lost is not None:
                at = lost.end
                continue
            for header in iterate_headers(self.log.read(at, max_bytes=250, up_to=self.log.end_offset)):
                pieces.append(header)
                at = header.next_offset
        return pieces

    def markers(self) -> list[int]:
        return [int(header.base_offset) for header in self.headers() if header.is_control]

    def committed(self) -> list[RecordOf]:
        """Read as Kafka's consumers do: by the list of aborted transactions and their markers."""
        records: list[RecordOf] = []
        at, stable = int(self.log.start_offset), self.stable
        while at < stable:
            chunk = self.log.read_slice(at, max_bytes=250, up_to=stable)
            assert chunk is not None
            transactions = self.log.producers.transactions.aborted.overlapping(at, chunk.next_offset)
            pending = sorted((transaction.first_offset, transaction.producer_id) for transaction in transactions)
            dropped: set[int] = set()
            for header in iterate_headers(chunk.data):
                while pending and pending[0][0] <= header.last_offset:
                    dropped.add(pending.pop(0)[1])
                data = chunk.data[header.position : header.end_position]
                if header.is_control:
                    if next(decode_records(data, control=True)).key == b"\0\0\0\0":
                        dropped.discard(header.producer_id)
                elif not (header.is_transactional and header.producer_id in dropped):
                    records += [(record.offset, record.key, record.value) for record in decode_records(data)]
            at = chunk.next_offset
        return records

    def table(self) -> dict[bytes, bytes]:
        """The last committed value of each key."""
        last: dict[bytes, bytes] = {}
        for _, key, value in self.committed():
            if value is None:
                last.pop(key or b"", None)
            else:
                last[key or b""] = value
        return last


def test_aborted_records_are_removed_and_their_markers_three_steps_later() -> None:
    machine = Machine()
    machine.put(1, b"a", b"committed")
    machine.end(1, commit=True)
    machine.put(1, b"a", b"aborted")
    machine.end(1, commit=False)
    machine.put(0, b"b", b"plain")
    machine.later()

    machine.compact()
    assert machine.committed() == [(0, b"a", b"committed"), (4, b"b", b"plain")]
    assert len([header for header in machine.headers() if header.is_transactional and not header.is_control]) == 1
    assert len(machine.log.producers.transactions.aborted) == 1

    machine.put(0, b"c", b"plain")
    machine.compact()
    assert machine.markers() == [1, 3]
    assert [bool(header.attributes & DELETE_HORIZON_FLAG) for header in machine.headers() if header.is_control] == [
        False,
        True,
    ]
    assert len(machine.log.producers.transactions.aborted) == 0

    machine.later()
    machine.put(0, b"c", b"again")
    machine.compact()
    assert machine.markers() == [1]
    assert machine.committed() == [(0, b"a", b"committed"), (4, b"b", b"plain"), (6, b"c", b"again")]


def test_a_marker_is_removed_once_every_record_of_its_transaction_is_superseded() -> None:
    machine = Machine()
    machine.put(1, b"a", b"1")
    machine.end(1, commit=True)
    machine.put(0, b"a", b"2")
    machine.later()
    machine.compact()
    assert machine.markers() == [1]
    for value in (b"3", b"4"):
        machine.later()
        machine.put(0, b"a", value)
        machine.compact()
    assert machine.markers() == []
    assert machine.table() == {b"a": b"4"}


def test_nothing_beyond_the_last_stable_offset_is_compacted() -> None:
    machine = Machine()
    machine.put(0, b"a", b"kept")
    machine.put(1, b"a", b"open")
    machine.put(0, b"a", b"behind")
    machine.compact()
    assert [key for _, key, _ in machine.committed()] == [b"a"]
    machine.end(1, commit=False)
    machine.compact()
    assert machine.table() == {b"a": b"behind"}


def test_markers_are_kept_when_a_damaged_segment_may_hold_their_records() -> None:
    machine = Machine()
    for number in range(8):
        machine.put(1, b"k%d" % number, b"v")
    first = machine.log.segments[0]
    machine.end(1, commit=False)
    machine.sync()
    machine.files.flip_bit(first.path, first.size - 2, 0)
    machine.kill()
    machine.later()
    for number in range(4):
        machine.put(0, b"other", b"%d" % number)
        machine.compact()
        machine.later()
    assert machine.log.damaged_ranges
    assert machine.markers() == [8]
    assert len(machine.log.producers.transactions.aborted) == 1


def test_the_last_marker_of_a_producer_is_kept_until_the_producer_expires() -> None:
    machine = Machine()
    machine.put(1, b"a", b"1")
    machine.end(1, commit=False)
    for value in (b"2", b"3", b"4"):
        machine.clock.advance_ms(PRODUCER_EXPIRY_MS - 1)
        machine.put(0, b"a", value)
        machine.compact()
        assert machine.markers() == [1]
        machine.log.producers.get(1).last_ms = machine.clock.now_ms()  # type: ignore[union-attr]
    machine.kill()
    known = machine.log.producers.get(1)
    assert known is not None
    assert known.epoch == 1


PRODUCERS = st.integers(1, 3)
KEYS = st.sampled_from([b"a", b"b", b"c"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 3), KEYS, st.one_of(st.none(), st.binary(min_size=1, max_size=3))),
        st.tuples(st.just("put"), PRODUCERS, KEYS, st.binary(min_size=1, max_size=3)),
        st.tuples(st.just("end"), PRODUCERS, st.booleans(), st.integers(0, 1)),
        *(st.tuples(st.just(name)) for name in ("compact", "compact", "later", "kill")),
    ),
    min_size=15,  # Without it, lists have five steps on average.
    max_size=40,
)


@given(STEPS)
def test_compaction_does_not_change_the_committed_records(steps: list[tuple[object, ...]]) -> None:
    machine = Machine()
    for name, *arguments in steps:
        before = machine.table(), machine.stable
        opened = machine.log.producers.open_transactions()
        getattr(machine, str(name))(*arguments)
        if name in ("compact", "kill", "later"):
            assert (machine.table(), machine.stable) == before
            assert [transaction[:3] for transaction in machine.log.producers.open_transactions()] == [
                transaction[:3] for transaction in opened
            ]
