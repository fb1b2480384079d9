"""Converts error codes to errors of `core/errors.py`: the client's side of `broker/kafka/errors.py`."""

from __future__ import annotations

from typing import Final

from millstream.core import errors

_ERRORS: Final[dict[int, type[errors.MillstreamError]]] = {
    2: errors.CorruptBatch,
    3: errors.UnknownTopic,
    5: errors.NotLeader,
    6: errors.NotLeader,
    7: errors.RequestTimedOut,
    8: errors.BrokerUnreachable,
    10: errors.BatchTooLarge,
    12: errors.MetadataTooLarge,
    14: errors.CoordinatorLoading,
    15: errors.CoordinatorUnavailable,
    16: errors.NotCoordinator,
    17: errors.InvalidTopicName,
    19: errors.NotEnoughReplicas,
    # Appended, but not on enough replicas: whether it stays is unknown.
    20: errors.RequestTimedOut,
    22: errors.IllegalGeneration,
    23: errors.InconsistentProtocol,
    24: errors.InvalidGroupId,
    25: errors.UnknownMember,
    26: errors.InvalidSessionTimeout,
    27: errors.RebalanceInProgress,
    29: errors.TopicNotAuthorized,
    30: errors.GroupNotAuthorized,
    31: errors.ClusterNotAuthorized,
    32: errors.InvalidTimestamp,
    35: errors.UnsupportedVersion,
    36: errors.TopicExists,
    37: errors.InvalidPartitions,
    38: errors.InvalidReplication,
    39: errors.InvalidAssignment,
    40: errors.InvalidSetting,
    42: errors.InvalidRequest,
    44: errors.PolicyViolation,
    45: errors.OutOfOrderSequence,
    47: errors.FencedProducer,
    48: errors.InvalidTransactionState,
    49: errors.InvalidProducerMapping,
    50: errors.InvalidTransactionTimeout,
    51: errors.ConcurrentTransactions,
    52: errors.TransactionCoordinatorFenced,
    53: errors.TransactionNotAuthorized,
    56: errors.StorageFailure,
    58: errors.AuthenticationFailed,
    59: errors.UnknownProducer,
    68: errors.GroupNotEmpty,
    69: errors.UnknownGroup,
    74: errors.FencedLeaderEpoch,
    75: errors.UnknownLeaderEpoch,
    76: errors.UnsupportedCompression,
    81: errors.GroupFull,
    82: errors.FencedInstance,
    86: errors.SubscribedToTopic,
    87: errors.InvalidBatch,
    89: errors.QuotaExceeded,
    90: errors.ProducerFenced,
    91: errors.NotFound,
    92: errors.SubscriptionExists,
    100: errors.UnknownTopicId,
    105: errors.UnknownTransaction,
    110: errors.FencedMemberEpoch,
    111: errors.UnreleasedInstance,
    112: errors.UnsupportedAssignor,
    113: errors.StaleMemberEpoch,
    120: errors.TransactionAbortable,
    121: errors.InvalidRecordState,
    128: errors.InvalidRegex,
}
OFFSET_OUT_OF_RANGE: Final = 1

TRANSIENT: Final = (
    errors.NotLeader,
    errors.CoordinatorUnavailable,
    errors.NotEnoughReplicas,
    errors.BrokerUnreachable,
)
"""Errors that pass when the request is sent again with fresh metadata."""


def error_from_code(code: int, message: str | None, *, about: str = "") -> errors.MillstreamError:
    """Build the error for a code other than 0; `about` says what was requested, where the message does not."""
    kind = _ERRORS.get(code)
    is_denied = kind is not None and issubclass(kind, errors.NotAuthorized)
    text = message or f"{'not authorized, ' if is_denied else ''}the broker answered with {code_name(code)}"
    if about:
        text = f"{about}: {text}"
    if code == OFFSET_OUT_OF_RANGE:
        return errors.OffsetOutOfRange(text, start=-1, end=-1)
    return errors.RequestRefused(text, code=code) if kind is None else kind(text)


def code_name(code: int) -> str:
    """Return the name of an error code in Kafka's documentation."""
    from kio.schema.errors import ErrorCode

    try:
        return ErrorCode(code).name.upper()
    except ValueError:
        return f"error code {code}"
