"""What a partition asks before a transaction begins on it: whether the coordinator knows of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from millstream.core.errors import MillstreamError
from millstream.core.topic import TopicPartition


class TransactionGate(Protocol):
    """Asks the coordinator of a transaction, on this node or another one."""

    async def admit(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[TopicPartition],
        *,
        add: bool,
    ) -> Mapping[TopicPartition, MillstreamError | None]:
        """Return None for each partition that the open transaction holds, otherwise why it may not be written.

        With `add` the coordinator adds the partitions to the transaction, as in transaction version 2; otherwise it
        only says whether it has them.
        """
