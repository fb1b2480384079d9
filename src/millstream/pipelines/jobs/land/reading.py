"""Reading at the edge of retention: what was deleted before a task came to it is skipped, and counted."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Final

import pyarrow as pa

from millstream.core.errors import LostData
from millstream.pipelines.jobs.land.plan import Stretch
from millstream.pipelines.source.link import link_to
from millstream.pipelines.source.options import ReadOptions
from millstream.pipelines.source.position import OFFSET_EARLIEST

_logger = logging.getLogger(__name__)

Records = Callable[[Stretch], Iterator[pa.RecordBatch]]
"""The messages of a stretch, up to where some are gone: then it raises `LostData`."""
LogStart = Callable[[str, int], int]
"""The first offset that a partition still has."""


class Reading:
    """The messages of stretches, and how many offsets of them were gone.

    Only offsets before the start of the log count: nothing is known of them, as when a plan begins behind them.
    Offsets in between that no message has, of transactions that were aborted and of control records, do not.
    """

    def __init__(self, records: Records, log_start: LogStart) -> None:
        self._records: Final = records
        self._log_start: Final = log_start
        self.lost = 0

    def batches(self, one: Stretch) -> Iterator[pa.RecordBatch]:
        """What there is of a stretch; raise `LostData` if offsets are missing that retention has not deleted."""
        rest = one
        while len(rest):
            try:
                yield from self._records(rest)
                return
            except LostData as error:
                ((_topic, _partition, first, _end),) = error.lost
                start = self._log_start(one.topic, one.partition)
                if start <= first:
                    # The log ends before what was promised of it: it is another one, or lost its end.
                    raise
                end = min(start, one.end)
                _logger.warning("offsets %d to %d of %s-%d are gone", first, end - 1, one.topic, one.partition)
                self.lost += end - first
                rest = Stretch(one.topic, one.partition, end, one.end)


def log_start(options: ReadOptions) -> LogStart:
    """Asks the leader, by the connection that reads."""

    def ask(topic: str, partition: int) -> int:
        timeout_s = options.timeout_s
        link = link_to(options.brokers, client_id=options.client_id, timeout_s=timeout_s, patience_s=timeout_s)
        listed = link.call(link.client.list_offsets(topic, {partition: OFFSET_EARLIEST}))
        return int(listed[partition].offset)

    return ask
