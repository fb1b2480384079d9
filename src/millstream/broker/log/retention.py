"""Deletion at the front of a log: retention by age and size, and `DeleteRecords`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from millstream.broker.log.segment import Segment
from millstream.core.errors import OffsetOutOfRange, StorageFailure
from millstream.core.topic import TopicPartition

if TYPE_CHECKING:
    from millstream.broker.log.log import Log

_logger = logging.getLogger(__name__)

DeliveryFloor = Callable[[TopicPartition], int | None]
LandedFloor = Callable[[TopicPartition], int]


def _retain_everything(_partition: TopicPartition) -> int:
    """Retain everything while no source of the floor is known."""
    return 0


@dataclass(slots=True)
class RetentionFloors:
    """The offsets from which partitions are still needed, for topics whose retention depends on them."""

    delivery: DeliveryFloor = _retain_everything
    """The first offset that a subscription has not finished; None if no subscription has the partition."""
    landed: LandedFloor = _retain_everything
    """The first offset that is not yet in the tables of all pipelines that land the topic."""


def delete_expired(log: Log, now_ms: int) -> int:
    """Delete segments by age and size as the topic's settings say; return the bytes freed."""
    if log.closed or log.health.broken or not log.settings.deletes or not log.segments:
        return 0
    _roll_expired(log, now_ms)
    excess = log.size_bytes - log.settings.retention_bytes if log.settings.retention_bytes >= 0 else 0
    # Records that are not acknowledged may still be truncated; a start beyond them would then be beyond the end.
    limit = min(log.synced_offset, log.acknowledged_offset(default=log.synced_offset))
    needed_from = _needed_from(log)
    freed = count = 0
    for segment in log.segments[:-1]:
        too_old = _is_expired(log, segment, now_ms) and not _is_held(log, segment, needed_from, now_ms)
        if segment.next_offset > limit or not (too_old or freed + segment.size <= excess):
            break
        freed += segment.size
        count += 1
    if count:
        _delete_segments(log, count)
        _logger.info(
            "old segments were deleted",
            extra={"partition": str(log.partition), "segments": count, "bytes": freed, "start": log.start_offset},
        )
    return freed


def held_bytes(log: Log, now_ms: int) -> int:
    """Return the bytes past their retention that are kept because they are not delivered or landed yet."""
    settings = log.settings
    waits = settings.retention_until_delivered or settings.retention_until_landed
    if not waits or not settings.deletes or log.closed or log.health.broken:
        return 0
    needed_from = _needed_from(log)
    return sum(
        segment.size
        for segment in log.segments
        if _is_expired(log, segment, now_ms) and _is_held(log, segment, needed_from, now_ms)
    )


def awaits_landing(log: Log, segment: Segment, now_ms: int) -> bool:
    """Whether nothing may be removed from a segment until it is landed."""
    if not log.settings.retention_until_landed:
        return False
    return _is_held(log, segment, log.maintenance.floors.landed(log.partition), now_ms)


def _needed_from(log: Log) -> int:
    """Return the offset from which on age alone does not delete."""
    needed: int = log.end_offset
    if log.settings.retention_until_delivered:
        undelivered = log.maintenance.floors.delivery(log.partition)
        needed = needed if undelivered is None else min(needed, undelivered)
    if log.settings.retention_until_landed:
        needed = min(needed, log.maintenance.floors.landed(log.partition))
    return needed


def _is_held(log: Log, segment: Segment, needed_from: int, now_ms: int) -> bool:
    """Whether a segment is still needed, and has not been kept for longer than the topic allows."""
    return segment.next_offset > needed_from and _age_ms(segment, now_ms) <= log.settings.retention_until_max_ms


def _is_expired(log: Log, segment: Segment, now_ms: int) -> bool:
    return log.settings.retention_ms >= 0 and _age_ms(segment, now_ms) > log.settings.retention_ms


def _age_ms(segment: Segment, now_ms: int) -> int:
    newest = segment.max_timestamp_ms if segment.max_timestamp_ms >= 0 else segment.last_append_ms
    return now_ms - newest


def _roll_expired(log: Log, now_ms: int) -> None:
    """Close the active segment if all of it has expired, so that it can be deleted."""
    active = log.segments.active
    if active is None or not active.size or not _is_expired(log, active, now_ms):
        return
    try:
        log.roll()
    except StorageFailure:
        # On a full disk the older segments can still be deleted, which makes room for the next attempt.
        return


def _delete_segments(log: Log, count: int) -> None:
    dropped, kept = log.segments[:count], log.segments[count:]
    log.replace_segments(kept, dropped)
    log.epochs.cut_before(kept[0].base_offset)
    log.advance_start(kept[0].base_offset)
    log.maintenance.checkpoint_soon(log)


def delete_before(log: Log, offset: int) -> None:
    """Advance the log start to an offset, for DeleteRecords."""
    if not log.start_offset <= offset <= log.end_offset:
        raise OffsetOutOfRange(
            f"{log.partition} holds offsets {log.start_offset} to {log.end_offset}, not {offset}",
            start=log.start_offset,
            end=log.end_offset,
        )
    if log.segments and offset == log.end_offset and log.segments[-1].size:
        log.roll()
    log.advance_start(offset)
    count = 0
    while count + 1 < len(log.segments) and log.segments[count + 1].base_offset <= offset:
        count += 1
    if count:
        _delete_segments(log, count)
    log.maintenance.checkpoint_soon(log)
