"""Private requests about mirrors: between clients and nodes, among the nodes of a target, and to a source."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Final, Generic, Literal, TypeVar
from uuid import UUID

import msgspec

from millstream.core.subscription import QueueKey
from millstream.protocol.private.message import Request, Response
from millstream.protocol.private.schema_messages import SchemaMessage

R = TypeVar("R", bound=Response)

Offsets = dict[str, dict[int, int]]
"""An offset of each partition, by topic."""


class CreateMirrorRequest(Request[Response], frozen=True, kw_only=True):
    KEY: ClassVar = 32120
    name: str
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    enabled: bool = True


class AlterMirrorRequest(Request[Response], frozen=True, kw_only=True):
    """Changes of a mirror; None keeps a value."""

    KEY: ClassVar = 32121
    name: str
    settings: dict[str, str | None] = msgspec.field(default_factory=dict)
    enabled: bool | None = None


class DeleteMirrorRequest(Request[Response], frozen=True, kw_only=True):
    """A mirror to delete; one that is the way back after a failover only with `force`."""

    KEY: ClassVar = 32122
    name: str
    force: bool = False


class ListMirrorsResponse(Response, frozen=True, kw_only=True):
    """Mirrors, each with its state on the node that responds."""

    mirrors: Sequence[dict[str, Any]] = ()


class ListMirrorsRequest(Request[ListMirrorsResponse], frozen=True, kw_only=True):
    """Names of mirrors; None means all."""

    KEY: ClassVar = 32123
    names: list[str] | None = None


class OwnerRequest(Request[R], Generic[R], frozen=True, kw_only=True):
    """A request that the owner of mirrors carries out, and other nodes forward to it."""

    is_forwarded: bool = False
    """Whether another node has sent it on; it is not sent on again, since nodes may disagree on the owner."""


class FailoverResponse(Response, frozen=True, kw_only=True):
    """The copies that are writable now."""

    partitions: Sequence[CutPartition] = ()
    source_error: str = ""
    """The reason why the missing offsets could not be determined; empty if they could."""
    waited_ms: int = 0


class FailoverRequest(OwnerRequest[FailoverResponse], frozen=True, kw_only=True):
    """Copies to make writable; None means all of the mirror's."""

    KEY: ClassVar = 32124
    name: str
    topics: list[str] | None = None
    is_planned: bool = False
    """Whether the source is reachable, so that group offsets and queue states are copied once more."""


class CutPartition(msgspec.Struct, frozen=True, kw_only=True):
    topic: str
    partition: int
    offset: int
    """The cut: everything below was copied; records from here on are this cluster's own."""
    epoch: int
    """The epoch in which this cluster writes."""
    dropped: int | None = 0
    """Offsets that had arrived of transactions that were incomplete; None if an earlier attempt has dropped them."""
    aborted: Sequence[int] = ()
    """The start offsets of the transactions that were open at the cut and are aborted."""
    source_end: int | None = None
    """The source's high watermark, if it was reachable."""

    @property
    def missing(self) -> int | None:
        """Return the number of acknowledged offsets of the source that are missing here; None if it was unreachable."""
        return None if self.source_end is None else max(0, self.source_end - self.offset)


class ReverseResponse(Response, frozen=True, kw_only=True):
    """The records that the old source gives up."""

    removed: Sequence[RemovedRange] = ()
    saved_to: str = ""
    recreated: Sequence[str] = ()
    """Topics that the old source has deleted and created again, and which therefore do not follow."""
    partitions: Sequence[CutPartition] = ()
    """After a switch: where this cluster took over."""
    waited_ms: int = 0


class ReverseRequest(OwnerRequest[ReverseResponse], frozen=True, kw_only=True):
    """The terms on which the old source follows this cluster from now on."""

    KEY: ClassVar = 32125
    name: str
    address: str = ""
    """The address at which the old source reaches this cluster; empty for the addresses of its nodes."""
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    """How it signs in here, and other settings of the mirror that is declared there."""
    save_to: str = ""
    """A topic of the old source for records that only it has; empty drops them."""
    timeout_ms: int = 60_000


class SwitchRequest(ReverseRequest, frozen=True, kw_only=True):
    """A reversal without data loss: this cluster takes over first."""

    KEY: ClassVar = 32126


