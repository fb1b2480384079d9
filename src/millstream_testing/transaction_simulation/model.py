"""What clients did and were told, and what follows from it for every transaction. The model believes no broker.

A transaction is told apart by the number in its records. Nothing becomes visible whose commit was never sent; what was
acknowledged as committed is visible as a whole, what was acknowledged as aborted not at all, and everything else is
one of both on every partition. Of the attempts at a batch exactly those become visible that one CompleteBatch named.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from millstream.core.topic import TopicPartition
from millstream_testing.simulation.committed import Violation

Batch = tuple[str, int]
"""A query and the number of its batch."""


@dataclass(slots=True)
class Told:
    """One transaction as its client knows it."""

    number: int
    transactional_id: str
    instance: int
    batch: Batch | None = None
    written: dict[str, TopicPartition] = field(default_factory=dict)
    """What was acknowledged: values and where they are."""
    offset_told: bool = False
    """Whether it committed an offset of its group, which is its number."""
    commit_sent: bool = False
    committed: bool = False
    """Its client was told so."""
    doomed: str | None = None
    """Why it must never become visible."""
    outcomes: dict[TopicPartition, bool] = field(default_factory=dict)
    """By partition: what its marker there says."""
    visible: dict[str, int] = field(default_factory=dict)
    """How often each of its records became visible."""


@dataclass(slots=True)
class _BatchTold:
    completes: list[frozenset[int]] = field(default_factory=list)
    """The members of every CompleteBatch that was sent."""
    winner: frozenset[int] | None = None
    is_over: bool = False
    """Somebody was told that it is committed."""
    abort_sent: bool = False
    attempts: list[Told] = field(default_factory=list)


class Model:
    """Every transaction of a run."""

    def __init__(self) -> None:
        self.transactions: list[Told] = []
        self._of_id: dict[str, list[Told]] = {}
        self._batches: dict[Batch, _BatchTold] = {}

    # -- what clients do --------------------------------------------------------------------------------------

    def begin(self, transactional_id: str, instance: int, batch: Batch | None = None) -> Told:
        """A transaction begins."""
        told = Told(len(self.transactions), transactional_id, instance, batch)
        self.transactions.append(told)
        self._of_id.setdefault(transactional_id, []).append(told)
        if batch is not None:
            self._of(batch).attempts.append(told)
        return told

    def begun_so_far(self) -> int:
        """How many transactions have begun."""
        return len(self.transactions)

    def initialized(self, transactional_id: str, instance: int, begun_before: int) -> None:
        """A producer was told that it has the id: whatever others had under way when it asked is over."""
        for told in self._of_id.get(transactional_id, ()):
            if told.instance != instance and told.number < begun_before and not told.commit_sent:
                self.doom(told, "a newer producer was initialized")

    def commit_told(self, told: Told) -> None:
        """A client was told that its transaction is committed."""
        if told.doomed is not None:
            raise Violation(f"transaction {told.number} was acknowledged as committed, although {told.doomed}")
        if False in told.outcomes.values():
            raise Violation(f"transaction {told.number} was acknowledged as committed, but is aborted")
        told.committed = True

    def doom(self, told: Told, reason: str) -> None:
        """From now on it is certain that a transaction never becomes visible."""
        told.doomed = told.doomed or reason
        if told.committed or True in told.outcomes.values():
            raise Violation(f"transaction {told.number} is committed, although {reason}")

    # -- batches ----------------------------------------------------------------------------------------------

    def complete_sent(self, batch: Batch, members: Iterable[Told]) -> None:
        """A driver asks for a batch to be committed."""
        members = list(members)
        for told in members:
            told.commit_sent = True
        self._of(batch).completes.append(frozenset(told.number for told in members))

    def complete_told(self, batch: Batch, members: Iterable[Told], *, by_this: bool) -> None:
        """A driver was told that a batch is committed, by its own request or by one before it."""
        named = frozenset(told.number for told in members)
        of_batch = self._of(batch)
        if by_this:
            if of_batch.winner not in (None, named):
                raise Violation(f"batch {batch} was committed twice, by {of_batch.winner} and by {named}")
            of_batch.winner = named
            for told in of_batch.attempts:
                if told.number not in named:
                    self.doom(told, f"batch {batch} was committed without it")
        self.batch_told(batch)

    def batch_told(self, batch: Batch) -> None:
        """Somebody was told that a batch is committed."""
        of_batch = self._of(batch)
        of_batch.is_over = True
        if not of_batch.completes:
            raise Violation(f"batch {batch} is told to be committed, but nobody asked for that")

    def abort_sent(self, batch: Batch) -> None:
        """A driver asks for all attempts at a batch to be aborted."""
        self._of(batch).abort_sent = True

    def abort_told(self, batch: Batch, begun_before: int) -> None:
        """A driver was told that all attempts are aborted: those that had begun when it asked."""
        for told in self._of(batch).attempts:
            if told.number < begun_before and not told.commit_sent:
                self.doom(told, f"batch {batch} was aborted")

    def complete_refused(self, batch: Batch, *, all_prepared: bool, reason: str) -> None:
        """A batch was not committed. Nobody but its driver may have ended what was prepared."""
        of_batch = self._of(batch)
        if of_batch.is_over:
            raise Violation(f"batch {batch} is committed, but committing it again failed: {reason}")
        if all_prepared and not of_batch.abort_sent and len(of_batch.completes) == 1:
            raise Violation(f"batch {batch} was refused, although all of its members were prepared: {reason}")

    def _of(self, batch: Batch) -> _BatchTold:
        return self._batches.setdefault(batch, _BatchTold())

    # -- what is seen in the logs -----------------------------------------------------------------------------

    def decided(self, partition: TopicPartition, numbers: Collection[int], values: list[str], *, commit: bool) -> None:
        """A marker was committed that ends a transaction with these records on one partition."""
        if len(numbers) > 1:
            raise Violation(f"{partition}: one marker ends several transactions: {sorted(numbers)}")
        for number in numbers:
            told = self.transactions[number]
            if partition in told.outcomes:
                raise Violation(f"{partition}: transaction {number} ends twice")
            if commit:
                self._check_may_commit(told, partition)
            elif told.committed:
                raise Violation(f"{partition}: transaction {number} is aborted, but was acknowledged as committed")
            if (not commit) in told.outcomes.values():
                raise Violation(f"transaction {number} is torn: {partition} is {commit}, others {told.outcomes}")
            told.outcomes[partition] = commit
            if commit:
                for value in values:
                    told.visible[value] = told.visible.get(value, 0) + 1

    def _check_may_commit(self, told: Told, partition: TopicPartition) -> None:
        if not told.commit_sent:
            raise Violation(f"{partition}: transaction {told.number} is committed, but nobody asked for that")
        if told.doomed is not None:
            raise Violation(f"{partition}: transaction {told.number} is committed, although {told.doomed}")

    def offset_seen(self, transactional_id: str, before: int, offset: int) -> None:
        """The offset that counts of the group of a transactional id was read, and what it was when read before."""
        if offset < before:
            raise Violation(f"the offset of {transactional_id} went back from {before} to {offset}")
        if offset < 0:
            return
        told = self.transactions[offset]
        if told.transactional_id != transactional_id or not told.commit_sent or told.doomed is not None:
            raise Violation(f"the offset of {transactional_id} comes from {told}")

    # -- in the end -------------------------------------------------------------------------------------------

    def check_all(self) -> None:
        """After everything is healed and read."""
        for told in self.transactions:
            is_visible = bool(told.visible)
            if told.committed or is_visible:
                missing = [value for value in told.written if told.visible.get(value) != 1]
                if missing or set(told.visible) != set(told.written):
                    raise Violation(f"transaction {told.number} is not visible completely and once: {told}")
        for batch, of_batch in self._batches.items():
            self._check_batch(batch, of_batch)

    def _check_batch(self, batch: Batch, of_batch: _BatchTold) -> None:
        visible = frozenset(told.number for told in of_batch.attempts if told.visible)
        if of_batch.winner is not None and visible != of_batch.winner:
            raise Violation(f"batch {batch} was committed as {sorted(of_batch.winner)}, visible is {sorted(visible)}")
        if visible not in of_batch.completes and (visible or of_batch.is_over):
            raise Violation(f"batch {batch}: visible is {sorted(visible)}, asked for was {of_batch.completes}")

    def offset_of(self, transactional_id: str) -> int:
        """The offset that has to count in the end."""
        told = [told.number for told in self._of_id.get(transactional_id, ()) if told.offset_told and told.visible]
        return max(told, default=-1)
