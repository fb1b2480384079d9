"""The one mapping between the errors of `core/errors.py` and Kafka's error codes, for brokers and clients.

An error without an entry gets the code of its nearest ancestor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from millstream.core import errors

_RAISED: Final[dict[type[errors.MillstreamError], int]] = {
    errors.CorruptBatch: 2,
    errors.UnknownTopic: 3,
    errors.NotLeader: 6,
    errors.RequestTimedOut: 7,
    errors.BrokerUnreachable: 8,
    errors.BatchTooLarge: 10,
    errors.MetadataTooLarge: 12,
    errors.CoordinatorLoading: 14,
    errors.CoordinatorUnavailable: 15,
    errors.NotCoordinator: 16,
    errors.InvalidTopicName: 17,
    errors.NotEnoughReplicas: 19,
    errors.IllegalGeneration: 22,
    errors.InconsistentProtocol: 23,
    errors.InvalidGroupId: 24,
    errors.UnknownMember: 25,
    errors.InvalidSessionTimeout: 26,
    errors.RebalanceInProgress: 27,
    errors.TopicNotAuthorized: 29,
    errors.GroupNotAuthorized: 30,
    errors.ClusterNotAuthorized: 31,
    errors.InvalidTimestamp: 32,
    errors.UnsupportedVersion: 35,
    errors.TopicExists: 36,
    errors.InvalidPartitions: 37,
    errors.InvalidReplication: 38,
    errors.InvalidAssignment: 39,
    errors.InvalidSetting: 40,
    errors.InvalidRequest: 42,
    errors.PolicyViolation: 44,
    errors.OutOfOrderSequence: 45,
    errors.FencedProducer: 47,
    errors.InvalidTransactionState: 48,
    errors.InvalidProducerMapping: 49,
    errors.InvalidTransactionTimeout: 50,
    errors.ConcurrentTransactions: 51,
    errors.TransactionCoordinatorFenced: 52,
    errors.TransactionNotAuthorized: 53,
    errors.StorageFailure: 56,
    errors.AuthenticationFailed: 58,
    errors.UnknownProducer: 59,
    errors.PlanConflict: 60,
    errors.GroupNotEmpty: 68,
    errors.UnknownGroup: 69,
    errors.FencedLeaderEpoch: 74,
    errors.UnknownLeaderEpoch: 75,
    errors.UnsupportedCompression: 76,
    errors.PreferredUnavailable: 80,
    errors.GroupFull: 81,
    errors.FencedInstance: 82,
    errors.EligibleUnavailable: 83,
    errors.ElectionNotNeeded: 84,
    errors.NoReassignment: 85,
    errors.SubscribedToTopic: 86,
    errors.InvalidBatch: 87,
    errors.QuotaExceeded: 89,
    errors.ProducerFenced: 90,
    errors.NotFound: 91,
    errors.SubscriptionExists: 92,
    errors.UnknownTopicId: 100,
    errors.UnknownTransaction: 105,
    errors.FencedMemberEpoch: 110,
    errors.UnreleasedInstance: 111,
    errors.UnsupportedAssignor: 112,
    errors.StaleMemberEpoch: 113,
    errors.TransactionAbortable: 120,
    errors.InvalidRecordState: 121,
    errors.InvalidRegex: 128,
}
"""Errors that clients raise again when they receive the code."""

CODES: Final[Mapping[type[errors.MillstreamError], int]] = {
    **_RAISED,
    errors.MillstreamError: -1,
    errors.UnknownSubscription: 69,
    errors.Conflict: 42,
    errors.PipelineExists: 92,
    errors.AlreadyLanded: 68,
    errors.MirrorExists: 92,
    errors.MirrorInUse: 68,
    errors.GroupRejected: 27,
    errors.MemberIdRequired: 79,
    errors.BatchRejected: 87,
    errors.ProducerRejected: 47,
    errors.TransactionRejected: 48,
    errors.LogUnavailable: 56,
    errors.OffsetOutOfRange: 1,
    # Consumers raise this code to the application; they would retry a storage error forever.
    errors.DamagedRange: 2,
    # Makes the client refresh its metadata, where the topic is deleted or has another leader.
    errors.PartitionClosed: 6,
    errors.SchemaRegistryError: 42,
    errors.ElectionRefused: 84,
    errors.FilterUnavailable: 14,
    # Both stores may recover soon, and admin clients retry after this code.
    errors.StoreUnavailable: 7,
    errors.CatalogUnavailable: 7,
    errors.ProtocolViolation: 42,
    errors.NotAuthorized: 31,
}
"""The code of each error; those of the second part share one, or carry details that a code does not."""

_ERRORS: Final[Mapping[int, type[errors.MillstreamError]]] = {
    **{code: kind for kind, code in _RAISED.items()},
    5: errors.NotLeader,
    # Appended, but not on enough replicas: whether it stays is unknown.
    20: errors.RequestTimedOut,
    103: errors.UnknownTopicId,
}
OFFSET_OUT_OF_RANGE: Final = 1
_QUOTED: Final = re.compile(r"'[^']+'")
_EXPLAINED: Final = {17: "a topic name has at most 249 characters: letters, digits, '.', '_' and '-'"}
"""Explains codes that Kafka's responses carry without a message."""

