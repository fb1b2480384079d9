"""What a task of a route does: fetch, ask the rules, write. The JVM never sees a payload."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from millstream.pipelines.jobs.batch_loop import CLIENT_ID, as_row
from millstream.pipelines.jobs.route.rule_set import RuleSet, Way, rule_set
from millstream.pipelines.source.attempt import write_part
from millstream.pipelines.source.options import BROKERS, WriteOptions, read_options
from millstream.pipelines.source.parts import Batch
from millstream.pipelines.source.ranges import Range
from millstream.pipelines.source.rows import read_columns
from millstream.protocol.filter.batch import ColumnBatch
from millstream.protocol.records.arrow import to_arrow
from millstream.protocol.records.columns import Columns
from millstream.protocol.records.decoder import FIELDS

NAMES: Final = ("key", "value", "timestamp", "headers")
"""What a message keeps on its way. Its partition is chosen anew, by its key."""

_TOPIC: Final = pa.field("topic", pa.string())


def routing(
    ranges: tuple[Range, ...], ways: Mapping[str, tuple[Way, ...]], options: WriteOptions, batch: Batch
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """A function for the tasks of one batch, which are given the numbers of ranges."""

    def route(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        mine = [ranges[number] for given in batches for number in given.column(0).to_pylist()]
        yield from as_row(write_part(options, batch, routed(mine, ways, options.brokers)))

    return route


def routed(ranges: Sequence[Range], ways: Mapping[str, tuple[Way, ...]], brokers: str) -> Iterator[pa.RecordBatch]:
    """The messages of ranges with the topics that they go to."""
    for one in ranges:
        rules = rule_set(ways[one.topic])
        options = read_options({BROKERS: brokers, "subscribe": one.topic, "kafka.client.id": CLIENT_ID})
        for columns in read_columns(one, options, FIELDS.intersection(NAMES)):
            rows = _sent(columns, one, rules)
            if rows is not None:
                yield rows


def _sent(columns: Columns, one: Range, rules: RuleSet) -> pa.RecordBatch | None:
    found = rules.matches(ColumnBatch(columns, topic=one.topic, partition=one.partition, uses=rules.uses))
    if not found:
        return None
    names = list(found)
    taken = np.concatenate([found[name] for name in names])
    which = np.repeat(np.arange(len(names), dtype=np.int32), [found[name].size for name in names])
    topics = pa.array(names, pa.string()).take(pa.array(which))
    rows = to_arrow(columns, topic=one.topic, partition=one.partition, names=NAMES).take(pa.array(taken))
    return rows.append_column(_TOPIC, topics)
