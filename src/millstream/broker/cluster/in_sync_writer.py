"""Changes of in-sync sets on their way into the coordination store: many in one step, if nothing came in between.

A change is asked for with the revision of the state that it follows, and with the registrations of those who join. If
any of a step's conditions fails, none of it is done, and each is then asked for by itself. When the store gives no
answer nobody knows what became of a change, and to read that the old state still stands would prove nothing, since the
change may be on its way. So it is asked for again until something is certain; the partition counts both sets meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import islice
from typing import NamedTuple

from millstream.broker.cluster import keys
from millstream.broker.cluster.store import CHANGES_MAX, EXPECTS_MAX, CoordinationStore, Expect, Put
from millstream.broker.replication.in_sync import InSyncChange
from millstream.broker.replication.partition import Partition
from millstream.core.backoff import Backoff
from millstream.core.errors import CorruptState, StoreRefused, StoreUnavailable
from millstream.core.partition_state import PartitionState, Versioned

_logger = logging.getLogger(__name__)


class _Asked(NamedTuple):
    partition: Partition
    change: InSyncChange

    @property
    def key(self) -> str:
        return keys.partition_key((self.partition.topic.topic_id, self.partition.index))

    @property
    def put(self) -> Put:
        return Put(self.key, self.change.state.to_json())

    @property
    def expects(self) -> set[Expect]:
        joining = {
            Expect(keys.node_key(node), revision)
            for node, revision in self.change.registrations.items()
            if revision >= 0
        }
        return {Expect(self.key, self.change.revision), *joining}


class InSyncWriter:
    """Asks the store for the changes that partitions want."""

    def __init__(
        self, store: CoordinationStore, wanted: Callable[[Partition], InSyncChange | None], backoff: Backoff
    ) -> None:
        self._store = store
        self._wanted = wanted
        self._backoff = backoff
        self._queue: dict[Partition, None] = {}
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        """How many partitions wait to be looked at."""
        return len(self._queue)

    def look_at(self, partition: Partition) -> None:
        """See soon whether a partition wants a change."""
        self._queue[partition] = None
        self._wake.set()

    async def run(self) -> None:
        """Ask for changes, for ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                await self._write(self._take())

    def _take(self) -> list[_Asked]:
        """Begin as many changes as one step takes."""
        asked: list[_Asked] = []
        expects: set[Expect] = set()
        for partition in list(islice(self._queue, CHANGES_MAX)):
            del self._queue[partition]
            change = self._wanted(partition)
            if change is None:
                continue
            one = _Asked(partition, change)
            if len(expects | one.expects) > EXPECTS_MAX:
                self._queue[partition] = None
                break
            if partition.change_began(change):
                asked.append(one)
                expects |= one.expects
        return asked

    async def _write(self, asked: list[_Asked]) -> None:
        try:
            if len(asked) > 1 and await self._change(asked):
                return
        except StoreRefused as error:
            await self._give_up(asked, error)
            return
        except StoreUnavailable as error:
            _logger.warning("the store gave no answer about in-sync sets", extra={"error": str(error)})
            await self._backoff.pause()
        for one in asked:
            await self._write_alone(one)

    async def _change(self, asked: list[_Asked]) -> bool:
        expects = {expect for one in asked for expect in one.expects}
        revision = await self._store.change([one.put for one in asked], sorted(expects))
        if revision is None:
            return False
        self._backoff.succeeded()
        for partition, change in asked:
            _logger.info(
                "an in-sync set changed",
                extra={"partition": str(partition.log.partition), "in_sync": str(list(change.state.in_sync))},
            )
            partition.change_ended(Versioned(change.state, revision))
            # What has happened meanwhile may call for another change.
            self.look_at(partition)
        return True

    async def _write_alone(self, one: _Asked) -> None:
        """Ask for one change until it is certain what became of it, or the view has shown it."""
        while one.partition.is_pending(one.change):
            try:
                if not await self._change([one]):
                    await self._read_back(one)
                return
            except StoreRefused as error:
                await self._give_up([one], error)
                return
            except CorruptState as error:
                # Both sets count until the state can be read again, which the view will tell.
                _logger.error("a state cannot be read back", extra={"key": one.key, "error": str(error)})
                return
            except StoreUnavailable as error:
                _logger.warning(
                    "it is not known whether an in-sync set changed; asking again",
                    extra={"partition": str(one.partition.log.partition), "error": str(error)},
                )
                await self._backoff.pause()

    async def _read_back(self, one: _Asked) -> None:
        """A condition failed: somebody else has changed the state, or one who was to join is another process now.

        Either way the change, and any earlier attempt of it that is still under way, never comes true.
        """
        entry = (await self._store.read(one.key)).entries.get(one.key)
        if entry is not None and entry.revision > one.change.revision:
            one.partition.change_ended(Versioned(PartitionState.from_json(entry.value), entry.revision))
        else:
            one.partition.change_refused(one.change)
            await self._backoff.pause()
        self.look_at(one.partition)

    async def _give_up(self, asked: list[_Asked], error: StoreRefused) -> None:
        _logger.warning("the store refused a change of in-sync sets", extra={"error": str(error)})
        for partition, change in asked:
            partition.change_refused(change)
            self.look_at(partition)
        await self._backoff.pause()
