"""Everything that can go wrong, as one tree. Each front door maps it to its own codes in one place.

MillstreamError
├── InvalidRequest                 the caller asked for something that cannot be
│   ├── InvalidTopicName
│   ├── InvalidSetting
│   ├── InvalidPartitions
│   ├── InvalidReplication
│   ├── InvalidAssignment
│   ├── InvalidGroupId
│   ├── InvalidSessionTimeout
│   ├── InvalidTransactionTimeout
│   ├── InvalidSubscription
│   ├── InvalidPipeline
│   ├── InvalidTimestamp
│   ├── InvalidRegex          a regular expression that cannot be used
│   ├── FilterError                the filter of a subscription, with the place where it is wrong
│   ├── MetadataTooLarge           what a consumer wants kept beside its offset
│   ├── UnsupportedAssignor        a way to share partitions out that is not known here
│   ├── UnsupportedVersion         the request has to come in a newer version
│   └── PolicyViolation
├── NotFound
│   ├── UnknownTopic
│   ├── UnknownTopicId
│   ├── NoReassignment             the partition is not being moved
│   ├── UnknownGroup
│   ├── UnknownMember
│   ├── UnknownSubscription
│   ├── UnknownPipeline            or one of its rules
│   └── UnknownTransaction
├── Conflict
│   ├── TopicExists
│   ├── SubscriptionExists
│   ├── PipelineExists
│   ├── GroupNotEmpty
│   ├── NodeIdTaken                another node of the cluster runs under this id
│   ├── ClusterMismatch            the folder, the coordination store and the catalog are not of one cluster
│   ├── InvalidRecordState         the worker does not hold a lease on this message (any more)
│   ├── StalePlan                  a lake table goes on from other offsets than the plan of a step
│   └── ColumnMismatch             a lake table has the column under another type
├── GroupRejected                  what a group answers to one of its members
│   ├── MemberIdRequired           join again with the id given
│   ├── IllegalGeneration
│   ├── RebalanceInProgress        join again
│   ├── FencedInstance             another process runs under this instance id now
│   ├── FencedMemberEpoch          give up every partition and join again
│   ├── StaleMemberEpoch           try again with the epoch of the next heartbeat
│   ├── UnreleasedInstance         another process still runs under this instance id
│   ├── InconsistentProtocol       no protocol that all members know
│   ├── GroupFull
│   └── SubscribedToTopic          offsets of a topic in use are not deleted
├── BatchRejected                  the batch was read and will never be accepted as it is
│   ├── CorruptBatch               framing or CRC is wrong
│   ├── MismatchedBatch                valid, but it cannot take the place of what the disk lost
│   ├── InvalidBatch               well framed, but not what a producer may send
│   ├── BatchTooLarge
│   └── UnsupportedCompression
├── ProducerRejected               idempotent produce
│   ├── OutOfOrderSequence
│   ├── FencedProducer
│   └── UnknownProducer
├── TransactionRejected            what a transaction coordinator answers to a producer
│   ├── ProducerFenced             a newer producer runs under this transactional id
│   ├── InvalidProducerMapping     the producer id is not the one of this transactional id
│   ├── InvalidTransactionState    nothing that can be done in the state the transaction is in
│   ├── ConcurrentTransactions     another one of the same id is still being ended; try again
│   ├── TransactionAbortable       this transaction can only be aborted; the next one may succeed
│   └── TransactionCoordinatorFenced   a newer coordinator has written a marker already
├── LogUnavailable                 the log cannot do this now
│   ├── StorageFailure             the disk is full or failed; reads go on
│   │   └── RepairPending          the disk lost these offsets; another replica may have them
│   │       └── InspectionPending  it is being found out which offsets the disk lost
│   ├── OffsetOutOfRange
│   ├── DamagedRange               the disk lost these offsets; others are unharmed
│   └── PartitionClosed            the partition was deleted or the broker is stopping
├── NotLeader
│   ├── FencedLeaderEpoch          the caller knows an older leader
│   └── UnknownLeaderEpoch         the caller knows a newer one
├── NotEnoughReplicas
├── QuotaExceeded                  the client has to wait until its quota lets it go on
├── ElectionRefused
│   ├── ElectionNotNeeded          the leader is the one that is asked for
│   ├── PreferredUnavailable       the preferred replica is down or not in sync
│   └── EligibleUnavailable        no replica at all can lead
├── CoordinatorUnavailable
│   ├── CoordinatorLoading
│   └── NotCoordinator             ask again who coordinates this
├── StoreUnavailable               the coordination store gave no answer; whether it did the change is not known
│   ├── StoreRefused               it answered that it did not do it
│   │   └── StoreDenied            the login that it was given is wrong, or may not do this
│   └── WatchLost                  it cannot tell what changed since then; read everything anew
├── ClusterForgotten               the coordination store knows nothing of a node that the cluster had let in
├── CatalogUnavailable             the catalog gives no answer; data flows, declarations wait
│   └── CatalogDenied              it refuses the login or has no such database, which waiting does not change
├── FilterUnavailable              the process that evaluates filters gives no answer
├── CorruptState                   what a store holds cannot be read
├── DataFolderInUse
├── DataFolderInvalid
├── AddressTaken                   a listener cannot have the address it was given
├── BrokerUnreachable              raised by clients of the wire protocol
├── LostData                       offsets that a reader was to have are gone
├── PublishFailed                  some of the messages that were published together are not stored
├── RequestRefused                 an error code that has no class of its own here
├── RequestTimedOut                no answer in time; it may or may not have been carried out
│   └── NotStoredInTime            it was not, for certain
└── ProtocolViolation              fatal to the connection it came from
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class MillstreamError(Exception):
    """The root of the tree."""


class InvalidRequest(MillstreamError):
    """The caller asked for something that cannot be."""


class InvalidTopicName(InvalidRequest):
    """The name of a topic breaks the naming rule."""


class InvalidSetting(InvalidRequest):
    """A setting is unknown or its value is out of bounds."""


class InvalidPartitions(InvalidRequest):
    """A number of partitions that cannot be."""


class InvalidReplication(InvalidRequest):
    """A number of replicas that this cluster cannot hold."""


class InvalidAssignment(InvalidRequest):
    """Partitions placed by hand on nodes that cannot hold them."""


class InvalidSubscription(InvalidRequest):
    """A subscription that cannot be declared like this."""


class InvalidPipeline(InvalidRequest):
    """A pipeline, or a rule of one, that cannot be declared like this."""


class InvalidGroupId(InvalidRequest):
    """The id of a consumer group is empty or too long."""


class InvalidSessionTimeout(InvalidRequest):
    """A member asked for a session timeout outside the broker's bounds."""


