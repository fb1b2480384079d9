"""The durable decisions of coordinators, derived from the committed batches of `__transaction_state` alone."""

from __future__ import annotations

from typing import NamedTuple

from millstream.broker.transactions.records import TransactionKey, read_key, read_transaction
from millstream.broker.transactions.transaction import ENDING
from millstream.protocol.records.batch import read_header
from millstream.protocol.records.record import decode_batch


class Decision(NamedTuple):
    """A transaction is to end on every partition with a marker of this epoch."""

    producer_id: int
    epoch: int
    commit: bool


class Decisions:
    """Every decision that was ever committed."""

    def __init__(self) -> None:
        self._made: set[Decision] = set()

    def __contains__(self, decision: Decision) -> bool:
        return decision in self._made

    def add(self, batch: bytes) -> None:
        for record in decode_batch(batch, read_header(batch)):
            key = read_key(record.key or b"")
            if not isinstance(key, TransactionKey) or record.value is None:
                continue
            transaction = read_transaction(key.transactional_id, record.value)
            if transaction.state in ENDING:
                self._made.add(Decision(transaction.producer_id, transaction.epoch, transaction.is_committing))
