"""A shard of groups on a log in memory, driven step by step: for random histories."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from millstream.broker.coordination.shard import Shard
from millstream.broker.coordination.state_machine import Timers
from millstream.broker.groups.shard import GroupShard
from millstream.core.errors import (
    CoordinatorUnavailable,
    GroupRejected,
    MillstreamError,
    StorageFailure,
    UnknownGroup,
    UnknownMember,
)
from millstream_testing.clock import ManualClock
from millstream_testing.state_log import MemoryPartition

T = TypeVar("T")

EXPECTED: tuple[type[MillstreamError], ...] = (GroupRejected, CoordinatorUnavailable, UnknownMember, UnknownGroup)


class ShardHistory(RuleBasedStateMachine):
    """The loop, the clock and the log of a history; the test decides when an append is acknowledged."""

    expected = EXPECTED
    """The errors that a client may get."""
    rewrite_records_min: int
    clock_steps: int
    """In how many steps the clock advances, with due timers after each."""
    shard: Shard[GroupShard]

    def __init__(self) -> None:
        super().__init__()
        logging.disable(logging.CRITICAL)
        self.loop = asyncio.new_event_loop()
        # The loop does not raise exceptions of callbacks, so they are kept for the next check.
        self.defects: list[dict[str, Any]] = []
        self.loop.set_exception_handler(lambda _, context: self.defects.append(context))
        self.clock = ManualClock()
        self.partition = MemoryPartition(acknowledges=False)
        self.open_requests: set[asyncio.Future[Any]] = set()

    @rule(batches=st.sampled_from([1, 2, 3, None]))
    def acknowledge(self, batches: int | None) -> None:
        self.partition.acknowledge(batches)
        self._settle()

    @rule()
    def a_sync_fails(self) -> None:
        self.loop.call_soon(self.partition.fail, StorageFailure("the disk failed"))
        self._run(asyncio.sleep(0))
        self._reloaded()

    @invariant()
    def nothing_failed_on_the_side(self) -> None:
        for defect in self.defects:
            raise defect.get("exception") or AssertionError(defect["message"])

    def _new_state(self, timers: Timers) -> GroupShard:
        raise NotImplementedError

    def _check_what_survived(self) -> None:
        raise NotImplementedError

    def _ask(
        self,
        operation: Callable[[GroupShard], Any],
        on_response: Callable[[Any], None] = lambda _: None,
        on_error: Callable[[MillstreamError], None] = lambda _: None,
        on_absence: Callable[[], None] = lambda: None,
        *,
        pure: bool = False,
    ) -> None:
        shard = self.shard

        async def submit() -> None:
            try:
                request = shard.submit(operation, pure=pure)
            except CoordinatorUnavailable:
                on_absence()
                return
            self.open_requests.add(request)
            request.add_done_callback(done)

        def done(request: asyncio.Future[Any]) -> None:
            self.open_requests.discard(request)
            if request.cancelled():
                return
            error = request.exception()
            if shard is not self.shard:
                # A response of a broker that has crashed since never arrives.
                return
            if error is None:
                on_response(request.result())
            else:
                assert isinstance(error, self.expected), repr(error)
                on_error(error)

        self._run(submit())
        self._settle()

    def _open(self) -> Shard[GroupShard]:
        return self._run(self._opened())

    async def _opened(self) -> Shard[GroupShard]:
        shard = Shard(
            "groups-0",
            self.partition,
            self._new_state,
            clock=self.clock,
            load_slot=asyncio.Semaphore(1),
            retry_first_s=0.0,
            rewrite_records_min=self.rewrite_records_min,
        )
        shard.open()
        await shard.wait_loaded()
        return shard

    async def _abandon(self, shard: Shard[GroupShard]) -> None:
        abandoned = shard.partition
        assert isinstance(abandoned, MemoryPartition)
        abandoned.acknowledge()
        await shard.close()

    def _pass_ms(self, milliseconds: int) -> None:
        async def fire() -> None:
            if self.shard.state is not None:
                self.shard.fire_timers()

        for _ in range(self.clock_steps):
            self.clock.advance_ms(milliseconds // self.clock_steps)
            self._run(fire())
        self.clock.advance_ms(milliseconds % self.clock_steps)
        self._run(fire())
        self._settle()

    def _reloaded(self) -> None:
        async def reload() -> None:
            await asyncio.sleep(0)
            await self.shard.wait_loaded()

        self._run(reload())
        self._check_what_survived()

    def _settle(self) -> None:
        async def settle() -> None:
            for _ in range(4):
                await asyncio.sleep(0)

        self._run(settle())

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run_until_complete(work)
