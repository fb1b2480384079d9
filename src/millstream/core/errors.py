"""The exception tree. Each front end maps it to its own error codes in one place.

MillstreamError
├── InvalidRequest                 the request is invalid
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
│   ├── InvalidRegex               a regular expression that cannot be used
│   ├── ExpectationFailed          a message violates what its landing pipeline expects
│   ├── FilterError                the filter of a subscription is invalid; the error names the position
│   ├── SchemaMismatch             a value does not fit its schema, or names none
│   ├── MetadataTooLarge           the metadata committed with an offset is too long
│   ├── UnsupportedAssignor        the partition assignor is unknown
│   ├── UnsupportedVersion         the operation needs a newer version of the request
│   ├── InvalidMirror
│   └── PolicyViolation
│       └── MirroredTopic          a mirror writes the topic; clients write it on the source, or after a failover
├── NotFound
│   ├── UnknownTopic
│   ├── UnknownTopicId
│   ├── NoReassignment             the partition is not being moved
│   ├── UnknownGroup
│   ├── UnknownMember
│   ├── UnknownSubscription
│   ├── UnknownPipeline            or one of its rules
│   ├── UnknownMirror
│   └── UnknownTransaction
├── Conflict
│   ├── PlanConflict
│   ├── TopicExists
│   ├── SubscriptionExists
│   ├── PipelineExists
│   ├── AlreadyLanded              another pipeline lands the topic in the same lake
│   ├── MirrorExists
│   ├── MirrorInUse                it has copies, or is the way back after a failover
│   ├── CopyDiverged               a mirrored partition holds records that its source does not have
│   ├── GroupNotEmpty
│   ├── NodeIdTaken                another node of the cluster runs under this id
│   ├── ClusterMismatch            the folder, the coordination store and the catalog belong to different clusters
│   ├── InvalidRecordState         the worker does not hold a lease on this message (any more)
│   ├── StalePlan                  a lake table continues at other offsets than planned
│   └── ColumnMismatch             a lake table has the column with another type
├── GroupRejected                  errors that a group returns to its members
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
│   ├── MismatchedBatch            valid, but it does not match the range that the disk lost
│   │   └── DivergedLog            it shows that one of the logs diverged
│   ├── InvalidBatch               well framed, but not what a producer may send
│   ├── BatchTooLarge
│   └── UnsupportedCompression
├── ProducerRejected               idempotent produce
│   ├── OutOfOrderSequence
│   ├── FencedProducer
│   └── UnknownProducer
├── TransactionRejected            errors that a transaction coordinator returns to a producer
│   ├── ProducerFenced             a newer producer runs under this transactional id
│   ├── InvalidProducerMapping     the producer id is not the one of this transactional id
│   ├── InvalidTransactionState    not allowed in the current state of the transaction
│   ├── ConcurrentTransactions     the previous transaction of the same id is still ending; try again
│   ├── TransactionAbortable       this transaction can only be aborted; the next one may succeed
│   └── TransactionCoordinatorFenced   a newer coordinator has written a marker already
├── LogUnavailable                 the log cannot do this now
│   ├── StorageFailure             the disk is full or failed; reads continue
│   │   └── RepairPending          the disk lost these offsets; another replica may have them
│   │       └── InspectionPending  the broker is determining which offsets the disk lost
│   ├── OffsetOutOfRange
│   ├── DamagedRange               the disk lost these offsets; others are intact
│   └── PartitionClosed            the partition was deleted or the broker is stopping
├── NotLeader
│   ├── FencedLeaderEpoch          the caller knows an older leader
│   └── UnknownLeaderEpoch         the caller knows a newer one
├── NotEnoughReplicas
├── QuotaExceeded                  the client must wait until it is within its quota
├── SchemaRegistryError            an error of the schema registry, with the code of Confluent's registry
├── ElectionRefused
│   ├── ElectionNotNeeded          the requested replica already leads
│   ├── PreferredUnavailable       the preferred replica is down or not in sync
│   └── EligibleUnavailable        no replica at all can lead
├── CoordinatorUnavailable
│   ├── CoordinatorLoading
│   └── NotCoordinator             look up the coordinator again
├── StoreUnavailable               the coordination store did not respond; the change may or may not have been made
│   ├── StoreRefused               it rejected the change
│   │   └── StoreDenied            the login is wrong or lacks permission
│   └── WatchLost                  it no longer has the changes since then; read everything again
├── ClusterForgotten               the coordination store does not know a node that the cluster had admitted
├── CatalogUnavailable             the catalog does not respond; clients are served, declarations wait
│   └── CatalogDenied              it refuses the login or has no such database; retrying does not help
├── FilterUnavailable              the process that evaluates filters does not respond
├── AuthenticationFailed           unknown, or identity not proved
├── NotAuthorized                  the principal may not do this
│   ├── TopicNotAuthorized
│   ├── GroupNotAuthorized
│   ├── TransactionNotAuthorized
│   └── ClusterNotAuthorized
├── CorruptState                   stored state cannot be read
├── DataFolderInUse
├── DataFolderInvalid
├── AddressTaken                   the address of a listener is in use
├── BrokerUnreachable              raised by clients of the wire protocol
│   └── UnexpectedServer           something accepts connections there, but not as this client connects
├── UnreadableData                 a batch of a topic cannot be decoded, and the reader is not configured to skip it
├── LostData                       offsets that a reader needs are gone
├── PublishFailed                  some of the messages published together were not stored
├── RequestRefused                 an error code without its own class
├── RequestTimedOut                no response in time; the request may or may not have been executed
│   └── NotStoredInTime            certainly not executed
└── ProtocolViolation              fatal to the connection it came from
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class MillstreamError(Exception):
    """The root of the tree."""


class InvalidRequest(MillstreamError):
    """The caller asked for something impossible."""


class InvalidTopicName(InvalidRequest):
    """The name of a topic breaks the naming rule."""


class InvalidSetting(InvalidRequest):
    """A setting is unknown or its value is out of bounds."""


class InvalidPartitions(InvalidRequest):
    """The number of partitions is invalid."""


class InvalidReplication(InvalidRequest):
    """The cluster cannot hold this many replicas."""


class InvalidAssignment(InvalidRequest):
    """Partitions were assigned manually to nodes that cannot hold them."""


class InvalidSubscription(InvalidRequest):
    """The subscription cannot be declared like this."""


class InvalidPipeline(InvalidRequest):
    """The pipeline, or a rule of it, cannot be declared like this."""


class InvalidMirror(InvalidRequest):
    """The mirror cannot be declared or changed like this."""


class InvalidGroupId(InvalidRequest):
    """The id of a consumer group is empty or too long."""


class InvalidSessionTimeout(InvalidRequest):
    """A member asked for a session timeout outside the broker's bounds."""


