"""Publishing messages that may have been published already: the broker knows them by their ids.

    placed = await publish_once(client, "orders", partition, [NewRecord(key, value, (("message-id", b"o-17"),))])

A message whose id the partition has seen within the window is not stored again: the response says where it is stored.
So a caller that does not know whether a message was published publishes it again, through any node. An id is looked up
in one partition, so a message must go to the same one each time: `partition_of` selects it by key, otherwise by id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import ClassVar, Final, NamedTuple

import msgspec

from millstream.core.errors import ProtocolViolation, QuotaExceeded
from millstream.core.ids import NodeId
from millstream.core.topic import partition_for_key
from millstream.protocol.private.message import Request, decode, encode
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import error_from_code

TIMEOUT_MS: Final = 30_000
PATIENCE_S: Final = 120.0
"""How long a publish waits for its client's quota by default."""


class PublishOnceResponse(msgspec.Struct, frozen=True, array_like=True):
    """For every record: its offset, its timestamp, and whether it is new."""

    error: int
    message: str | None
    placed: list[tuple[int, int, bool]] = []
    throttle_ms: int = 0
    """How long the client's quota forbids publishing."""


class PublishOnceRequest(Request[PublishOnceResponse], frozen=True, array_like=True):
    """A batch for a partition; every record in it has an id."""

    KEY: ClassVar = 32038
    topic: str
    partition: int
    batch: bytes
    timeout_ms: int = TIMEOUT_MS


class PublishOnceResult(NamedTuple):
    """The position of a stored message, and whether this publish stored it."""

    offset: int
    timestamp_ms: int
    is_new: bool


def partition_of(key: bytes | None, message_id: bytes, partitions: int) -> int:
    """Return the partition of a message for every publish of it: by its key, otherwise by its id."""
    return partition_for_key(message_id if key is None else key, partitions)


async def publish_once(
    client: Client,
    topic: str,
    partition: int,
    records: Sequence[NewRecord],
    *,
    patience_s: float = PATIENCE_S,
) -> list[PublishOnceResult]:
    """Publish messages with `message-id` headers to a partition, each once; return when they are acknowledged.

    They are sent again if a response is lost or the leader is gone; also if the client's quota is exhausted, after the
    time that the broker asks for, unless that exceeds the patience.
    """
    body = encode(PublishOnceRequest(topic, partition, bytes(encode_batch(records))))

    async def attempt(leader: NodeId) -> PublishOnceResponse:
        frame = await client.private(leader, PublishOnceRequest.KEY, body)
        response = decode(frame, PublishOnceResponse)
        if response.error:
            refused = error_from_code(response.error, response.message, about=f"publish to {topic}-{partition}")
            raise QuotaExceeded(str(refused), wait_s=response.throttle_ms / 1000) if response.throttle_ms else refused
        return response

    while True:
        try:
            response = await client.call_leader(topic, partition, attempt, create=True)
            break
        except QuotaExceeded as error:
            patience_s -= error.wait_s
            if patience_s < 0:
                raise
            await asyncio.sleep(error.wait_s)
    if len(response.placed) != len(records):
        raise ProtocolViolation(
            f"{len(records)} messages were published, but the broker reported {len(response.placed)}"
        )
    return [PublishOnceResult(*result) for result in response.placed]
