"""Writing a state anew at the end of its log, so that the old beginning can go and loading stays short.

Most records of a state log are overtaken by later ones of the same key. When they are many, every live key is
appended once more, in small batches between other operations; what was before the first of these batches is then
known to be repeated or gone, and is dropped. A crash in between only leaves the log longer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Hashable, Sequence
from itertools import islice
from typing import Protocol

from millstream.broker.coordination.state import StateMachine, StateRecord
from millstream.core.errors import MillstreamError
from millstream.core.ids import Offset

_logger = logging.getLogger(__name__)

RECORDS_MIN = 20_000
"""A log with fewer records is not worth the work."""

OVERTAKEN_RATIO = 3
"""A log is written anew when it has this many records for each live key."""

BATCH_RECORDS = 200


class Rewritable(Protocol):
    """What rewriting needs of a shard."""

    name: str

    @property
    def state(self) -> StateMachine | None:
        """The state while it is loaded."""

    @property
    def written(self) -> Offset:
        """The end of what was appended."""

    def append(self, records: Sequence[StateRecord]) -> Offset:
        """Append records as one batch; return the offset after it."""

    async def acknowledged_up_to(self, offset: Offset) -> None:
        """Wait until the log has acknowledged everything below `offset`."""

    def delete_before(self, offset: Offset) -> None:
        """Drop the beginning of the log."""


class Rewrite:
    """Counts the records of one shard's log, and writes the state anew when most of them are overtaken."""

    def __init__(self, shard: Rewritable, *, records_min: int = RECORDS_MIN) -> None:
        self._shard = shard
        self._records_min = records_min
        self._records = 0
        self._due_at = records_min
        self.task: asyncio.Task[None] | None = None

    def begin(self, records: int) -> None:
        """Start counting for a log that was just read back."""
        self._records = records
        self._due_at = self._records_min

    def count(self, records: int) -> None:
        """Note an append; start rewriting in the background when there is reason to."""
        self._records += records
        if self._records >= self._due_at and self.task is None:
            self.task = asyncio.get_running_loop().create_task(self._run(), name=f"rewrite {self._shard.name}")
            self.task.add_done_callback(self._done)

    async def _run(self) -> None:
        shard = self._shard
        state = shard.state
        if state is None:
            return
        keys = state.durable_keys()
        self._due_at = max(self._records_min, len(keys) * OVERTAKEN_RATIO)
        if self._records < self._due_at:
            return
        first = shard.written
        self._records = 0
        if await self._append_all(keys, state):
            shard.delete_before(first)
            _logger.info("state written anew", extra={"shard": shard.name, "keys": len(keys), "from_offset": first})

    async def _append_all(self, keys: list[Hashable], state: StateMachine) -> bool:
        shard = self._shard
        remaining = iter(keys)
        while names := list(islice(remaining, BATCH_RECORDS)):
            if shard.state is not state:
                return False
            found = [one for name in names if (one := state.durable_record(name)) is not None]
            await self._append([one for one in found if isinstance(one, StateRecord)])
            for late in [one for one in found if not isinstance(one, StateRecord)]:
                await late.make()
                if shard.state is not state:
                    return False
                await self._append(late.records())
        return shard.state is state

    async def _append(self, records: Sequence[StateRecord]) -> None:
        if records:
            self._records += len(records)
            await self._shard.acknowledged_up_to(self._shard.append(records))

    def _done(self, task: asyncio.Task[None]) -> None:
        self.task = None
        error = None if task.cancelled() else task.exception()
        if error is None:
            return
        self._due_at = self._records + self._records_min
        _logger.warning(
            "the state could not be written anew; the log stays as it is",
            exc_info=None if isinstance(error, MillstreamError) else error,
            extra={"shard": self._shard.name, "error": str(error)},
        )
