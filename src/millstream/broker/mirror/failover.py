"""The changes of direction of a mirror: failover, reverse and switch."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Sequence
from typing import Final

from millstream.broker.mirror.service import MirrorService, merged_offsets
from millstream.broker.mirror.source import Source
from millstream.core.errors import InvalidMirror, MillstreamError
from millstream.core.ids import PartitionIndex
from millstream.core.mirror import Mirror
from millstream.core.regex import compile_regex
from millstream.core.tasks import gather_or_cancel
from millstream.core.topic import Topic, TopicPartition
from millstream.protocol.private.mirror_messages import CutPartition, FailoverRequest, FailoverResponse

_logger = logging.getLogger(__name__)

SOURCE_S: Final = 2.0
"""How long a failover waits for the source to say what is missing."""
AT_ONCE: Final = 32


async def fail_over(service: MirrorService, request: FailoverRequest) -> FailoverResponse:
    """Make copies writable here; nothing is copied to them any more. May be repeated after a failure."""
    started = service.clock.monotonic()
    mirror = await service.mirrors.find(request.name)
    topics = chosen_topics(service, mirror, request.topics)
    if request.topics is None:
        # No further topics are to appear meanwhile.
        mirror = await service.mirrors.want(mirror.name, is_wanted=False)
    ends, source_error = await _source_ends(mirror, topics)
    cuts = await cut_topics(service, mirror, topics)
    await make_writable(service, topics)
    waited_ms = int((service.clock.monotonic() - started) * 1000)
    _logger.info("copies are writable", extra={"mirror": mirror.name, "topics": len(topics), "took_ms": waited_ms})
    partitions = [
        CutPartition(
            topic=cut.topic,
            partition=cut.partition,
            offset=cut.offset,
            epoch=cut.epoch,
            dropped=cut.dropped,
            aborted=cut.aborted,
            source_end=ends.get(TopicPartition(cut.topic, PartitionIndex(cut.partition))),
        )
        for cut in cuts
    ]
    return FailoverResponse(partitions=partitions, source_error=source_error, waited_ms=waited_ms)


def chosen_topics(service: MirrorService, mirror: Mirror, patterns: Sequence[str] | None) -> list[Topic]:
    """Return the copies of a mirror whose names match; raise `InvalidMirror` if there are none."""
    copied = service.copied_topics(mirror.name)
    if patterns is not None:
        compiled = [compile_regex(pattern) for pattern in patterns]
        copied = [topic for topic in copied if any(one.fullmatch(topic.name) for one in compiled)]
    if not copied:
        of = "" if patterns is None else f" that match {', '.join(patterns)}"
        raise InvalidMirror(f"mirror {mirror.name!r} has no copies{of}; `millstream mirror describe` shows them")
    return copied


async def cut_topics(service: MirrorService, mirror: Mirror, topics: Sequence[Topic]) -> list[CutPartition]:
    """Cut every partition of some copies, and record where."""
    turn = asyncio.Semaphore(AT_ONCE)

    async def cut(where: TopicPartition) -> CutPartition:
        async with turn:
            return await service.cut_everywhere(mirror.name, where)

    places = [
        TopicPartition(topic.name, PartitionIndex(index)) for topic in topics for index in range(topic.partitions)
    ]
    cuts = await gather_or_cancel(cut(where) for where in places)
    found: dict[str, dict[int, int]] = {}
    for one in cuts:
        found.setdefault(one.topic, {})[one.partition] = one.offset
    await service.mirrors.change(
        mirror.name, lambda now: dataclasses.replace(now, cuts=merged_offsets(now.cuts, found))
    )
    return cuts


async def make_writable(service: MirrorService, topics: Sequence[Topic]) -> None:
    """Let clients write topics that are cut."""
    for topic in topics:
        await service.topics.set_mirror(topic.name, "")
        service.release(topic)


async def _source_ends(mirror: Mirror, topics: Sequence[Topic]) -> tuple[dict[TopicPartition, int], str]:
    """Return the source's high watermarks by the copies' names, or why it could not be asked in time."""
    originals = {
        TopicPartition(mirror.source_name(topic), PartitionIndex(index)): TopicPartition(
            topic.name, PartitionIndex(index)
        )
        for topic in topics
        for index in range(topic.partitions)
    }
    try:
        async with asyncio.timeout(SOURCE_S), Source(mirror.settings, name=mirror.name) as source:
            ends = await source.ends(originals)
    except TimeoutError:
        return {}, f"the source did not answer within {SOURCE_S:g} s"
    except MillstreamError as error:
        return {}, str(error)
    return {originals[where]: end for where, end in ends.items()}, ""
