"""Appends of a node to a partition that it may no longer lead: only the leader's refusals count."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.broker.cluster.keys import partition_key
from millstream.broker.cluster.store import Snapshot
from millstream.broker.coordination.peers import LeaderAppender
from millstream.broker.log.append import AppendedRange
from millstream.broker.replication.partition import Partition
from millstream.core.errors import NotLeader, OutOfOrderSequence
from millstream.core.ids import NodeId, Offset
from millstream.core.partition_state import PartitionState, encode_value
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.produce import Produced
from millstream_testing.node_group import single_node

SUCCESSOR_OFFSET = Offset(77)


@pytest.fixture(autouse=True)
def sent(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The batches that reached the successor of this node."""
    batches: list[bytes] = []

    async def produce(_client: Client, _topic: str, _partition: int, batch: bytearray) -> Produced:
        batches.append(bytes(batch))
        return Produced(SUCCESSOR_OFFSET, -1)

    monkeypatch.setattr(Client, "produce", produce)
    return batches


def letter(sequence: int) -> bytearray:
    record = NewRecord(None, b"letter", (), 1)
    return encode_batch([record], producer_id=7, producer_epoch=0, base_sequence=sequence)


@pytest.mark.parametrize("has_successor", [False, True])
async def test_a_refusal_counts_only_if_no_other_node_leads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_successor: bool
) -> None:
    """The successor has stored the batches before this one, and perhaps this one, too."""
    async with single_node(tmp_path) as topics:
        topic = await topics.create("dead")
        appender = LeaderAppender(topics, lambda: "127.0.0.1:1", client_id="letters")
        assert await appender.append("dead", 0, letter(0)) == 0
        assert await appender.append("dead", 0, letter(0)) == 0
        if has_successor:
            read = topics._coordination.read

            async def read_late(prefix: str) -> Snapshot:
                """Read what this node has not been notified of yet."""
                records = await read(prefix)
                entry = records.entries[partition_key((topic.topic_id, topics.partition("dead", 0).index))]
                state = PartitionState.from_json(entry.value).elected(NodeId(2))
                return records._replace(entries={entry.key: entry._replace(value=encode_value(state))})

            monkeypatch.setattr(topics._coordination, "read", read_late)
            assert await appender.append("dead", 0, letter(3)) == SUCCESSOR_OFFSET
        else:
            with pytest.raises(OutOfOrderSequence):
                await appender.append("dead", 0, letter(3))
        await appender.close()


async def test_a_batch_that_was_written_here_is_sent_to_the_successor_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: list[bytes]
) -> None:
    """Otherwise the successor would refuse it for its offset, even if it has the first copy."""
    async with single_node(tmp_path) as topics:
        await topics.create("dead")
        appender = LeaderAppender(topics, lambda: "127.0.0.1:1", client_id="letters")
        await appender.append("dead", 0, letter(0))

        async def append(partition: Partition, batch: bytearray) -> AppendedRange:
            partition.write(batch, acks=-1)
            raise NotLeader("another node was elected before the batch was acknowledged")

        monkeypatch.setattr(Partition, "append", append)
        assert await appender.append("dead", 0, letter(1)) == SUCCESSOR_OFFSET
        assert sent == [letter(1)]
        await appender.close()
