"""AddOffsetsToTxn (key 25), versions 0 to 4: adds the offsets of a group to a producer's transaction.

It adds the partition of `__consumer_offsets` that stores the group; TxnOffsetCommit sends the offsets. Clients of the
second version of the protocol do not send this request: TxnOffsetCommit adds the partition itself.

Version notes: up to 1 a fenced producer gets INVALID_PRODUCER_EPOCH, from 2 on PRODUCER_FENCED; 3 is flexible; 4 is the
same.
"""

from __future__ import annotations

from typing import Final

from kio.schema.add_offsets_to_txn.v4.request import AddOffsetsToTxnRequest
from kio.schema.add_offsets_to_txn.v4.response import AddOffsetsToTxnResponse
from kio.schema.errors import ErrorCode

from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.kafka.api import NO_THROTTLE, ClientInfo, Versioned, VersionedApi, error_code, fenced_code
from millstream.broker.transactions.coordinator import TransactionCoordinator
from millstream.broker.transactions.transaction import FIRST_VERSION, ProducerRef
from millstream.core.errors import MillstreamError
from millstream.core.ids import ProducerId
from millstream.core.topic import CONSUMER_OFFSETS, TopicPartition

_FIRST_WITH_FENCED: Final = 2

Call = Versioned[AddOffsetsToTxnRequest]


class AddOffsetsToTxn(VersionedApi[AddOffsetsToTxnRequest, AddOffsetsToTxnResponse]):
    key = 25
    versions = (0, 4)
    changes = None

    def __init__(self, transactions: TransactionCoordinator, groups: GroupCoordinator) -> None:
        self._transactions = transactions
        self._groups = groups

    async def handle(self, request: Call, client: ClientInfo) -> AddOffsetsToTxnResponse:
        message = request.message
        who = ProducerRef(message.transactional_id, ProducerId(message.producer_id), message.producer_epoch)
        await self._groups.ensure()
        partition = TopicPartition(CONSUMER_OFFSETS, self._groups.partition_of(message.group_id))
        await self._transactions.add_partitions(who, (partition,), version=FIRST_VERSION)
        return AddOffsetsToTxnResponse(throttle_time=NO_THROTTLE, error_code=ErrorCode.none)

    def failure(self, error: MillstreamError, request: Call) -> AddOffsetsToTxnResponse:
        return self.refusal(fenced_code(error_code(error), request.version, first=_FIRST_WITH_FENCED))