class InvalidTransactionTimeout(InvalidRequest):
    """A producer asked for a transaction timeout outside the broker's bounds."""


class RecordError(NamedTuple):
    """The reason why one record of a batch was rejected, by its position in the batch."""

    batch_index: int
    message: str


class InvalidTimestamp(InvalidRequest):
    """A record's timestamp is outside its topic's range; `records` lists the records at fault, if known."""

    records: Sequence[RecordError] = ()


class InvalidRegex(InvalidRequest):
    """A regular expression is invalid, too large, or cannot be matched in bounded time."""


class ExpectationFailed(InvalidRequest):
    """A message violates what its landing pipeline expects, and the pipeline is configured to fail."""

    REMEDY = "correct expect, or set on.violation to quarantine or count"
    """How the pipeline continues; those who know its name give the command."""

    def __init__(self, topic: str, partition: int, offset: int, expected: str) -> None:
        super().__init__(
            f"the message at offset {offset} of topic {topic!r}, partition {partition}, violates the expectation "
            f"{expected!r}; nothing of its batch is landed. To continue, {self.REMEDY}"
        )


class FilterError(InvalidRequest):
    """A subscription's filter is invalid at a line and column, both counted from 1; the message shows the location."""

    def __init__(self, message: str, *, line: int, column: int, reason: str) -> None:
        super().__init__(message)
        self.line = line
        self.column = column
        self.reason = reason


