"""Publishing that may be repeated by whoever does not know whether it happened, and asking what became of a message."""

from __future__ import annotations

import asyncio
import time

from millstream.client.arguments import check_whole
from millstream.client.publisher import MESSAGE_ID
from millstream.client.receipt import Receipt
from millstream.core.errors import InvalidRequest, UnknownTopic
from millstream.protocol.private.delivery_state import WAIT_MS_MAX, MessageDelivery, delivery_state
from millstream.protocol.private.publish_once import partition_of, publish_once
from millstream.protocol.records.record import NewRecord
from millstream.protocol.wire.client import Client


async def publish_deduplicated(client: Client, topic: str, record: NewRecord, partition: int | None) -> Receipt:
    """Publish a message unless one with its id was published a while ago; the receipt is that of the first."""
    given = next((value for name, value in record.headers if name == MESSAGE_ID and value), None)
    if given is None:
        raise InvalidRequest("a message is told from others by its id: deduplicate=True needs id=…")
    if partition is not None:
        check_whole("partition", partition)
    found = (await client.metadata([topic], create=True)).topics.get(topic)
    if found is None:
        raise UnknownTopic(f"topic {topic!r} does not exist; create it with: millstream topic create {topic}")
    at = partition_of(record.key, given, len(found.partitions)) if partition is None else partition
    if record.timestamp_ms < 0:
        record = record._replace(timestamp_ms=int(time.time() * 1000))
    (placed,) = await publish_once(client, topic, at, [record])
    return Receipt(topic, at, placed.offset, placed.timestamp_ms, str(found.topic_id), given.decode(errors="replace"))


async def delivery(client: Client, receipt: Receipt, subscription: str, wait_s: float) -> MessageDelivery:
    """Where a message is in a subscription; waits for its end at most so long."""
    if receipt.offset < 0:
        raise InvalidRequest("where this message lies is not known, since it was published without acknowledgement")
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while True:
        wait_ms = max(0, int((deadline - loop.time()) * 1000))
        found = await delivery_state(
            client,
            subscription,
            receipt.topic,
            receipt.partition,
            receipt.offset,
            wait_ms=min(wait_ms, WAIT_MS_MAX),
        )
        if found.is_final or wait_ms <= WAIT_MS_MAX:
            return found
