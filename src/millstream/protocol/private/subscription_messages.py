"""Private requests about subscriptions and their messages, and the reports of push processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final
from uuid import UUID

import msgspec
from msgspec import Meta

from millstream.core.errors import QuotaExceeded
from millstream.protocol.private.message import Request, Response

RECEIVE_KEY: Final = 32030
SETTLE_KEY: Final = 32031
CREATE_KEY: Final = 32032


class ReceiveResponse(msgspec.Struct, frozen=True, array_like=True):
    """The response to `ReceiveRequest`; `error` is Kafka's code."""

    error: int
    message: str | None
    partitions: list[PartitionMessages] = []
    throttle_ms: int = 0
    """How long the client's quota still forbids messages; the response then has none."""
    waited_ms: int = 0
    """How long the request waited, at least, before the first message was leased."""

    @property
    def quota_error(self) -> QuotaExceeded | None:
        """Return the reason if the quota is why there are no messages."""
        if self.partitions or not self.throttle_ms:
            return None
        reason = f"this client exceeds its consumer_byte_rate for another {self.throttle_ms} ms"
        return QuotaExceeded(reason, wait_s=self.throttle_ms / 1000)


class ReceiveRequest(Request[ReceiveResponse], frozen=True, array_like=True):
    """Requests messages of the partitions that the node leads."""

    KEY: ClassVar = RECEIVE_KEY
    subscription: str
    worker: str
    max_records: int
    max_bytes: int
    wait_ms: int
    partitions: list[tuple[str, int]] | None = None
    """Topics and partitions; None means all."""
    at_least_one: bool = True
    """Whether the first batch may exceed `max_bytes`; not if the worker already has messages of another node."""
    address: str = ""
    """The address of the worker, if another process asks on its behalf; empty for that of the connection."""


