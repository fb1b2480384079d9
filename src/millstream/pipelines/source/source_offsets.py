"""The offsets that the rows of a batch come from, committed together with the rows as those of a consumer group."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from millstream.pipelines.source.position import Offsets
from millstream.protocol.private.transactions import GroupMember, TransactionalProducer, Transactions

OFFSETS_TASK: Final = 1_000_000_000
"""Stands in the place of a task's number in the attempt that commits offsets."""

NO_MEMBER: Final = GroupMember()


@dataclass(frozen=True, slots=True)
class SourceOffsets:
    """Where a group is to go on when the batch is committed, and who in the group says so."""

    group: str
    offsets: Offsets = field(hash=False)
    member: GroupMember = NO_MEMBER


async def prepare_offsets(
    transactions: Transactions, transactional_id: str, source: SourceOffsets
) -> TransactionalProducer:
    """One more member of a batch: the offsets, in a transaction that is ready to be decided."""
    member = await transactions.begin(transactional_id)
    await transactions.commit_offsets(member, source.group, source.offsets, source.member)
    await transactions.prepare(member)
    return member
