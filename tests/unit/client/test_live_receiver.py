"""A listener keeps nothing of what was taken from it."""

from __future__ import annotations

import gc
from typing import Any

from millstream.client.held import Held
from millstream.client.live_receiver import LiveReceiver
from millstream.model.ids import Offset, PartitionIndex
from millstream.model.topic import TopicPartition
from millstream.records.record import NewRecord, encode_batch
from millstream.wire.fetching import FetchAnswer

PLACE = TopicPartition("orders", PartitionIndex(0))


async def test_messages_that_were_taken_are_gone() -> None:
    client: Any = None
    receiver = LiveReceiver(client, ["orders"])
    receiver._positions[PLACE] = Offset(0)
    receiver._topic_ids["orders"] = b"0" * 16
    for number in range(20):
        batch = encode_batch([NewRecord(None, b"value")] * 100, base_offset=number * 100)
        end = Offset(number * 100 + 100)
        receiver._take_in({PLACE: FetchAnswer(memoryview(batch), end, Offset(0), end)})
        assert len(receiver.take_many(1000)) == 100
    gc.collect()
    assert not [one for one in gc.get_objects() if type(one) is Held and one.settler is receiver.settling]
