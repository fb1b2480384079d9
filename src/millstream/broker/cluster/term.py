"""One node's term as the controller. Every change names the revision of its election, so the next term fences it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from millstream.broker.cluster import keys
from millstream.broker.cluster.keys import PartitionKey, partition_key
from millstream.broker.cluster.store import CHANGES_MAX, Change, CoordinationStore, Expect, Put
from millstream.core.partition_state import PartitionState
from millstream.core.tasks import gather_or_cancel

_AT_ONCE_MAX = 8
"""Concurrent changes, so that ten thousand elections do not wait for each other's disk."""


class Proposal(NamedTuple):
    """A new state for a partition, if it still has the one that this was computed from."""

    partition: PartitionKey
    state: PartitionState
    revision: int
    """Of the state before; 0 if there must be none."""


class Term:
    """Changes of the coordination store that apply only while this node is the controller."""

    def __init__(self, store: CoordinationStore, revision: int) -> None:
        self.store = store
        self.revision = revision
        self.last_revision = revision
        """Of the last change that was carried out."""

    async def change(self, changes: Sequence[Change], expect: Sequence[Expect] = ()) -> bool:
        """Carry out changes; return False if an expectation failed, or another node is the controller."""
        revision = await self.store.change(changes, [Expect(keys.CONTROLLER, self.revision), *expect])
        if revision is None:
            return False
        self.last_revision = max(self.last_revision, revision)
        return True

    async def propose(self, proposals: Iterable[Proposal]) -> list[Proposal]:
        """Change the states of partitions, many at once; return those that another change has overtaken."""
        left = iter(proposals)
        overtaken: list[Proposal] = []

        async def work() -> None:
            while batch := list(islice(left, CHANGES_MAX)):
                overtaken.extend(await self._propose(batch))

        await gather_or_cancel(work() for _ in range(_AT_ONCE_MAX))
        return overtaken

    async def _propose(self, batch: list[Proposal]) -> list[Proposal]:
        if await self._carry_out(batch):
            return []
        if len(batch) == 1:
            return batch
        # An overtaken proposal must not delay the others.
        return [proposal for proposal in batch if not await self._carry_out([proposal])]

    async def _carry_out(self, batch: list[Proposal]) -> bool:
        return await self.change(
            [Put(partition_key(one.partition), one.state.to_json()) for one in batch],
            [Expect(partition_key(one.partition), one.revision) for one in batch],
        )
