"""What workers and nodes say to each other about the messages of a subscription: bodies in MessagePack."""

from __future__ import annotations

from typing import Final

import msgspec

from millstream.core.errors import QuotaExceeded

RECEIVE_KEY: Final = 32030
SETTLE_KEY: Final = 32031
CREATE_KEY: Final = 32032
ALTER_KEY: Final = 32033
DELETE_KEY: Final = 32034
LIST_KEY: Final = 32035
SEEK_KEY: Final = 32036
FORGET_KEY: Final = 32037
REVIVE_KEY: Final = 32040


class Receive(msgspec.Struct, frozen=True, array_like=True):
    """A worker asks for messages of the partitions that this node leads."""

    subscription: str
    worker: str
    max_records: int
    max_bytes: int
    wait_ms: int
    partitions: list[tuple[str, int]] | None = None
    """Topics and partitions; None means all of them."""
    at_least_one: bool = True
    """Whether the first batch may exceed `max_bytes`; not if the worker has messages of another node already."""


class LeasedRange(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive messages that the worker holds now; the end is exclusive."""

    start: int
    end: int
    attempt: int
    deadline_ms: int


class PartitionMessages(msgspec.Struct, frozen=True, array_like=True):
    """What one partition gives: leases, and the batches in which their messages are, among others."""

    topic: str
    topic_id: bytes
    partition: int
    leases: list[LeasedRange]
    batches: bytes
    lease_ms: int | None = None
    """How long the leases last from when they were granted; None if nothing is leased (at most once)."""


class ReceiveAnswer(msgspec.Struct, frozen=True, array_like=True):
    """What a worker gets; `error` is Kafka's code."""

    error: int
    message: str | None
    partitions: list[PartitionMessages] = []
    throttle_ms: int = 0
    """How long the client's quota keeps messages from it yet; then there are none."""
    waited_ms: int = 0
    """How long the request waited here, at least, before the first of the messages was leased."""

    @property
    def held_back(self) -> QuotaExceeded | None:
        """Why there is nothing, if that is since the client has had too much."""
        if self.partitions or not self.throttle_ms:
            return None
        reason = f"this client is beyond its consumer_byte_rate for {self.throttle_ms} ms yet"
        return QuotaExceeded(reason, wait_s=self.throttle_ms / 1000)


class SettledRange(msgspec.Struct, frozen=True, array_like=True):
    """One verb about consecutive messages; the end is exclusive."""

    start: int
    end: int
    verb: int
    """A number of `Verb`; one that is not known is refused by its name, so it is read as any number."""
    delay_ms: int | None = None
    reason: str = ""
    attempt: int | None = None
    """The delivery with which they were leased; of another one nothing is settled. None means whichever it is."""


class PartitionSettles(msgspec.Struct, frozen=True, array_like=True):
    """What a worker says of one partition's messages."""

    topic: str
    partition: int
    verbs: list[SettledRange]


class SettleRequest(msgspec.Struct, frozen=True, array_like=True):
    """What a worker says of messages that it holds."""

    subscription: str
    worker: str
    partitions: list[PartitionSettles]


class SettleAnswer(msgspec.Struct, frozen=True, array_like=True):
    """For every partition, a result for every verb: Kafka's code, and a message when it is not 0."""

    error: int
    message: str | None
    results: list[list[tuple[int, str | None]]] = []
