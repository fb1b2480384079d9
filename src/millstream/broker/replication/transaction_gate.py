"""What a partition asks before a transaction begins on it: whether the coordinator knows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from millstream.core.errors import MillstreamError
from millstream.core.topic import TopicPartition


class TransactionGate(Protocol):
    """Asks the coordinator of a transaction, on this node or on another one."""

    async def admit(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[TopicPartition],
        *,
        add: bool,
    ) -> Mapping[TopicPartition, MillstreamError | None]:
        """For each partition None if the transaction is open and holds it, else why nothing may be written to it.

        With `add` the coordinator takes the partitions into the transaction, as transaction version 2 has it;
        otherwise it only says whether it has them.
        """