class MetadataTooLarge(InvalidRequest):
    """The metadata of an offset commit is too long."""


class UnsupportedAssignor(InvalidRequest):
    """A member asked for an assignor that this broker does not know."""


class UnsupportedVersion(InvalidRequest):
    """The request needs a newer version of its API."""


class PolicyViolation(InvalidRequest):
    """The request is well formed, but the operator's settings forbid it."""


class MirroredTopic(PolicyViolation):
    """Only a mirror may write to the topic."""


class NotFound(MillstreamError):
    """The named resource does not exist."""


class UnknownTopic(NotFound):
    """No topic has this name, or the topic has no such partition."""


class UnknownTopicId(NotFound):
    """No topic has this id."""


class NoReassignment(NotFound):
    """The partition is not being reassigned."""


class UnknownGroup(NotFound):
    """No consumer group has this id."""


class UnknownSubscription(NotFound):
    """No subscription has this name."""


class UnknownPipeline(NotFound):
    """No pipeline, or no rule of it, has this name."""


class UnknownMirror(NotFound):
    """There is no mirror with this name."""


class UnknownMember(NotFound):
    """The group has no such member."""


class UnknownTransaction(NotFound):
    """No producer has this transactional id."""


class Conflict(MillstreamError):
    """The current state forbids the request."""


class PlanConflict(Conflict):
    """The state of a plan, or of its subject, forbids the request."""


class TopicExists(Conflict):
    """A topic with this name exists."""


class SubscriptionExists(Conflict):
    """A subscription with this name exists."""


class PipelineExists(Conflict):
    """A pipeline with this name exists."""


class AlreadyLanded(Conflict):
    """Another pipeline lands the topic in the same lake."""


class MirrorExists(Conflict):
    """The name is taken by another mirror."""


class MirrorInUse(Conflict):
    """The mirror has copies, or its source can still be made to follow after a failover."""


class CopyDiverged(Conflict):
    """A mirrored partition holds records that its source does not have."""


class GroupNotEmpty(Conflict):
    """The group still has members."""


class NodeIdTaken(Conflict):
    """Another node of the cluster is running with this id."""


class ClusterMismatch(Conflict):
    """The data folder, the coordination store and the catalog do not belong to one cluster, or not to this node."""


class InvalidRecordState(Conflict):
    """The worker does not hold a lease on this message, or its lease has ended."""


class StalePlan(Conflict):
    """A lake table continues from other offsets than a step was planned for; plan it again."""


class ColumnMismatch(Conflict):
    """A lake table has a column of another type than the files to add."""


class GroupRejected(MillstreamError):
    """A group refuses a request of one of its members."""


class MemberIdRequired(GroupRejected):
    """The member must join again with this id."""

    def __init__(self, message: str, *, member_id: str) -> None:
        super().__init__(message)
        self.member_id = member_id


class IllegalGeneration(GroupRejected):
    """The member named a generation that is not the current one."""


class RebalanceInProgress(GroupRejected):
    """The group is rebalancing; the member must join again."""


class FencedInstance(GroupRejected):
    """Another process is using this group instance id."""


class FencedMemberEpoch(GroupRejected):
    """The member's epoch is fenced: it must give up every partition and join again."""


class StaleMemberEpoch(GroupRejected):
    """The member sent an epoch that is not its current one."""


class UnreleasedInstance(GroupRejected):
    """Another process is using this group instance id and has not left."""


class InconsistentProtocol(GroupRejected):
    """The member supports no protocol that all other members support."""


class GroupFull(GroupRejected):
    """The group has the maximum number of members."""


class SubscribedToTopic(GroupRejected):
    """The group consumes this topic, so its offsets are not deleted."""


class BatchRejected(MillstreamError):
    """The batch was read and will never be accepted as it is."""


class CorruptBatch(BatchRejected):
    """The framing or the CRC of a batch is wrong."""


class MismatchedBatch(BatchRejected):
    """A batch from another replica is valid, but does not fit the gap that the disk lost."""


class DivergedLog(MismatchedBatch):
    """A batch from another replica is of a later epoch than the records behind the gap: one of the logs diverged."""