class InvalidTransactionTimeout(InvalidRequest):
    """A producer asked for a transaction timeout outside the broker's bounds."""


class RecordError(NamedTuple):
    """Why one record of a batch was refused, by its position in the batch."""

    batch_index: int
    message: str


class InvalidTimestamp(InvalidRequest):
    """A record's timestamp is outside what its topic allows; `records` are those to blame, as far as they are known."""

    records: Sequence[RecordError] = ()


class InvalidRegex(InvalidRequest):
    """A regular expression that is wrong, too large, or cannot be matched in bounded time."""


class FilterError(InvalidRequest):
    """The filter of a subscription is wrong at a line and column, both from 1 on; the message shows the place."""

    def __init__(self, message: str, *, line: int, column: int, reason: str) -> None:
        super().__init__(message)
        self.line = line
        self.column = column
        self.reason = reason


class MetadataTooLarge(InvalidRequest):
    """What a consumer wants kept beside its offset is too long."""


class UnsupportedAssignor(InvalidRequest):
    """A member wants partitions shared out in a way that this broker does not know."""


class UnsupportedVersion(InvalidRequest):
    """The request has to come in a newer version of its API."""


class PolicyViolation(InvalidRequest):
    """Well formed, but the operator's settings forbid it."""


class NotFound(MillstreamError):
    """The thing named does not exist."""


class UnknownTopic(NotFound):
    """No topic (or no partition of it) has this name."""


class UnknownTopicId(NotFound):
    """No topic has this id."""


class NoReassignment(NotFound):
    """The partition is not being moved."""


class UnknownGroup(NotFound):
    """No consumer group has this id."""


class UnknownSubscription(NotFound):
    """No subscription has this name."""


class UnknownPipeline(NotFound):
    """No pipeline, or no rule of it, has this name."""


class UnknownMember(NotFound):
    """The group has no such member."""


class UnknownTransaction(NotFound):
    """No producer has this transactional id."""


class Conflict(MillstreamError):
    """The thing is in a state that forbids this."""


class TopicExists(Conflict):
    """A topic of this name is there already."""


class SubscriptionExists(Conflict):
    """A subscription has this name already."""


class PipelineExists(Conflict):
    """A pipeline has this name already."""


class GroupNotEmpty(Conflict):
    """The group still has members."""


class NodeIdTaken(Conflict):
    """Another node of the cluster runs under this id."""


class ClusterMismatch(Conflict):
    """The data folder, the coordination store and the catalog do not belong to one cluster, or not to this node."""


