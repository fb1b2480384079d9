"""Consumers of committed data in the simulation: records, and offsets of groups."""

from __future__ import annotations

import asyncio

from millstream.broker.replication.partition import CommittedRead
from millstream.core.errors import MillstreamError
from millstream.core.topic import TopicPartition
from millstream.protocol.records.batch import iterate_headers
from millstream.protocol.records.control import read_marker
from millstream.protocol.records.record import decode_batch
from millstream_testing.transaction_simulation.caller import Caller, ClientContext
from millstream_testing.transaction_simulation.node import GROUP, LEADER, RequestTarget, TransactionNode
from millstream_testing.transaction_simulation.visible import Visible


class CommittedConsumer(Caller):
    """Reads one partition from its beginning, and skips aborted records, as clients do."""

    def __init__(self, context: ClientContext, visible: Visible) -> None:
        partition = visible.partition
        super().__init__(f"reader-{partition.partition}", context)
        self.position = 0
        self._visible = visible
        self._target = RequestTarget(LEADER, partition.topic, partition.partition)

    async def run(self) -> None:
        while True:
            read = await self.send(self._target, self._read)
            if read.records:
                self._take(read)
            await asyncio.sleep(self.rng.expovariate(1 / self.context.plan.fetch_pause_s))

    async def _read(self, node: TransactionNode) -> CommittedRead:
        return await node.read_committed(self._target, self.position)

    def _take(self, read: CommittedRead) -> None:
        values, next_offset = delivered(read, self.position)
        self._visible.check_read(values, self.position, next_offset)
        self.position = next_offset


def delivered(read: CommittedRead, position: int) -> tuple[dict[int, str], int]:
    """Return what a client delivers of a response, by offset, and where it reads next."""
    waiting = sorted(read.aborted, key=lambda one: one[1])
    aborted: set[int] = set()
    values: dict[int, str] = {}
    next_offset = position
    for header in iterate_headers(read.records):
        next_offset = header.next_offset
        while waiting and waiting[0][1] <= header.last_offset:
            aborted.add(waiting.pop(0)[0])
        if header.is_control:
            marker = read_marker(read.records, header)
            if marker is not None and not marker.commit:
                aborted.discard(header.producer_id)
        elif header.producer_id not in aborted:
            for record in decode_batch(read.records, header):
                if record.offset >= position:
                    values[record.offset] = (record.value or b"").decode()
    return values, next_offset


class OffsetReader(Caller):
    """Reads the offset that a transactional id commits for its group."""

    def __init__(self, context: ClientContext, transactional_id: str) -> None:
        super().__init__(f"offsets-{transactional_id}", context)
        self._id = transactional_id
        self._seen = -1
        self._partition: TopicPartition = context.plan.data[0]

    async def run(self) -> None:
        """Check forever."""
        while True:
            await self.look()
            await asyncio.sleep(self.rng.expovariate(1 / (2 * self.context.plan.fetch_pause_s)))

    async def look(self) -> int:
        """Read the offset, and check it."""
        group = self._id
        try:
            offset = await self.send(
                RequestTarget(GROUP, group), lambda node: node.committed_offset(group, self._partition)
            )
        except MillstreamError as error:
            self.context.record(self.name, f"{type(error).__name__}: {error}")
            return self._seen
        self.context.model.offset_seen(self._id, self._seen, offset)
        self._seen = offset
        return offset
