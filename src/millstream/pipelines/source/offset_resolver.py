"""The partitions of a query's topics and their offsets, which the driver looks up before it plans."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Mapping, Sequence

from millstream.core.errors import InvalidSetting, UnknownTopic
from millstream.core.ids import NodeId, Offset, PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.pipelines.source.link import Link, link_to
from millstream.pipelines.source.options import (
    OFFSET_EARLIEST,
    OFFSET_LATEST,
    End,
    FromLake,
    NamedOffsets,
    Offsets,
    Position,
    ReadOptions,
    StartingTimestamp,
    Timestamps,
)
from millstream.protocol.wire.error_codes import error_from_code
from millstream.protocol.wire.fetch import READ_UNCOMMITTED, FetchedPartition, FetchLimits
from millstream.protocol.wire.list_offsets import ListedOffset

_logger = logging.getLogger(__name__)

Partitions = Mapping[str, Sequence[int]]

_NO_OFFSET_SINCE = -1


class OffsetResolver:
    def __init__(self, options: ReadOptions) -> None:
        self._options = options

    @property
    def link(self) -> Link:
        """The client of this process; never stored, since readers are sent between processes."""
        options = self._options
        return link_to(options.brokers, client_id=options.client_id, timeout_s=options.timeout_s, access=options.access)

    def partitions(self) -> dict[str, list[int]]:
        """Return the partitions to read now, by topic."""
        options = self._options
        if options.assign is not None:
            self._check_assigned(self._named(tuple(options.assign)), options.assign)
            return {topic: list(numbers) for topic, numbers in options.assign.items()}
        if options.pattern is None:
            return self._named(options.subscribe)
        pattern = re.compile(options.pattern)
        metadata = self.link.call(self.link.client.metadata(None))
        return {
            name: sorted(topic.partitions)
            for name, topic in sorted(metadata.topics.items())
            if not topic.is_internal and pattern.fullmatch(name)
        }

    def earliest(self, partitions: Partitions) -> dict[str, dict[int, int]]:
        return self._look_up({topic: dict.fromkeys(numbers, OFFSET_EARLIEST) for topic, numbers in partitions.items()})

    def latest(self, partitions: Partitions) -> dict[str, dict[int, int]]:
        """Return the end of each partition: the last stable offset, or the high watermark if configured."""
        return self._look_up({topic: dict.fromkeys(numbers, OFFSET_LATEST) for topic, numbers in partitions.items()})

    def resolve(self, position: Position, partitions: Partitions, option: str) -> dict[str, dict[int, int]]:
        if isinstance(position, FromLake):
            return self.earliest(partitions)
        if isinstance(position, End):
            return self._look_up({topic: dict.fromkeys(ns, position.offset) for topic, ns in partitions.items()})
        if isinstance(position, StartingTimestamp):
            times = {topic: dict.fromkeys(ns, position.timestamp_ms) for topic, ns in partitions.items()}
            return self._look_up(times, or_latest=position.or_latest)
        if isinstance(position, Timestamps):
            _check_names_all(position.times_ms, partitions, f"{option}OffsetsByTimestamp")
            return self._look_up(position.times_ms, or_latest=position.or_latest)
        return self._resolve_named(position, partitions, f"{option}Offsets")

    def wait_for_more(self, ends: Offsets, timeout_s: float) -> bool:
        """Wait briefly until some partition may have grown beyond an offset; return False if none has."""
        return self.link.call(self._wait(ends, timeout_s))

    # -- internals ------------------------------------------------------------------------------------------------

    def _named(self, names: Sequence[str]) -> dict[str, list[int]]:
        metadata = self.link.call(self.link.client.metadata(names))
        for name in names:
            if name in metadata.errors:
                error = error_from_code(metadata.errors[name], None, about=f"topic {name!r}")
                if isinstance(error, UnknownTopic):
                    hint = f"create it with: millstream topic create {name}"
                    raise UnknownTopic(f"topic {name!r} does not exist at {self._options.brokers}; {hint}")
                raise error
        return {name: sorted(metadata.topics[name].partitions) for name in names}

    def _check_assigned(self, partitions: Partitions, assigned: Partitions) -> None:
        for topic, numbers in assigned.items():
            missing = sorted(set(numbers) - set(partitions[topic]))
            if missing:
                raise UnknownTopic(
                    f"topic {topic!r} has {len(partitions[topic])} partitions, but no partition {missing[0]}"
                )

    def _resolve_named(self, position: NamedOffsets, partitions: Partitions, option: str) -> dict[str, dict[int, int]]:
        _check_names_all(position.offsets, partitions, option)
        ends = {
            topic: {number: offset for number, offset in offsets.items() if offset < 0}
            for topic, offsets in position.offsets.items()
        }
        looked_up = self._look_up({topic: offsets for topic, offsets in ends.items() if offsets})
        by_topic = {topic: {**offsets, **looked_up.get(topic, {})} for topic, offsets in position.offsets.items()}
        return self._within_log(by_topic, partitions, option)

    def _within_log(self, requested: Offsets, partitions: Partitions, option: str) -> dict[str, dict[int, int]]:
        """Refuse offsets beyond the end of a log; without failOnDataLoss, lower them to it."""
        latest = {topic: dict.fromkeys(numbers, OFFSET_LATEST) for topic, numbers in partitions.items()}
        # An open transaction is part of the log, and a query may start after it.
        ends = self._look_up(latest, isolation=READ_UNCOMMITTED)
        beyond = [
            f"{topic}-{number} ends at {ends[topic][number]}, not {offset}"
            for topic, offsets in requested.items()
            for number, offset in offsets.items()
            if offset > ends[topic][number]
        ]
        if beyond:
            more = f" and {len(beyond) - 5} more partitions" if len(beyond) > 5 else ""
            problem = f"option {option} names offsets beyond the end of the log: {', '.join(beyond[:5])}{more}"
            if self._options.fail_on_data_loss:
                raise InvalidSetting(
                    f"{problem}. Name offsets that exist, or -1 for the end; "
                    "to read what is available, set failOnDataLoss to false"
                )
            _logger.warning("%s; failOnDataLoss is false, so the end of the log is used there", problem)
        return {
            topic: {number: min(offset, ends[topic][number]) for number, offset in offsets.items()}
            for topic, offsets in requested.items()
        }

    def _look_up(
        self, times_ms: Offsets, *, or_latest: bool = True, isolation: int | None = None
    ) -> dict[str, dict[int, int]]:
        return self.link.call(self._look_up_all(times_ms, or_latest, isolation))

    async def _look_up_all(
        self, times_ms: Offsets, or_latest: bool, isolation: int | None
    ) -> dict[str, dict[int, int]]:
        results = await asyncio.gather(*(self._list(topic, times, isolation) for topic, times in times_ms.items()))
        offsets = {
            topic: {n: listed_offset.offset for n, listed_offset in listed.items()}
            for topic, listed in zip(times_ms, results, strict=True)
        }
        late = {
            topic: [number for number, offset in listed.items() if offset == _NO_OFFSET_SINCE]
            for topic, listed in offsets.items()
        }
        for topic, numbers in late.items():
            if not numbers:
                continue
            ends = await self._list(topic, dict.fromkeys(numbers, OFFSET_LATEST))
            if not or_latest:
                await self._check_empty(topic, ends, times_ms[topic])
            offsets[topic] |= {number: listed_offset.offset for number, listed_offset in ends.items()}
        return {topic: {n: int(offset) for n, offset in listed.items()} for topic, listed in offsets.items()}

    async def _check_empty(self, topic: str, ends: Mapping[int, ListedOffset], times_ms: Mapping[int, int]) -> None:
        """Raise `InvalidSetting` for a log that ends before a time; instead of an empty log, a table may have it."""
        firsts = await self._list(topic, dict.fromkeys(ends, OFFSET_EARLIEST)) if self._options.reaches_lake else {}
        for number, end in ends.items():
            if number not in firsts or firsts[number].offset < end.offset:
                raise no_messages_since_error(topic, number, times_ms[number])

    async def _list(
        self, topic: str, times_ms: Mapping[int, int], isolation: int | None = None
    ) -> dict[int, ListedOffset]:
        level = self._options.isolation if isolation is None else isolation
        return await self.link.client.list_offsets(topic, times_ms, isolation=level)

    async def _wait(self, ends: Offsets, timeout_s: float) -> bool:
        client = self.link.client
        by_leader: dict[NodeId, dict[TopicPartition, Offset]] = {}
        for topic, offsets in ends.items():
            for number, offset in offsets.items():
                leader = await client.leader_of(topic, number)
                where = TopicPartition(topic, PartitionIndex(number))
                by_leader.setdefault(leader, {})[where] = Offset(offset)
        limits = FetchLimits(max_bytes=1, max_wait_ms=int(timeout_s * 1000), isolation=self._options.isolation)
        waits = {
            asyncio.create_task(client.fetch_many(positions, limits)): len(positions)
            for positions in by_leader.values()
        }
        if not waits:
            await asyncio.sleep(timeout_s)
            return True
        done, others = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for other in others:
            other.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        return any(_may_have_more(future, waits[future]) for future in done)


def _may_have_more(fetched: asyncio.Task[dict[TopicPartition, FetchedPartition]], partitions: int) -> bool:
    """Whether a fetch returned records, or not of all partitions; an error shows when their ends are looked up."""
    if fetched.exception() is not None:
        return True
    responses = fetched.result()
    return len(responses) < partitions or any(response.records for response in responses.values())


def no_messages_since_error(topic: str, number: int, time_ms: int) -> InvalidSetting:
    """Describe a partition without messages since a time."""
    return InvalidSetting(
        f"{topic}-{number} has no record of {time_ms} ms or later; use an earlier time, or set "
        "startingOffsetsByTimestampStrategy to latest to start at the end there"
    )


def _check_names_all(offsets: Offsets, partitions: Partitions, option: str) -> None:
    """Apply Spark's rule that offsets name every partition that is read, and no other."""
    queried = {(topic, number) for topic, numbers in partitions.items() for number in numbers}
    named = {(topic, number) for topic, numbers in offsets.items() for number in numbers}
    for what, difference in (
        ("does not name", queried - named),
        ("names, but the query does not read,", named - queried),
    ):
        if difference:
            listed = ", ".join(f"{topic}-{number}" for topic, number in sorted(difference)[:5])
            raise InvalidSetting(f"option {option} {what} {listed}")