class InvalidRecordState(Conflict):
    """The worker does not hold a lease on this message, or no longer."""


class StalePlan(Conflict):
    """A lake table goes on from other offsets than those a step was planned for: plan it again."""


class ColumnMismatch(Conflict):
    """A lake table has a column under another type than the files that were to be added."""


class GroupRejected(MillstreamError):
    """What a group answers to one of its members."""


class MemberIdRequired(GroupRejected):
    """The member has to join again with the id given here."""

    def __init__(self, message: str, *, member_id: str) -> None:
        super().__init__(message)
        self.member_id = member_id


class IllegalGeneration(GroupRejected):
    """The member speaks of a generation that is not the current one."""


class RebalanceInProgress(GroupRejected):
    """The group is rebalancing; the member has to join again."""


class FencedInstance(GroupRejected):
    """Another process runs under this group instance id now."""


class FencedMemberEpoch(GroupRejected):
    """The member's epoch is not the group's: it has to give up every partition and join again."""


class StaleMemberEpoch(GroupRejected):
    """The member speaks of an epoch that it has left, or has not reached yet."""


class UnreleasedInstance(GroupRejected):
    """Another process runs under this group instance id, and has not left."""


class InconsistentProtocol(GroupRejected):
    """The member knows no protocol that all other members know."""


class GroupFull(GroupRejected):
    """The group has as many members as it may have."""


class SubscribedToTopic(GroupRejected):
    """The group consumes this topic, so its offsets are not deleted."""


class BatchRejected(MillstreamError):
    """The batch was read and will never be accepted as it is."""


class CorruptBatch(BatchRejected):
    """The framing or the CRC of a batch is wrong."""


class MismatchedBatch(BatchRejected):
    """A batch of another replica is valid, but cannot take the place of what the disk lost."""


class InvalidBatch(BatchRejected):
    """The batch is well framed, but not what a producer may send; `records` are those to blame, if only some are."""

    records: Sequence[RecordError] = ()


class BatchTooLarge(BatchRejected):
    """The batch exceeds `max.message.bytes`, or decompresses to more than is allowed."""


class UnsupportedCompression(BatchRejected):
    """The batch names a compression this broker does not know."""


class ProducerRejected(MillstreamError):
    """The idempotent producer's numbers do not fit."""


class OutOfOrderSequence(ProducerRejected):
    """A gap: a batch before this one is missing."""


class FencedProducer(ProducerRejected):
    """A newer incarnation of this producer is at work."""


class UnknownProducer(ProducerRejected):
    """The partition remembers nothing of this producer id."""


class TransactionRejected(MillstreamError):
    """What a transaction coordinator answers to a producer."""


class ProducerFenced(TransactionRejected):
    """A newer producer runs under this transactional id, or the coordinator has ended the transaction itself."""


class InvalidProducerMapping(TransactionRejected):
    """The producer id is not the one that this transactional id has."""


class InvalidTransactionState(TransactionRejected):
    """The transaction is in a state in which this cannot be done."""


class ConcurrentTransactions(TransactionRejected):
    """The last transaction of this id is still being ended; the producer tries again."""


class TransactionAbortable(TransactionRejected):
    """The transaction can only be aborted; the producer goes on with the next one."""


class TransactionCoordinatorFenced(TransactionRejected):
    """A newer coordinator has written a marker for this producer already."""


class LogUnavailable(MillstreamError):
    """The log cannot do this now."""


class StorageFailure(LogUnavailable):
    """The disk is full or failed. Reads go on."""


class RepairPending(StorageFailure):
    """The disk lost what was asked for, and another replica may have it; it is being fetched from there."""


class InspectionPending(RepairPending):
    """The disk could not read what was asked for; which offsets it lost is being found out."""


class OffsetOutOfRange(LogUnavailable):
    """The offset asked for is below the start or beyond the end of the log."""

    def __init__(self, message: str, *, start: int, end: int) -> None:
        super().__init__(message)
        self.start = start
        self.end = end


class DamagedRange(LogUnavailable):
    """The disk lost the offsets from `first` up to, not including, `next_offset`."""

    def __init__(self, message: str, *, first: int, next_offset: int) -> None:
        super().__init__(message)
        self.first = first
        self.next_offset = next_offset


class PartitionClosed(LogUnavailable):
    """The partition was deleted, or the broker is stopping."""


class NotLeader(MillstreamError):
    """Another node leads the partition."""


class FencedLeaderEpoch(NotLeader):
    """The caller knows an older leader than the current one."""


class UnknownLeaderEpoch(NotLeader):
    """The caller knows a newer leader than this node does."""