class LeasedRange(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive messages that the worker now holds; the end is exclusive."""

    start: int
    end: int
    attempt: int
    deadline_ms: int


class PartitionMessages(msgspec.Struct, frozen=True, array_like=True):
    """Leases of one partition, and the batches that contain their messages, among others."""

    topic: str
    topic_id: bytes
    partition: int
    leases: list[LeasedRange]
    batches: bytes
    lease_ms: int | None = None
    """The duration of the leases from when they were granted; None if nothing is leased (at most once)."""


class SettledRange(msgspec.Struct, frozen=True, array_like=True):
    """A verb on consecutive messages; the end is exclusive."""

    start: int
    end: int
    verb: int
    """A number of `Verb`; any number is read, so that an unknown one can be rejected by name."""
    delay_ms: int | None = None
    reason: str = ""
    attempt: int | None = None
    """The attempt with which they were leased; messages of another attempt are not settled. None means any."""


class PartitionSettles(msgspec.Struct, frozen=True, array_like=True):
    """Settlements of one partition's messages."""

    topic: str
    partition: int
    verbs: list[SettledRange]


class SettleResponse(msgspec.Struct, frozen=True, array_like=True):
    """For every partition, a result for every verb: Kafka's code, and a message if it is not 0."""

    error: int
    message: str | None
    results: list[list[tuple[int, str | None]]] = []


class SettleRequest(Request[SettleResponse], frozen=True, array_like=True):
    """Settles messages that a worker holds."""

    KEY: ClassVar = SETTLE_KEY
    subscription: str
    worker: str
    partitions: list[PartitionSettles]


class CreateSubscriptionResponse(Response, frozen=True, kw_only=True):
    """The id of the declared subscription."""

    subscription_id: str = ""


class CreateSubscriptionRequest(Request[CreateSubscriptionResponse], frozen=True):
    KEY: ClassVar = CREATE_KEY
    name: str
    topics: list[str]
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    validate_only: bool = False


class AlterSubscriptionRequest(Request[Response], frozen=True):
    """Changes of a subscription; a setting of None returns to its default, topics of None stay."""

    KEY: ClassVar = 32033
    name: str
    settings: dict[str, str | None] = msgspec.field(default_factory=dict)
    topics: list[str] | None = None
    validate_only: bool = False


class DeleteSubscriptionRequest(Request[Response], frozen=True):
    """A subscription to delete; one with open dead letters only with `force`."""

    KEY: ClassVar = 32034
    name: str
    force: bool = False


class ListSubscriptionsResponse(Response, frozen=True, kw_only=True):
    """Descriptions of subscriptions with the queues that the node leads."""

    subscriptions: Sequence[dict[str, Any]] = ()


class ListSubscriptionsRequest(Request[ListSubscriptionsResponse], frozen=True):
    """The subscriptions to describe, None for all, and the partitions whose queues are opened for that."""

    KEY: ClassVar = 32035
    names: list[str] | None = None
    open: list[tuple[str, int]] = msgspec.field(default_factory=list)
    leases_max: int = 0
    """How many leases to list of each subscription."""


class SeekSubscriptionResponse(Response, frozen=True, kw_only=True):
    """The moved queues, each with its topic, partition and offset."""

    queues: Sequence[dict[str, Any]] = ()


class SeekSubscriptionRequest(Request[SeekSubscriptionResponse], frozen=True):
    """The new position of a subscription's queues: all of them, or those of one topic or partition."""

    KEY: ClassVar = 32036
    name: str
    to: str
    topic: str | None = None
    partition: int | None = None


class ForgetSubscriptionRequest(Request[Response], frozen=True):
    """A topic whose delivery state is discarded; with `only_close`, its queues are only closed."""

    KEY: ClassVar = 32037
    name: str
    topic: str
    only_close: bool = False


LETTERS_MAX: Final = 1000
_OffsetNumber = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Letters = Annotated[
    list[tuple[_OffsetNumber, Annotated[int, Meta(ge=0, le=2**31 - 1)], _OffsetNumber]], Meta(max_length=LETTERS_MAX)
]
"""Messages by offset, each with the partition and offset of its dead letter."""


class ReviveMessagesResponse(Response, frozen=True, kw_only=True):
    """The messages that the log no longer has."""

    missing: Sequence[int] = ()


class ReviveMessagesRequest(Request[ReviveMessagesResponse], frozen=True):
    """Messages of a partition to deliver again, by their dead letters."""

    KEY: ClassVar = 32040
    name: str
    topic: str
    topic_id: UUID
    partition: int
    leader_epoch: int
    """In which the messages were written: after a failover, a log may have others at their offsets."""
    letter_topic_id: UUID
    letters: Letters
    closed: Letters = msgspec.field(default_factory=list)


class AppendLetterResponse(msgspec.Struct, frozen=True, array_like=True):
    error: int
    message: str | None
    offset: int = -1


class AppendLetterRequest(Request[AppendLetterResponse], frozen=True, array_like=True):
    """A batch with a dead letter for a partition, from a node that proves itself by a secret."""

    KEY: ClassVar = 32043
    topic: str
    partition: int
    batch: bytes
    node_id: int
    secret: str


class PushState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of push to an endpoint, since its process was started or the settings were changed."""

    state: str
    """unused, up, failing, down, or parked: nothing is sent, for the reason in `last_error`."""
    concurrency: int = 0
    in_flight: int = 0
    accepted: int = 0
    refused: int = 0
    failed: int = 0
    unreachable: int = 0
    accepted_per_s: float = 0.0
    failed_per_s: float = 0.0
    last_status: int = 0
    last_error: str = ""
    last_error_ms: int = 0

    def describe(self) -> dict[str, Any]:
        """Return the document that `subscription describe` shows."""
        return {name: getattr(self, name) for name in PushState.__struct_fields__}


class PushReport(PushState, frozen=True, kw_only=True):
    """The state of push for one subscription, and how long its endpoint takes to respond."""

    subscription: str
    bounds: list[float]
    cumulative: list[int]
    requests: int
    seconds: float
