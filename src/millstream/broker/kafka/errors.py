"""The one mapping from the error tree to Kafka's error codes.

An error without its own entry gets the code of its nearest ancestor. Anything outside the tree is a defect of the
broker, and clients get UNKNOWN_SERVER_ERROR.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kio.schema.errors import ErrorCode

from millstream.core import errors

_CODES: Final[dict[type[errors.MillstreamError], ErrorCode]] = {
    errors.MillstreamError: ErrorCode.unknown_server_error,
    errors.InvalidRequest: ErrorCode.invalid_request,
    errors.InvalidTopicName: ErrorCode.invalid_topic_exception,
    errors.InvalidSetting: ErrorCode.invalid_config,
    errors.InvalidPartitions: ErrorCode.invalid_partitions,
    errors.InvalidReplication: ErrorCode.invalid_replication_factor,
    errors.InvalidAssignment: ErrorCode.invalid_replica_assignment,
    errors.InvalidGroupId: ErrorCode.invalid_group_id,
    errors.InvalidSessionTimeout: ErrorCode.invalid_session_timeout,
    errors.InvalidTransactionTimeout: ErrorCode.invalid_transaction_timeout,
    errors.InvalidTimestamp: ErrorCode.invalid_timestamp,
    errors.InvalidRegex: ErrorCode.invalid_regular_expression,
    errors.MetadataTooLarge: ErrorCode.offset_metadata_too_large,
    errors.UnsupportedAssignor: ErrorCode.unsupported_assignor,
    errors.UnsupportedVersion: ErrorCode.unsupported_version,
    errors.PolicyViolation: ErrorCode.policy_violation,
    errors.NotFound: ErrorCode.resource_not_found,
    errors.UnknownTopic: ErrorCode.unknown_topic_or_partition,
    errors.UnknownTopicId: ErrorCode.unknown_topic_id,
    errors.NoReassignment: ErrorCode.no_reassignment_in_progress,
    errors.UnknownGroup: ErrorCode.group_id_not_found,
    errors.UnknownMember: ErrorCode.unknown_member_id,
    errors.UnknownSubscription: ErrorCode.group_id_not_found,
    errors.UnknownTransaction: ErrorCode.transactional_id_not_found,
    errors.Conflict: ErrorCode.invalid_request,
    errors.TopicExists: ErrorCode.topic_already_exists,
    errors.SubscriptionExists: ErrorCode.duplicate_resource,
    errors.PipelineExists: ErrorCode.duplicate_resource,
    errors.MirrorExists: ErrorCode.duplicate_resource,
    errors.GroupNotEmpty: ErrorCode.non_empty_group,
    errors.InvalidRecordState: ErrorCode.invalid_record_state,
    errors.GroupRejected: ErrorCode.rebalance_in_progress,
    errors.MemberIdRequired: ErrorCode.member_id_required,
    errors.IllegalGeneration: ErrorCode.illegal_generation,
    errors.RebalanceInProgress: ErrorCode.rebalance_in_progress,
    errors.FencedInstance: ErrorCode.fenced_instance_id,
    errors.FencedMemberEpoch: ErrorCode.fenced_member_epoch,
    errors.StaleMemberEpoch: ErrorCode.stale_member_epoch,
    errors.UnreleasedInstance: ErrorCode.unreleased_instance_id,
    errors.InconsistentProtocol: ErrorCode.inconsistent_group_protocol,
    errors.GroupFull: ErrorCode.group_max_size_reached,
    errors.SubscribedToTopic: ErrorCode.group_subscribed_to_topic,
    errors.BatchRejected: ErrorCode.invalid_record,
    errors.CorruptBatch: ErrorCode.corrupt_message,
    errors.InvalidBatch: ErrorCode.invalid_record,
    errors.BatchTooLarge: ErrorCode.message_too_large,
    errors.UnsupportedCompression: ErrorCode.unsupported_compression_type,
    errors.ProducerRejected: ErrorCode.invalid_producer_epoch,
    errors.OutOfOrderSequence: ErrorCode.out_of_order_sequence_number,
    errors.FencedProducer: ErrorCode.invalid_producer_epoch,
    errors.UnknownProducer: ErrorCode.unknown_producer_id,
    errors.TransactionRejected: ErrorCode.invalid_txn_state,
    errors.ProducerFenced: ErrorCode.producer_fenced,
    errors.InvalidProducerMapping: ErrorCode.invalid_producer_id_mapping,
    errors.InvalidTransactionState: ErrorCode.invalid_txn_state,
    errors.ConcurrentTransactions: ErrorCode.concurrent_transactions,
    errors.TransactionAbortable: ErrorCode.transaction_abortable,
    errors.TransactionCoordinatorFenced: ErrorCode.transaction_coordinator_fenced,
    errors.LogUnavailable: ErrorCode.kafka_storage_error,
    errors.StorageFailure: ErrorCode.kafka_storage_error,
    errors.OffsetOutOfRange: ErrorCode.offset_out_of_range,
    # Consumers raise this code to their user; a storage error they would retry for ever.
    errors.DamagedRange: ErrorCode.corrupt_message,
    # Sends the client back to the metadata, where the topic is deleted or has another leader.
    errors.PartitionClosed: ErrorCode.not_leader_or_follower,
    errors.NotLeader: ErrorCode.not_leader_or_follower,
    errors.FencedLeaderEpoch: ErrorCode.fenced_leader_epoch,
    errors.UnknownLeaderEpoch: ErrorCode.unknown_leader_epoch,
    errors.NotEnoughReplicas: ErrorCode.not_enough_replicas,
    errors.QuotaExceeded: ErrorCode.throttling_quota_exceeded,
    errors.SchemaRegistryError: ErrorCode.invalid_request,
    errors.ElectionRefused: ErrorCode.election_not_needed,
    errors.ElectionNotNeeded: ErrorCode.election_not_needed,
    errors.PreferredUnavailable: ErrorCode.preferred_leader_not_available,
    errors.EligibleUnavailable: ErrorCode.eligible_leaders_not_available,
    errors.FilterUnavailable: ErrorCode.coordinator_load_in_progress,
    errors.CoordinatorUnavailable: ErrorCode.coordinator_not_available,
    errors.CoordinatorLoading: ErrorCode.coordinator_load_in_progress,
    errors.NotCoordinator: ErrorCode.not_coordinator,
    # Both stores may be back soon, and administrators' clients try again after this.
    errors.StoreUnavailable: ErrorCode.request_timed_out,
    errors.CatalogUnavailable: ErrorCode.request_timed_out,
    errors.BrokerUnreachable: ErrorCode.broker_not_available,
    errors.RequestTimedOut: ErrorCode.request_timed_out,
    errors.ProtocolViolation: ErrorCode.invalid_request,
    errors.AuthenticationFailed: ErrorCode.sasl_authentication_failed,
    errors.NotAuthorized: ErrorCode.cluster_authorization_failed,
    errors.TopicNotAuthorized: ErrorCode.topic_authorization_failed,
    errors.GroupNotAuthorized: ErrorCode.group_authorization_failed,
    errors.TransactionNotAuthorized: ErrorCode.transactional_id_authorization_failed,
    errors.ClusterNotAuthorized: ErrorCode.cluster_authorization_failed,
}

_MESSAGE_LENGTH_MAX: Final = 2000
"""A message may quote the client's data; at this length it fits into every version's response."""


def error_code(error: BaseException) -> ErrorCode:
    """Find the Kafka code for an error."""
    for ancestor in type(error).__mro__:
        if ancestor in _CODES:
            return _CODES[ancestor]
    return ErrorCode.unknown_server_error


def error_message(error: BaseException) -> str:
    """Return the message for clients; errors outside the tree are not exposed, since they may name internals."""
    if isinstance(error, errors.MillstreamError):
        return str(error)[:_MESSAGE_LENGTH_MAX]
    return "the broker failed to carry out the request; see its log"


if TYPE_CHECKING:
    from millstream.broker.kafka.api import ClientInfo

_logger = logging.getLogger(__name__)

_FENCED: Final = frozenset({ErrorCode.producer_fenced, ErrorCode.invalid_producer_epoch})


def fenced_code(code: ErrorCode, version: int, *, first: int) -> ErrorCode:
    """PRODUCER_FENCED from version `first` on, INVALID_PRODUCER_EPOCH before; all other codes as they are."""
    if code is ErrorCode.producer_fenced and version < first:
        return ErrorCode.invalid_producer_epoch
    return code


def log_fenced(code: ErrorCode, reason: str, client: ClientInfo, *, transactional_id: str | None = None) -> None:
    """Log a refusal that ends a producer; the reason holds its ids and epochs. Other codes leave no line."""
    if code in _FENCED:
        named = {"client": client.address, "client_id": client.client_id, "reason": reason}
        if transactional_id is not None:
            named["transactional_id"] = transactional_id
        _logger.info("a producer is fenced", extra=named)