class RemovedRange(msgspec.Struct, frozen=True, kw_only=True):
    """Records that only the old source had, or had committed, and which it drops."""

    topic: str
    partition: int
    start: int
    end: int


class CutResponse(Response, frozen=True, kw_only=True):
    cut: CutPartition | None = None


class CutRequest(Request[CutResponse], frozen=True, kw_only=True):
    """Asks the leader of a copy to cut it, and to be ready for writers."""

    KEY: ClassVar = 32127
    mirror: str
    topic: str
    partition: int
    epoch: int
    """The epoch in which this cluster continues the copy; the same each time a failover is repeated."""
    verified: int | None = None
    gap: int | None = None
    """The offset from which the copy may lack values of keys."""


class ExposeResponse(Response, frozen=True, kw_only=True):
    """The copies that this node leads, with the offsets that all replicas have or clients can read."""

    reached: Offsets = msgspec.field(default_factory=dict)
    waiting: Sequence[tuple[str, int]] = ()
    """The copies on which clients wait at a commit."""


class ExposeRequest(Request[ExposeResponse], frozen=True, kw_only=True):
    """Asks a node whether its copies reach some offsets; then to expose whole transactions up to there."""

    KEY: ClassVar = 32128
    mirror: str
    offsets: Offsets
    is_verified: bool = False
    wait_ms: int = 0
    """How long to wait until the copies that the node leads reach the offsets."""
    revision: int = 0
    """The revision of the cluster's state that the caller knows."""
    is_readable: bool = False
    """Whether clients must be able to read up to these offsets; otherwise it suffices that all replicas have them."""


class CommitNoticeRequest(Request[Response], frozen=True, kw_only=True):
    """Notifies the owner of a mirror that clients wait at a commit on this node."""

    KEY: ClassVar = 32133
    mirror: str


ANY_SEQUENCE: Final = -1
"""Stands for the number of a write: the caller has seen the queue, and does not ask for later writes of it."""


class OfferResponse(Response, frozen=True, kw_only=True):
    """The state of a node of the source, apart from records."""

    mirrored: Sequence[str] = ()
    """Without topics in the request: those that a mirror writes there, and which are therefore not mirrored again."""
    origins: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """Without topics in the request: the ids of the clusters from which the records of topics came."""
    fenced: dict[str, str] = msgspec.field(default_factory=dict)
    """Without topics in the request: those that refuse writers during a switch, with the name of its mirror."""
    letters: dict[str, list[str]] = msgspec.field(default_factory=dict)
    """Without topics in the request: dead letter topics, each with the topics whose messages it may hold."""
    subscriptions: Sequence[OfferedSubscription] = ()
    queues: Sequence[QueueSnapshot] = ()
    has_more: bool = False
    """Whether queues were left out because the response would be too large."""
    has_hidden: bool = False
    """Whether subscriptions were left out because the client may not read them."""


class OfferRequest(Request[OfferResponse], frozen=True, kw_only=True):
    """Asks a node of the source for everything but records."""

    KEY: ClassVar = 32129
    topics: Sequence[UUID] = ()
    """Topics whose queues are requested."""
    known: Sequence[tuple[QueueKey, int]] = ()
    """Queues, each with the number of the last write that the caller has seen, or `ANY_SEQUENCE`; unchanged ones are
    omitted."""


class QueueSnapshot(msgspec.Struct, frozen=True, array_like=True):
    """The stored state of a queue."""

    key: QueueKey
    sequence: int
    snapshot: bytes


class OfferedSubscription(msgspec.Struct, frozen=True, kw_only=True):
    """A subscription as declared, without secrets."""

    name: str
    subscription_id: UUID
    topics: list[str]
    settings: dict[str, str]
    starts: dict[str, list[int]]
    created_ms: int


class RegistryResponse(Response, frozen=True, kw_only=True):
    """Versions of subjects, deleted ones included; the last page has all settings."""

    last: int = 0
    schemas: Sequence[SchemaMessage] = ()
    settings: Sequence[SettingsMessage] = ()
    has_more: bool = False


