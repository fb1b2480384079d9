"""Repair of what this node's disk lost of partitions that other nodes host, too.

Leader or follower, a replica asks the others for the batches of a lost range, the leader first, and writes them in
place. If several replicas lost different ranges, each gets what the others still have. A follower takes what its leader
has; otherwise only acknowledged records are repaired, because all replicas are identical below the high watermark. A
leader that cannot repair a range that others have hands over to one of them. A range that no other replica has is
beyond repair, which readers see from then on.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from random import Random

from millstream.broker.cluster.replica_fetcher import ReplicaLink, ReplicaLinks
from millstream.broker.log.damage import LostRange
from millstream.broker.replication.partition import Partition
from millstream.core.backoff import Backoff
from millstream.core.errors import (
    CorruptBatch,
    DamagedRange,
    LogUnavailable,
    MillstreamError,
    MismatchedBatch,
    OffsetOutOfRange,
    StorageFailure,
)
from millstream.core.ids import NO_EPOCH, Epoch, NodeId, Offset
from millstream.core.metric import Metric, counter, gauge
from millstream.protocol.records.batch import iterate_headers
from millstream.protocol.wire.error_codes import error_from_code
from millstream.protocol.wire.replica_fetch import (
    CLOSED_SESSION_EPOCH,
    PartitionKey,
    ReplicaAnswer,
    ReplicaFetch,
    ReplicaPosition,
)

_logger = logging.getLogger(__name__)

RETRY_FIRST_S = 0.5
RETRY_MAX_S = 60.0
ASK_BYTES = 4 * 1024 * 1024
PART_BYTES = 16 * 1024 * 1024
"""A larger range is repaired in parts."""


class DamageRepair:
    """Repairs the partitions of a node, one by one, until `run` is cancelled."""

    def __init__(self, me: NodeId, links: ReplicaLinks, *, random: Random, registration: Callable[[], int]) -> None:
        self._me = me
        self._links = links
        self._random = random
        self._registration = registration
        self._due: dict[Partition, None] = {}
        self._retries: dict[Partition, asyncio.TimerHandle] = {}
        self._backoffs: dict[Partition, Backoff] = {}
        self._wake = asyncio.Event()
        self._repaired = 0

    def look_at(self, partition: Partition) -> None:
        """Repair a partition next, if its disk lost something and others host it, too."""
        log = partition.log
        timer = self._retries.pop(partition, None)
        if timer is not None:
            timer.cancel()
        if log.damage and log.damage.has_replicas and not log.closed:
            self._due[partition] = None
            self._wake.set()
        else:
            self._backoffs.pop(partition, None)

    def forget(self, partition: Partition) -> None:
        """Forget a partition that is no longer hosted here."""
        self._due.pop(partition, None)
        self._backoffs.pop(partition, None)
        timer = self._retries.pop(partition, None)
        if timer is not None:
            timer.cancel()

    async def run(self) -> None:
        """Repair damaged partitions; runs forever."""
        while True:
            while not self._due:
                self._wake.clear()
                await self._wake.wait()
            partition = next(iter(self._due))
            del self._due[partition]
            await self._repair(partition)
            if partition.log.damage and partition not in self._due and not partition.log.closed:
                self._try_later(partition)

    def _try_later(self, partition: Partition) -> None:
        backoff = self._backoffs.get(partition)
        if backoff is None:
            backoff = self._backoffs[partition] = Backoff(self._random, first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
        self._retries[partition] = asyncio.get_running_loop().call_later(backoff.take_s(), self.look_at, partition)

    async def _repair(self, partition: Partition) -> None:
        for lost in tuple(partition.log.damage):
            if lost not in partition.log.damage:
                continue
            try:
                await self._repair_range(partition, lost)
            except MillstreamError as error:
                self._log(logging.WARNING, "lost offsets are not repaired yet; retrying", partition, lost, error)
            except Exception as error:
                _logger.exception("the repair of a partition failed because of a bug")
                self._log(logging.ERROR, "lost offsets could not be repaired", partition, lost, error)

    async def _repair_range(self, partition: Partition, lost: LostRange) -> None:
        undecided: MillstreamError | None = None
        cannot: MismatchedBatch | StorageFailure | None = None
        for node in self._others(partition):
            try:
                batches = await self._fetch(partition, node, lost)
            except MillstreamError as error:
                undecided = error
                continue
            try:
                if batches:
                    await partition.restore_range(lost, batches)
                    self._repaired += 1
                    return
            except (MismatchedBatch, StorageFailure) as error:
                cannot = error
            except MillstreamError as error:
                # The answer was damaged, or the log changed meanwhile.
                undecided = error
        if cannot is not None:
            # Other replicas have it, so one of them should lead.
            partition.hand_over()
            raise cannot
        if undecided is not None:
            raise undecided
        if lost.offsets not in partition.log.damage.beyond_repair:
            self._log(logging.ERROR, "no other replica has what the disk lost", partition, lost, None)
            partition.abandon_range(lost)

    def _others(self, partition: Partition) -> list[NodeId]:
        """Return the other replicas; those most likely to have everything come first."""
        state = partition.state
        if state is None:
            return []
        return [
            node
            for node in dict.fromkeys((state.leader, *state.in_sync, *state.replicas))
            if node in state.replicas and node != self._me
        ]

    async def _fetch(self, partition: Partition, node: NodeId, lost: LostRange) -> bytes:
        """Return the batches of a lost range, or the first of them, from another replica; empty if it has none."""
        epoch = partition.leader_epoch if node == partition.follows else NO_EPOCH
        if epoch == NO_EPOCH and lost.first >= partition.high_watermark:
            raise LogUnavailable(f"offset {lost.first} is not known to be acknowledged")
        link = self._links.open(node)
        found, offset = bytearray(), lost.first
        try:
            while offset < lost.next_offset and len(found) < PART_BYTES:
                try:
                    answer = await self._ask(link, partition, offset, epoch)
                except (DamagedRange, CorruptBatch, OffsetOutOfRange):
                    break
                if not answer.records:
                    raise LogUnavailable(f"node {node} does not know yet that offset {offset} is acknowledged")
                found += answer.records
                offset = [int(header.next_offset) for header in iterate_headers(answer.records)][-1]
        except MillstreamError:
            if not found:
                raise
        finally:
            await link.close()
        if epoch not in (NO_EPOCH, partition.leader_epoch):
            raise LogUnavailable(f"node {node} no longer leads")
        return bytes(found)

    async def _ask(self, link: ReplicaLink, partition: Partition, offset: int, epoch: Epoch) -> ReplicaAnswer:
        key: PartitionKey = (partition.topic.topic_id, partition.index)
        position = ReplicaPosition(Offset(offset), epoch, NO_EPOCH, partition.log_start, ASK_BYTES)
        fetch = ReplicaFetch(
            self._me, self._registration(), 0, ASK_BYTES, {key: position}, session_epoch=CLOSED_SESSION_EPOCH
        )
        answers = await link.fetch(fetch)
        answer = answers.partitions.get(key)
        if answers.code or answer is None:
            raise error_from_code(answers.code or -1, None, about=f"repair of {partition.log.partition}")
        if answer.code:
            raise error_from_code(answer.code, None, about=f"repair of {partition.log.partition}")
        return answer

    def _log(self, level: int, what: str, partition: Partition, lost: LostRange, error: Exception | None) -> None:
        extra: dict[str, object] = {
            "topic": partition.topic.name,
            "partition": partition.index,
            "first_offset": lost.first,
            "next_offset": lost.next_offset,
        }
        if error is not None:
            extra["error"] = str(error)
        _logger.log(level, what, extra=extra)

    def metrics(self) -> list[Metric]:
        """Return the metrics of repairs, done and pending."""
        waiting = len(self._due) + len(self._retries)
        return [
            counter(
                "millstream_replicas_repaired_ranges_total", "Lost ranges repaired from a replica.", self._repaired
            ),
            gauge("millstream_replicas_to_repair", "Partitions on this node with lost ranges.", waiting),
        ]