class InvalidBatch(BatchRejected):
    """The batch is well framed, but not one that a producer may send; `records` lists the records at fault, if only
    some are.
    """

    records: Sequence[RecordError] = ()


class BatchTooLarge(BatchRejected):
    """The batch exceeds `max.message.bytes`, or decompresses to more than the limit."""


class UnsupportedCompression(BatchRejected):
    """The batch uses a compression codec that this broker does not know."""


class ProducerRejected(MillstreamError):
    """The idempotent producer's id, epoch or sequence does not match."""


class OutOfOrderSequence(ProducerRejected):
    """A batch before this one is missing."""


class FencedProducer(ProducerRejected):
    """A newer instance of this producer is active."""


class UnknownProducer(ProducerRejected):
    """The partition has no state for this producer id."""


class TransactionRejected(MillstreamError):
    """The transaction coordinator refuses a request of a producer."""


class ProducerFenced(TransactionRejected):
    """A newer producer uses this transactional id, or the coordinator has ended the transaction itself."""


class InvalidProducerMapping(TransactionRejected):
    """The producer id does not belong to this transactional id."""


class InvalidTransactionState(TransactionRejected):
    """The state of the transaction does not allow this."""


class ConcurrentTransactions(TransactionRejected):
    """The previous transaction of this id is still being ended; the producer retries."""


class TransactionAbortable(TransactionRejected):
    """The transaction can only be aborted; the producer continues with the next one."""


class TransactionCoordinatorFenced(TransactionRejected):
    """A newer coordinator has already written a marker for this producer."""


class LogUnavailable(MillstreamError):
    """The log cannot do this now."""


class StorageFailure(LogUnavailable):
    """The disk is full or has failed. Reads continue."""


class RepairPending(StorageFailure):
    """The disk lost these offsets; they are being fetched from another replica that may have them."""


class InspectionPending(RepairPending):
    """A read from disk failed; the broker is determining which offsets were lost."""


class OffsetOutOfRange(LogUnavailable):
    """The offset is below the start or beyond the end of the log."""

    def __init__(self, message: str, *, start: int, end: int) -> None:
        super().__init__(message)
        self.start = start
        self.end = end


class DamagedRange(LogUnavailable):
    """The disk lost the offsets from `start` up to, not including, `end`."""

    def __init__(self, message: str, *, start: int, end: int) -> None:
        super().__init__(message)
        self.start = start
        self.end = end


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
    """The client has exceeded its quota and must wait; nothing was done."""

    def __init__(self, message: str, *, wait_s: float = 1.0) -> None:
        super().__init__(message)
        self.wait_s = wait_s


class SchemaRegistryError(MillstreamError):
    """The schema registry refuses a request; the code is that of Confluent's registry."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


class SchemaMismatch(InvalidRequest):
    """A value does not have a schema that is expected, or does not fit it."""


class ElectionRefused(MillstreamError):
    """No leader can be elected as requested."""


class ElectionNotNeeded(ElectionRefused):
    """The requested leader already leads."""


class PreferredUnavailable(ElectionRefused):
    """The preferred replica is down or not in sync."""


class EligibleUnavailable(ElectionRefused):
    """No replica can lead."""


class CoordinatorUnavailable(MillstreamError):
    """The coordinator cannot respond now."""


class CoordinatorLoading(CoordinatorUnavailable):
    """The coordinator is loading its state from the log."""


class NotCoordinator(CoordinatorUnavailable):
    """Another node is the coordinator, or this one has just started."""


class StoreUnavailable(MillstreamError):
    """The coordination store did not respond; whether it applied the change is unknown."""


class StoreRefused(StoreUnavailable):
    """The coordination store responded and did not apply the change."""


class StoreDenied(StoreRefused):
    """The coordination store rejected the credentials or the operation."""


class WatchLost(StoreUnavailable):
    """The coordination store no longer has the changes since then; read everything again."""


class ClusterForgotten(MillstreamError):
    """The coordination store does not know a registered node: it is another store, or it lost its data."""


class CatalogUnavailable(MillstreamError):
    """The catalog does not respond: data flows, but nothing can be declared."""


class CatalogDenied(CatalogUnavailable):
    """The catalog's server rejects the login or has no such database: a setting is wrong."""