class NotEnoughReplicas(MillstreamError):
    """Fewer replicas are in sync than `min.insync.replicas` asks for."""


class QuotaExceeded(MillstreamError):
    """The client has taken more than its quota gives, and has to wait; nothing was done."""

    def __init__(self, message: str, *, wait_s: float = 1.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class ElectionRefused(MillstreamError):
    """No leader can be elected as asked for."""


class ElectionNotNeeded(ElectionRefused):
    """The leader is the one that is asked for."""


class PreferredUnavailable(ElectionRefused):
    """The preferred replica is down or not in sync."""


class EligibleUnavailable(ElectionRefused):
    """No replica at all can lead."""


class CoordinatorUnavailable(MillstreamError):
    """The coordinator cannot answer now."""


class CoordinatorLoading(CoordinatorUnavailable):
    """The coordinator is reading its state back from the log."""


class NotCoordinator(CoordinatorUnavailable):
    """Another node coordinates what was asked for, or this one has just begun anew."""


class StoreUnavailable(MillstreamError):
    """The coordination store gave no answer, so it is not known whether it carried out the change."""


class StoreRefused(StoreUnavailable):
    """The coordination store answered, and surely did not carry out the change."""


class StoreDenied(StoreRefused):
    """The coordination store refuses the login that it was given, or does not let it do this."""


class WatchLost(StoreUnavailable):
    """The coordination store has forgotten what changed since then; everything has to be read anew."""


class ClusterForgotten(MillstreamError):
    """The coordination store knows nothing of a node that was let in: it is another store, or lost its data."""


class CatalogUnavailable(MillstreamError):
    """The catalog gives no answer: data flows, but nothing can be declared for now."""


class CatalogDenied(CatalogUnavailable):
    """The catalog's server answers, but refuses the login, or has no such database: a setting is wrong."""


class FilterUnavailable(MillstreamError):
    """The process that evaluates filters cannot run, took too long, or is stopped."""


class CorruptState(MillstreamError):
    """What a store holds cannot be read."""


class DataFolderInUse(MillstreamError):
    """Another process holds the data folder."""


class DataFolderInvalid(MillstreamError):
    """The data folder is not what it should be."""


class AddressTaken(MillstreamError):
    """A listener cannot have the address it was given: it is in use, or not one of this machine."""


class BrokerUnreachable(MillstreamError):
    """No broker answered at any of the addresses given."""


class LostData(MillstreamError):
    """Offsets that a reader was to have are gone: each stretch as topic, partition, first, and the one after it."""

    REMEDY = "set failOnDataLoss to false"
    """What a query does to go on without them; whoever runs it for others says what they can do."""

    def __init__(self, lost: Sequence[tuple[str, int, int, int]]) -> None:
        listed = ", ".join(f"{topic}-{number}: offsets {first} to {end - 1}" for topic, number, first, end in lost[:10])
        more = f" and {len(lost) - 10} more partitions" if len(lost) > 10 else ""
        super().__init__(
            f"data is lost for this reader: {listed}{more}; retention has deleted them, or the topic was made anew. "
            f"To go on without them, {self.REMEDY}"
        )
        self.lost = list(lost)


class UnreadableData(MillstreamError):
    """Messages of a range of offsets cannot be read by any reader; `end` is exclusive."""

    def __init__(self, topic: str, partition: int, start: int, end: int, reason: str) -> None:
        self.finding = f"{topic}-{partition}: offsets {start} to {end - 1} cannot be read: {reason}"
        super().__init__(f"{self.finding}. To go on without them, set failOnUnreadable to false")


class PublishFailed(MillstreamError):
    """Some messages that were published together are not stored; `outcomes` has a receipt or an error for each."""

    def __init__(self, outcomes: Sequence[object]) -> None:
        failed = [(at, outcome) for at, outcome in enumerate(outcomes) if isinstance(outcome, Exception)]
        places = ", ".join(str(at) for at, _ in failed[:10]) + (", …" if len(failed) > 10 else "")
        first = failed[0][1] if failed else "nothing failed"
        super().__init__(f"{len(failed)} of {len(outcomes)} messages were not published (numbers {places}): {first}")
        self.outcomes = list(outcomes)


class RequestRefused(MillstreamError):
    """The broker answered with an error code that has no class of its own here."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


class RequestTimedOut(MillstreamError):
    """No answer in time; the request may or may not have been carried out."""


class NotStoredInTime(RequestTimedOut):
    """Messages could not be stored in time, and none of them was: they may be published again."""


class ProtocolViolation(MillstreamError):
    """Bytes that are not the protocol. Fatal to the connection they came from."""
