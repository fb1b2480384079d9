"""Listeners for an acknowledgement: called in order, and discarded when they no longer wait."""

from __future__ import annotations

from uuid import UUID

from millstream.broker.replication.acknowledgement import DISCARD_MIN, AcknowledgementQueue
from millstream.broker.replication.partition import ACKS_ALL, Partition
from millstream.core.errors import MillstreamError, NotLeader
from millstream.core.ids import Epoch, NodeId, Offset, PartitionIndex
from millstream.core.partition_state import PartitionState, Versioned
from millstream.core.topic import Topic, TopicPartition, TopicSettings
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.clock import ManualClock
from millstream_testing.logs import memory_store

ME, OTHER = NodeId(1), NodeId(2)
TOPIC = Topic(name="orders", topic_id=UUID(int=7), partitions=1, replication=2, overrides={}, created_ms=0)
STATE = PartitionState(replicas=(ME, OTHER), leader=ME, leader_epoch=Epoch(1), in_sync=(ME, OTHER))


class Listener:
    """Records its calls."""

    def __init__(self) -> None:
        self.is_finished = False
        self.reported: list[MillstreamError | None] = []

    def acknowledged(self, error: MillstreamError | None) -> None:
        self.reported.append(error)


def test_every_listener_is_notified_once_in_log_order() -> None:
    waiting, listeners = AcknowledgementQueue(), [Listener() for _ in range(4)]
    for number, listener in enumerate(listeners):
        waiting.add(Offset(number + 1), listener)
    waiting.acknowledge(Offset(2))
    assert [len(listener.reported) for listener in listeners] == [1, 1, 0, 0]
    listeners[2].is_finished = True
    waiting.discard_finished()
    gone = NotLeader("gone")
    waiting.fail(gone)
    assert [listener.reported for listener in listeners] == [[None], [None], [], [gone]]
    assert not waiting


def test_cancelled_listeners_are_dropped_when_others_are_added() -> None:
    waiting = AcknowledgementQueue()
    still = [Listener() for _ in range(10)]
    for number in range(20_000):
        listener = still[number // 2000] if number % 2000 == 0 else Listener()
        waiting.add(Offset(number), listener)
        listener.is_finished = number % 2000 != 0
        assert len(waiting) <= 2 * (len(still) + DISCARD_MIN)
    waiting.acknowledge(Offset(20_000))
    assert all(listener.reported == [None] for listener in still)


async def test_a_notified_listener_may_wait_again() -> None:
    class Again(Listener):
        def acknowledged(self, error: MillstreamError | None) -> None:
            super().acknowledged(error)
            for _ in range(2 * DISCARD_MIN):
                waiting.add(Offset(9), over)

    waiting, over, last = AcknowledgementQueue(), Listener(), Listener()
    over.is_finished = True
    waiting.add(Offset(1), Again())
    waiting.add(Offset(1), last)
    waiting.acknowledge(Offset(1))
    assert last.reported == [None]


async def test_cancelled_listeners_are_dropped_while_the_high_watermark_stands_still() -> None:
    store = memory_store()
    log = store.open_log(TOPIC.topic_id, TopicPartition("orders", PartitionIndex(0)), TopicSettings(flush="os"))
    partition = Partition(TOPIC, PartitionIndex(0), log, store, alone=False, clock=ManualClock())
    partition.apply(Versioned(STATE, 1), me=ME)
    listeners = [Listener() for _ in range(50)]
    for listener in listeners:
        appended = partition.write(encode_batch([NewRecord(None, b"v", (), 1000)]), acks=ACKS_ALL)
        partition.notify_acknowledged(appended, listener)
        listener.is_finished = True
    partition.discard_finished()
    partition.close()
    assert not any(listener.reported for listener in listeners)
    store.close_now()