class RegistryRequest(Request[RegistryResponse], frozen=True, kw_only=True):
    """Asks a source for its schemas."""

    KEY: ClassVar = 32134
    since: int = -1
    """The change that the caller has seen; nothing is returned if there was none since."""
    offset: int = 0
    """How many versions the caller already has."""


class SettingsMessage(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration and mode of a subject or context."""

    subject: str
    config: dict[str, Any]
    mode: str | None = None


class BarrierResponse(Response, frozen=True, kw_only=True):
    """The high watermarks of that moment."""

    offsets: Offsets = msgspec.field(default_factory=dict)
    groups: dict[str, Offsets] = msgspec.field(default_factory=dict)
    """With groups: the groups for which transactions had committed offsets, and their offsets in these topics."""
    groups_omitted: bool = False
    """Whether groups are left out, because they have too many offsets."""


class BarrierRequest(Request[BarrierResponse], frozen=True, kw_only=True):
    """Asks a source for a moment at which no transaction is half committed."""

    KEY: ClassVar = 32130
    topics: list[str]
    topic_ids: dict[str, UUID] = msgspec.field(default_factory=dict)
    """The ids that topics had; those that have another one now are left out of the response."""
    with_groups: bool = False
    """Whether to return the groups with offsets that transactions have committed, and their offsets."""


class HoldCommitsResponse(Response, frozen=True, kw_only=True):
    """Whether decisions were held back all the time, and which coordinators the node runs: partition and epoch."""

    held: bool = False
    shards: Sequence[tuple[int, int]] = ()
    groups: dict[int, dict[str, Offsets]] = msgspec.field(default_factory=dict)
    """With groups: their offsets in the topics, for each coordinator of groups."""
    groups_omitted: bool = False
    """Whether groups are left out, because they have too many offsets."""


class HoldCommitsRequest(Request[HoldCommitsResponse], frozen=True, kw_only=True):
    """Asks a node of the source to hold back decisions of transactions, or about what it holds back."""

    KEY: ClassVar = 32131
    token: str
    action: Literal["hold", "release", "read groups"]
    hold_ms: int = 0
    """How long to hold them back, unless they are released earlier."""
    topics: dict[str, UUID | None] = msgspec.field(default_factory=dict)
    """With their ids, to read the groups for which transactions have committed offsets in them."""


class FenceRequest(Request[Response], frozen=True, kw_only=True):
    """Asks a node of an old source whether it refuses writes to topics, and has acknowledged all earlier ones."""

    KEY: ClassVar = 32135
    mirror: str
    topic_ids: Sequence[UUID] = ()
    cuts: Offsets = msgspec.field(default_factory=dict)
    """The offsets at which to truncate partitions that the node leads: from there on, the other cluster differs."""


class AdoptResponse(Response, frozen=True, kw_only=True):
    """The result of an `AdoptRequest`."""

    ends: Offsets = msgspec.field(default_factory=dict)
    """After `fence`: where each partition ends."""
    removed: Sequence[RemovedRange] = ()
    """After `follow`: what is dropped. After `check` and `fence`: what would be dropped beyond the cuts."""
    recreated: Sequence[str] = ()
    """After `follow`: topics that were left alone, because they have another id than the requested one."""


class AdoptRequest(OwnerRequest[AdoptResponse], frozen=True, kw_only=True):
    """Asks an old source to follow the cluster that took over from it.

    `fence` ends writing to the topics, while transactions may still end; `check` only returns what a `fence` would find
    beyond the cuts; `follow` makes it follow; `release` lets clients write again, as if nothing had happened.
    """

    KEY: ClassVar = 32132
    name: str
    step: Literal["check", "fence", "follow", "release"]
    settings: dict[str, str] = msgspec.field(default_factory=dict)
    cuts: Offsets = msgspec.field(default_factory=dict)
    aborted: Offsets = msgspec.field(default_factory=dict)
    """The start of the first transaction that the failover aborted, for partitions that have one."""
    topic_ids: Sequence[UUID] = ()
    names: Sequence[str] = ()
    """The names of these topics; another topic may have one of them there."""
    cluster_id: str = ""
    """The cluster that takes over, which the old source has to reach before it changes anything."""
    save_to: str = ""
    is_fenced: bool = False
    """For `follow`: whether the caller relies on a fence, so that the topics were not written since."""