class FilterUnavailable(MillstreamError):
    """The process that evaluates filters cannot run, timed out, or is stopped."""


class CorruptState(MillstreamError):
    """Stored state cannot be read."""


class DataFolderInUse(MillstreamError):
    """Another process uses the data folder."""


class DataFolderInvalid(MillstreamError):
    """The data folder is not valid."""


class AddressTaken(MillstreamError):
    """A listener cannot bind its address: it is in use, or it does not belong to this machine."""


class BrokerUnreachable(MillstreamError):
    """No broker responded at any of the addresses given."""


class UnexpectedServer(BrokerUnreachable):
    """A server accepts connections at the address, but does not speak Kafka's protocol, or not as this client connects.

    Its message says what to change; starting a broker is no remedy.
    """


class LostData(MillstreamError):
    """Offsets that a reader expected are gone: topic, partition, start and end of each range."""

    REMEDY = "set failOnDataLoss to false"
    """How a query continues without them; callers that run queries for others give their own advice."""

    def __init__(self, lost: Sequence[tuple[str, int, int, int]]) -> None:
        listed = ", ".join(f"{topic}-{number}: offsets {first} to {end - 1}" for topic, number, first, end in lost[:10])
        more = f" and {len(lost) - 10} more partitions" if len(lost) > 10 else ""
        self.finding = (
            f"data is lost for this reader: {listed}{more}; retention has deleted them, or the topic was recreated"
        )
        super().__init__(f"{self.finding}. To continue without them, {self.REMEDY}")
        self.lost = list(lost)


class UnreadableData(MillstreamError):
    """Messages of a range of offsets cannot be read by any reader; `end` is exclusive."""

    REMEDY = "set failOnUnreadable to false"
    """How a query continues without them; callers that read for others give their own advice."""

    def __init__(self, topic: str, partition: int, start: int, end: int, reason: str) -> None:
        self.finding = f"{topic}-{partition}: offsets {start} to {end - 1} cannot be read: {reason}"
        super().__init__(f"{self.finding}. To continue without them, {self.REMEDY}")


class PublishFailed(MillstreamError):
    """Some messages that were published together are not stored; `outcomes` holds a receipt or an error for each."""

    def __init__(self, outcomes: Sequence[object]) -> None:
        failed = [(at, outcome) for at, outcome in enumerate(outcomes) if isinstance(outcome, Exception)]
        places = ", ".join(str(at) for at, _ in failed[:10]) + (", …" if len(failed) > 10 else "")
        first = failed[0][1] if failed else "nothing failed"
        were, indexes = ("was", "index") if len(failed) == 1 else ("were", "indexes")
        super().__init__(
            f"{len(failed)} of {len(outcomes)} messages {were} not published ({indexes} {places}): {first}"
        )
        self.outcomes = list(outcomes)


class AuthenticationFailed(MillstreamError):
    """The client is unknown to this cluster, or has not proved its identity."""


class NotAuthorized(MillstreamError):
    """The principal may not do this."""


class TopicNotAuthorized(NotAuthorized):
    """The principal may not do this with a topic."""


class GroupNotAuthorized(NotAuthorized):
    """The principal may not do this with a group or a subscription."""


class TransactionNotAuthorized(NotAuthorized):
    """The principal may not use this transactional id."""


class ClusterNotAuthorized(NotAuthorized):
    """The principal may not do this with the cluster."""


class RequestRefused(MillstreamError):
    """The broker responded with an error code without its own class."""

    def __init__(self, message: str, *, code: int) -> None:
        super().__init__(message)
        self.code = code


class RequestTimedOut(MillstreamError):
    """No response in time; whether the request was carried out is unknown."""


class NotStoredInTime(RequestTimedOut):
    """The messages were not stored in time, and none will be: they may be published again."""


class ProtocolViolation(MillstreamError):
    """Bytes that are not the protocol. Fatal to the connection they came from."""