TRANSIENT: Final = (
    errors.NotLeader,
    errors.CoordinatorUnavailable,
    errors.NotEnoughReplicas,
    errors.BrokerUnreachable,
)
"""Transient errors: the request may succeed with fresh metadata."""


def error_from_code(code: int, message: str | None, *, about: str = "", needs: str = "") -> errors.MillstreamError:
    """Build the error for a code other than 0.

    `about` says what was requested, where the message does not name it, and `needs` which right that takes.
    """
    kind = _ERRORS.get(code)
    is_denied = kind is not None and issubclass(kind, errors.NotAuthorized)
    text = (
        message
        or _EXPLAINED.get(code)
        or (f"not authorized; this needs {needs}" if is_denied and needs else None)
        or f"{'not authorized, ' if is_denied else ''}the broker responded with {code_name(code)}"
    )
    names = _QUOTED.findall(about)
    if about and not (names and all(name in (message or "") for name in names)):
        text = f"{about}: {text}"
    if code == OFFSET_OUT_OF_RANGE:
        return errors.OffsetOutOfRange(text, start=-1, end=-1)
    return errors.RequestRefused(text, code=code) if kind is None else kind(text)


def no_producer_error(code: int, topic: str | None) -> errors.MillstreamError:
    """Build the error for a code with which a broker refuses an idempotent producer its id."""
    if topic is not None:
        return error_from_code(code, None, about=f"publish to {topic!r}", needs=f"WRITE on topic {topic!r}")
    needs = "WRITE on a topic, or IDEMPOTENT_WRITE on the cluster"
    return error_from_code(code, None, about="publishing", needs=needs)


def no_coordinator_error(code: int, message: str | None, name: str) -> errors.MillstreamError:
    """Build the error for a code with which a broker refuses to name the coordinator of a group or transactional id."""
    rights: dict[type[errors.MillstreamError], str] = {
        errors.GroupNotAuthorized: f"DESCRIBE on group:{name}, which READ includes",
        errors.TransactionNotAuthorized: (
            f"DESCRIBE on transactional_id:{name} or on a prefix of it, which WRITE includes"
        ),
    }
    needed = rights.get(_ERRORS.get(code, errors.MillstreamError))
    if needed is not None:
        return error_from_code(code, f"not authorized; this needs {needed}")
    return error_from_code(code, message, about=f"coordinator of {name!r}")


def code_name(code: int) -> str:
    """Return the name of an error code in Kafka's documentation."""
    from kio.schema.errors import ErrorCode

    try:
        return ErrorCode(code).name.upper()
    except ValueError:
        return f"error code {code}"
