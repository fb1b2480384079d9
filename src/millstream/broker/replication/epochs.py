"""Where two histories of a partition part, told by the epochs in which their records were written.

Two logs that hold a record of the same epoch at the same offset are the same up to there, since one leader wrote it
and its followers copied everything before it. So a follower names the epoch of its last record, and the leader finds
the last place where both can agree.
"""

from __future__ import annotations

from millstream.broker.log.log import Log
from millstream.core.ids import NO_EPOCH, Epoch, EpochEnd, Offset


def diverging_end(log: Log, offset: Offset, last_epoch: int) -> EpochEnd | None:
    """What a follower must be told whose log ends at an offset with a record of an epoch; None if it may go on there.

    It is the last epoch of the leader's log that is not later than the follower's, and where it ends.
    """
    latest = log.latest_epoch
    if last_epoch < 0 or latest == NO_EPOCH:
        # One of the two holds nothing, so there is nothing to compare but where the leader's log ends.
        return None if offset <= log.end_offset else EpochEnd(Epoch(last_epoch), log.end_offset)
    if last_epoch > latest:
        return EpochEnd(latest, log.end_offset)
    epoch, end_offset = log.end_of_epoch(last_epoch)
    if epoch < last_epoch or end_offset < offset:
        return EpochEnd(epoch, end_offset)
    return None


def truncation_point(log: Log, diverging: EpochEnd) -> Offset:
    """Where a follower cuts its log so that what is left may agree with the leader's; it may have to ask again."""
    known, known_end = log.end_of_epoch(diverging.epoch)
    if known == NO_EPOCH:
        return min(diverging.end_offset, log.end_offset)
    if known < diverging.epoch:
        return min(known_end, log.end_offset)
    return min(diverging.end_offset, known_end, log.end_offset)
