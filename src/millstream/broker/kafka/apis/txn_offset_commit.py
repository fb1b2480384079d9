"""TxnOffsetCommit (key 28), versions 0 to 5: commits offsets as part of a producer's transaction.

Before they are stored, the coordinator of the transaction is asked whether the group's partition of
`__consumer_offsets` belongs to it. Until the transaction ends, consumers that ask for stable offsets get
UNSTABLE_OFFSET_COMMIT.

Version notes: up to 1 a coordinator that is loading returns COORDINATOR_NOT_AVAILABLE, since old clients do not know
the other code; 2 adds the leader epoch; 3 adds the member and its generation, which are checked (ILLEGAL_GENERATION,
UNKNOWN_MEMBER_ID, FENCED_INSTANCE_ID); from 4 on a transaction that does not hold the group gets TRANSACTION_ABORTABLE,
INVALID_TXN_STATE before; from 5 on, the second version of the protocol, the partition is added to the transaction
instead of AddOffsetsToTxn.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode
from kio.schema.txn_offset_commit.v5.request import TxnOffsetCommitRequest
from kio.schema.txn_offset_commit.v5.response import (
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)

from millstream.broker.cluster.topics import Topics
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.requests import CommitRequest, MemberRef, PartitionCommit
from millstream.broker.kafka.api import (
    NO_THROTTLE,
    ClientInfo,
    Versioned,
    VersionedApi,
    error_code,
    log_fenced,
    partition_exists,
)
from millstream.broker.replication.acknowledgement import TransactionGate
from millstream.core.errors import MillstreamError
from millstream.core.ids import ProducerId
from millstream.core.topic import TopicPartition

_FIRST_WITH_LOADING: Final = 2
_FIRST_WITH_ABORTABLE: Final = 4
_FIRST_THAT_ADDS: Final = 5

Codes = dict[tuple[str, int], ErrorCode]


class TxnOffsetCommit(VersionedApi[TxnOffsetCommitRequest, TxnOffsetCommitResponse]):
    key = 28
    versions = (0, 5)
    changes = None

    def __init__(self, groups: GroupCoordinator, topics: Topics, gate: TransactionGate) -> None:
        self._groups = groups
        self._topics = topics
        self._gate = gate

    async def handle(self, request: Versioned[TxnOffsetCommitRequest], client: ClientInfo) -> TxnOffsetCommitResponse:
        version, message = request
        valid: dict[str, list[PartitionCommit]] = {}
        codes: Codes = {}
        for topic in message.topics:
            for partition in topic.partitions:
                if partition_exists(self._topics, topic.name, partition.partition_index):
                    valid.setdefault(topic.name, []).append(_commit(partition))
                else:
                    codes[topic.name, partition.partition_index] = ErrorCode.unknown_topic_or_partition
        if valid:
            codes.update(await self._commit(version, message, valid, client))
        return TxnOffsetCommitResponse(
            throttle_time=NO_THROTTLE,
            topics=tuple(
                TxnOffsetCommitResponseTopic(
                    name=topic.name,
                    partitions=tuple(
                        TxnOffsetCommitResponsePartition(
                            partition_index=partition.partition_index,
                            error_code=codes[topic.name, partition.partition_index],
                        )
                        for partition in topic.partitions
                    ),
                )
                for topic in message.topics
            ),
        )

    async def _commit(
        self,
        version: int,
        message: TxnOffsetCommitRequest,
        valid: dict[str, list[PartitionCommit]],
        client: ClientInfo,
    ) -> Codes:
        adds = version >= _FIRST_THAT_ADDS

        async def admit(partition: TopicPartition) -> None:
            errors = await self._gate.admit(
                message.transactional_id,
                message.producer_id,
                message.producer_epoch,
                (partition,),
                add=adds,
            )
            error = errors.get(partition)
            if error is not None:
                raise error

        request = CommitRequest(
            member=MemberRef(
                group_id=message.group_id,
                member_id=message.member_id,
                instance_id=message.group_instance_id,
                generation=message.generation_id,
            ),
            topics={name: tuple(commits) for name, commits in valid.items()},
        )
        try:
            result = await self._groups.commit_in_transaction(
                request, ProducerId(message.producer_id), message.producer_epoch, admit=admit, adds=adds
            )
        except MillstreamError as error:
            code = _client_code(error_code(error), version)
            log_fenced(code, str(error), client, transactional_id=message.transactional_id)
            return {(name, commit.partition): code for name, commits in valid.items() for commit in commits}
        return {(name, index): error_code(error) for name, errors in result.items() for index, error in errors.items()}


def _client_code(code: ErrorCode, version: int) -> ErrorCode:
    if code is ErrorCode.coordinator_load_in_progress and version < _FIRST_WITH_LOADING:
        return ErrorCode.coordinator_not_available
    if code is ErrorCode.transaction_abortable and version < _FIRST_WITH_ABORTABLE:
        return ErrorCode.invalid_txn_state
    # Producers handle this code for appends, but not here.
    return ErrorCode.coordinator_not_available if code is ErrorCode.not_enough_replicas else code


def _commit(partition: Any) -> PartitionCommit:
    return PartitionCommit(
        partition=partition.partition_index,
        offset=partition.committed_offset,
        leader_epoch=partition.committed_leader_epoch,
        metadata=partition.committed_metadata,
    )
