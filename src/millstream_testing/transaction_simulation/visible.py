"""The view of `read_committed` consumers of a partition, derived from its batches alone."""

from __future__ import annotations

from typing import NamedTuple

from millstream.core.ids import NO_PRODUCER_ID
from millstream.core.topic import TopicPartition
from millstream.protocol.records.batch import BatchHeader, read_header
from millstream.protocol.records.control import read_marker
from millstream.protocol.records.record import decode_batch
from millstream_testing.simulation.committed import Violation
from millstream_testing.transaction_simulation.decisions import Decision, Decisions
from millstream_testing.transaction_simulation.model import Model


class Open(NamedTuple):
    """A transaction without a marker yet."""

    first_offset: int
    values: dict[int, str]
    """By offset."""


class Visible:
    """A partition: its open transactions, and the records that the others made visible."""

    def __init__(self, partition: TopicPartition, model: Model, decisions: Decisions) -> None:
        self.partition = partition
        self.values: dict[int, str] = {}
        """Every visible record by its offset."""
        self.end = 0
        self.batches = 0
        """The number of processed batches."""
        self._model = model
        self._decisions = decisions
        self._open: dict[int, Open] = {}

    @property
    def first_open(self) -> int | None:
        """Return where the oldest open transaction begins."""
        return min((one.first_offset for one in self._open.values()), default=None)

    def add(self, batch: bytes) -> None:
        header = read_header(batch)
        self.end = header.next_offset
        self.batches += 1
        if header.is_control:
            self._end_transaction(batch, header)
            return
        if header.producer_id == NO_PRODUCER_ID or not header.is_transactional:
            raise Violation(f"{self.partition}: a batch at {header.base_offset} belongs to no transaction")
        opened = self._open.setdefault(header.producer_id, Open(header.base_offset, {}))
        for record in decode_batch(batch, header):
            opened.values[record.offset] = (record.value or b"").decode()

    def _end_transaction(self, batch: bytes, header: BatchHeader) -> None:
        marker = read_marker(batch, header)
        opened = self._open.pop(header.producer_id, None)
        if marker is None:
            return
        if Decision(marker.producer_id, marker.producer_epoch, marker.commit) not in self._decisions:
            raise Violation(
                f"{self.partition}: no durable decision exists for the marker at {header.base_offset}: {marker}"
            )
        if opened is None:
            return
        values = list(opened.values.values())
        self._model.decided(self.partition, {number_of(value) for value in values}, values, commit=marker.commit)
        if marker.commit:
            self.values.update(opened.values)

    def check_read(self, read: dict[int, str], first: int, next_offset: int) -> None:
        """Compare what a consumer received with what is visible."""
        expected = {offset: value for offset, value in self.values.items() if first <= offset < next_offset}
        if read != expected:
            raise Violation(f"{self.partition}: read {read} from {first} to {next_offset}, visible is {expected}")


def number_of(value: str) -> int:
    """Return the number of the transaction of a record."""
    return int(value.partition(".")[0])
