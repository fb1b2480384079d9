"""The transaction coordinator of this node: checks requests independently of the state, and finds the shard."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Final, Protocol, TypeVar

from millstream.broker.coordination.runtime import COMPACTED, Coordinator, Runtime, StateTopic, StateTopics
from millstream.broker.coordination.shard import RETRY_FIRST_S, Shard
from millstream.broker.coordination.state_machine import Confirmation, Outcome, Timers
from millstream.broker.transactions.records import transaction_tombstone
from millstream.broker.transactions.shard import TransactionShard
from millstream.broker.transactions.transaction import (
    InitRequest,
    InitResponse,
    ProducerRef,
    Transaction,
    TransactionFilter,
    TransactionLimits,
    UnmarkedTransaction,
    placement_of,
)
from millstream.core.clock import Clock
from millstream.core.config import Config
from millstream.core.errors import (
    ConcurrentTransactions,
    CoordinatorUnavailable,
    InvalidProducerMapping,
    InvalidRequest,
    InvalidTransactionState,
    InvalidTransactionTimeout,
    MillstreamError,
    ProducerFenced,
    TransactionAbortable,
    UnknownTransaction,
)
from millstream.core.ids import NodeId, PartitionIndex, ProducerId
from millstream.core.topic import TRANSACTION_STATE, TopicPartition

RESERVED_IDS: Final = 4


class ProducerIds(Protocol):
    """Allocates producer ids that are unique forever, across restarts and crashes."""

    async def next(self) -> ProducerId:
        """Allocate an id that was never used before."""


class ProducerIdReserve:
    """A few unused producer ids."""

    def __init__(self, producer_ids: ProducerIds) -> None:
        self._producer_ids = producer_ids
        self._reserve: deque[ProducerId] = deque()
        self._error: MillstreamError | None = None

    async def fill(self) -> None:
        """Refill the reserve; if that fails, only callers that need an id get the error."""
        try:
            while len(self._reserve) < RESERVED_IDS:
                self._reserve.append(await self._producer_ids.next())
        except MillstreamError as error:
            self._error = error
        else:
            self._error = None

    def take(self) -> ProducerId:
        if not self._reserve:
            raise CoordinatorUnavailable(f"no producer id is available: {self._error or 'try again'}")
        return self._reserve.popleft()


T = TypeVar("T")

ID_CHARACTERS_MAX: Final = 4096

ENDING_WAIT_S: Final = 0.5
"""How long a producer waits for its previous transaction to end before it must ask again."""

OVERLAP_WAIT_S: Final = 0.1
"""How long a new hold of decisions waits for other holds to end if decisions are delayed; limited, because holds of
two nodes may wait for each other.
"""

MARKERS_WAIT_S: Final = 5.0
"""How long the commit of a batch waits for its markers, which may be on other nodes."""


_FINAL_REFUSALS: Final = Confirmation(
    (ProducerFenced, InvalidProducerMapping, InvalidTransactionState, UnknownTransaction), transaction_tombstone("")
)
"""Errors that end a producer or a batch: a coordinator that was replaced must not send them from its old state."""


class _HeldBack(CoordinatorUnavailable):
    """Decisions are held back."""


class TransactionCoordinator(Coordinator[TransactionShard]):
    """Transactional ids, stored in `__transaction_state`."""

    def __init__(
        self,
        topics: StateTopics,
        config: Config,
        clock: Clock,
        producer_ids: ProducerIds,
        *,
        retry_first_s: float = RETRY_FIRST_S,
    ) -> None:
        self._clock = clock
        self._limits = TransactionLimits(
            timeout_max_ms=config.transaction_timeout_max_ms, id_expiration_ms=config.transactional_id_expiry_ms
        )
        self._reserve = ProducerIdReserve(producer_ids)
        self._on_ending: Callable[[], None] = lambda: None
        self.mirror_of: Callable[[str], str] = lambda _topic: ""
        """Returns the mirror that writes a topic; empty for one that clients write."""
        self._holds = 0
        self._delayed = 0
        """How many decisions wait for holds to end."""
        self._may_decide = asyncio.Event()
        self._may_decide.set()
        topic = StateTopic(name=TRANSACTION_STATE, partitions=config.transactions_partitions, overrides=COMPACTED)
        self._runtime = Runtime(
            topics,
            topic,
            self._make_shard,
            clock=clock,
            retry_first_s=retry_first_s,
            confirmation=_FINAL_REFUSALS if config.has_other_nodes else None,
        )

    @asynccontextmanager
    async def hold_decisions(self) -> AsyncIterator[None]:
        """Hold back decisions once every decided transaction has its markers, so that none is half committed."""
        if self._delayed:
            # Decisions that wait for other holds are made first, so that holds that overlap cannot delay them forever.
            with suppress(TimeoutError):
                async with asyncio.timeout(OVERLAP_WAIT_S):
                    await self._may_decide.wait()
            await asyncio.sleep(0)
        self._holds += 1
        self._may_decide.clear()
        try:
            while endings := [ending for shard in self.shards for ending in await self._endings(shard)]:
                for ending in endings:
                    await self._wait_ended(ending.transactional_id)
            yield
        finally:
            self._holds -= 1
            if not self._holds:
                self._may_decide.set()

    async def _decide(self, name: str, decide: Callable[[TransactionShard], Outcome[T]]) -> T:
        """Make a decision when none are held back; another hold may begin while its shard is being loaded."""

        def decide_unless_held(shard: TransactionShard) -> Outcome[T]:
            if self._holds:
                raise _HeldBack
            return decide(shard)

        while True:
            await self._wait_for_holds()
            with suppress(_HeldBack):
                return await self._runtime.run(name, decide_unless_held, pure=True)

    async def _wait_for_holds(self) -> None:
        while self._holds:
            self._delayed += 1
            try:
                await self._may_decide.wait()
            finally:
                self._delayed -= 1

    def led(self) -> list[tuple[int, int]]:
        """Return which shards this node runs, as partition and leader epoch."""
        return self._runtime.led()

    @property
    def partitions(self) -> int:
        """How many shards there are in the cluster; 0 before the first transaction."""
        return self._runtime.partitions

    async def _endings(self, shard: Shard[TransactionShard]) -> list[UnmarkedTransaction]:
        return await shard.submit(lambda state: state.endings(), pure=True)

    @property
    def shards(self) -> list[Shard[TransactionShard]]:
        return self._runtime.shards

    def on_transaction_ending(self, listener: Callable[[], None]) -> None:
        self._on_ending = listener

    def partition_of(self, transactional_id: str) -> PartitionIndex:
        """Return the partition of the topic that stores a transactional id."""
        return self._runtime.partition_of(placement_of(transactional_id))

    def leader_of(self, transactional_id: str) -> NodeId | None:
        """Return the node that coordinates a transactional id; None without a leader."""
        return self._runtime.leader_of(placement_of(transactional_id))

    def latest_epoch(self) -> int:
        """Return the latest epoch of any coordinator that this node knows of."""
        return self._runtime.latest_epoch()

    # Producers

    async def init(self, request: InitRequest) -> InitResponse:
        _check_id(request.transactional_id)
        if not 0 < request.timeout_ms <= self._limits.timeout_max_ms:
            raise InvalidTransactionTimeout(
                f"a transaction may take from 1 to {self._limits.timeout_max_ms} ms, not {request.timeout_ms}"
            )
        await self._reserve.fill()
        return await self._run_after_ending(request.transactional_id, lambda shard: shard.init(request))

    async def add_partitions(self, who: ProducerRef, partitions: Collection[TopicPartition], *, version: int) -> None:
        _check_id(who.transactional_id)
        await self._run_after_ending(
            who.transactional_id, lambda shard: shard.add_partitions(who, partitions, version=version)
        )

    async def verify(
        self, who: ProducerRef, partitions: Collection[TopicPartition]
    ) -> Mapping[TopicPartition, MillstreamError | None]:
        _check_id(who.transactional_id)
        return await self._run(who.transactional_id, lambda shard: shard.verify(who, partitions))

    async def end(self, who: ProducerRef, *, commit: bool, version: int) -> InitResponse:
        """Commit or abort; return when the decision is durable, while markers are still being written."""
        _check_id(who.transactional_id)
        await self._reserve.fill()

        def ended(shard: TransactionShard) -> Outcome[InitResponse]:
            if commit:
                self._check_writable(shard, who.transactional_id)
            return shard.end(who, commit=commit, version=version)

        return await self._decide(placement_of(who.transactional_id), ended)

    def _check_writable(self, shard: TransactionShard, transactional_id: str) -> None:
        """Raise `TransactionAbortable` if a mirror writes a topic of the transaction by now: records may be gone."""
        for partition in shard.undecided_partitions(transactional_id):
            mirror = self.mirror_of(partition.topic)
            if mirror:
                raise TransactionAbortable(
                    f"topic {partition.topic!r} is written by mirror {mirror!r}; abort, and begin again at the source"
                )

    # The batch commit

    async def last_batch(self, query: str) -> int:
        """Return the last committed batch of a query; -1 if there is none."""
        _check_id(query)
        return await self._runtime.run(query, lambda shard: shard.batches.last_batch(query), pure=True)

    async def prepare(self, who: ProducerRef) -> None:
        """Prepare the transaction of a writer that has written its part of a batch."""
        await self._run(who.transactional_id, lambda shard: shard.batches.prepare(who))

    async def complete_batch(self, query: str, batch: int, members: tuple[ProducerRef, ...]) -> bool:
        """Commit all members of a batch together; return False if that was done before.

        Return when the markers are written, so that readers see the result of a finished job; if that takes long,
        return earlier, since the decision is final.
        """
        _check_id(query)
        await self._reserve.fill()

        def completed(shard: TransactionShard) -> Outcome[bool]:
            for member in members:
                self._check_writable(shard, member.transactional_id)
            return shard.batches.complete(query, batch, members)

        is_new = await self._decide(query, completed)
        with suppress(TimeoutError, CoordinatorUnavailable):
            async with asyncio.timeout(MARKERS_WAIT_S):
                for member in members:
                    await self._wait_ended(member.transactional_id)
        return is_new

    async def abort_batch(self, query: str, batch: int, run: str = "") -> int:
        """Abort every attempt at a batch, and fence a named run; return the number of aborted attempts."""
        _check_id(query)
        if run:
            _check_id(run)
        await self._reserve.fill()
        return await self._runtime.run(query, lambda shard: shard.batches.abort(query, batch, run), pure=True)

    # For administrators

    async def abort(self, transactional_id: str) -> str:
        """Abort a hanging transaction; return its previous state."""
        _check_id(transactional_id)
        await self._reserve.fill()
        return await self._run(transactional_id, lambda shard: shard.abort(transactional_id))

    async def describe(self, transactional_id: str) -> Transaction:
        _check_id(transactional_id)
        return await self._run(transactional_id, lambda shard: shard.describe(transactional_id))

    async def listing(self, filter_: TransactionFilter) -> list[Transaction]:
        responses = [shard.submit(lambda state: state.listing(filter_), pure=True) for shard in self.shards]
        return [transaction for listing in await asyncio.gather(*responses) for transaction in listing]

    def counts(self) -> Mapping[str, int]:
        """Count the transactional ids of this node by state."""
        counts: Counter[str] = Counter()
        for shard in self.shards:
            if shard.state is not None:
                counts.update(shard.state.counts())
        return counts

    async def _run(self, transactional_id: str, operation: Callable[[TransactionShard], Outcome[T]]) -> T:
        return await self._runtime.run(placement_of(transactional_id), operation, pure=True)

    async def _run_after_ending(self, transactional_id: str, operation: Callable[[TransactionShard], Outcome[T]]) -> T:
        """Wait briefly until the previous transaction has ended: sooner than the client would retry."""
        try:
            return await self._run(transactional_id, operation)
        except ConcurrentTransactions as concurrent:
            try:
                async with asyncio.timeout(ENDING_WAIT_S):
                    await self._wait_ended(transactional_id)
            except (TimeoutError, CoordinatorUnavailable):
                raise concurrent from None
        return await self._run(transactional_id, operation)

    async def _wait_ended(self, transactional_id: str) -> None:
        await self._run(transactional_id, lambda shard: shard.wait_ended(transactional_id))

    def _make_shard(self, timers: Timers) -> TransactionShard:
        return TransactionShard(
            timers,
            limits=self._limits,
            clock=self._clock,
            take_producer_id=self._reserve.take,
            on_ending=lambda: self._on_ending(),
        )


def _check_id(name: str) -> None:
    if not name:
        raise InvalidRequest("a transactional id or a query cannot be empty")
    if len(name) > ID_CHARACTERS_MAX:
        raise InvalidRequest(f"a transactional id or a query has at most {ID_CHARACTERS_MAX} characters")
