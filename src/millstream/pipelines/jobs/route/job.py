"""route: copies messages to topics by rules, exactly once.

All rules of a topic are evaluated in one pass over its messages, in the tasks that fetch them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np
import pyarrow as pa

from millstream.core.errors import InvalidSetting, UnknownTopic
from millstream.core.pipeline import Pipeline, RouteSettings
from millstream.core.subscription import FILTER
from millstream.pipelines.jobs.batch_loop import (
    PART_SCHEMA,
    ROWS_HERE_MAX,
    BatchLoop,
    Plan,
    as_row,
    parts_of,
    reading_options,
    small_batch_slot,
)
from millstream.pipelines.jobs.job import JobContext, Step
from millstream.pipelines.jobs.route.rule_set import RoutingRule, RuleSet, rule_set
from millstream.pipelines.runtime.fault import MarkedTask
from millstream.pipelines.source.access import NO_ACCESS, Access
from millstream.pipelines.source.batch_commit import Batch, Part
from millstream.pipelines.source.options import WriteOptions
from millstream.pipelines.source.ranges import Range
from millstream.pipelines.source.row_producer import write_part
from millstream.pipelines.source.rows import read_columns
from millstream.pipelines.source.target_topic import make_topics
from millstream.protocol.filter.batch import ColumnBatch
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.records.arrow import to_arrow
from millstream.protocol.records.columns import Columns
from millstream.protocol.records.decoder import FIELDS

_logger = logging.getLogger(__name__)

NAMES: Final = ("key", "value", "timestamp", "headers")
"""The columns that a routed message keeps. Its key selects a new partition."""

_TOPIC: Final = pa.field("topic", pa.string())


def routing(
    ranges: tuple[Range, ...],
    routing_rules: Mapping[str, tuple[RoutingRule, ...]],
    options: WriteOptions,
    batch: Batch,
    access: Access = NO_ACCESS,
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function of a batch's tasks, which are given numbers of ranges."""

    def route(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        mine = [ranges[number] for given in batches for number in given.column(0).to_pylist()]
        yield from as_row(write_part(options, batch, routed(mine, routing_rules, options.brokers, access)))

    return route


def routed(
    ranges: Sequence[Range],
    routing_rules: Mapping[str, tuple[RoutingRule, ...]],
    brokers: str,
    access: Access = NO_ACCESS,
) -> Iterator[pa.RecordBatch]:
    """Yield the messages of ranges with the topics that they go to."""
    for offset_range in ranges:
        rules = rule_set(routing_rules[offset_range.topic])
        options = reading_options(brokers, (offset_range.topic,), access)
        for columns in read_columns(offset_range, options, FIELDS.intersection(NAMES)):
            rows = _sent(columns, offset_range, rules)
            if rows is not None:
                yield rows


def _sent(columns: Columns, offset_range: Range, rules: RuleSet) -> pa.RecordBatch | None:
    rows_by_target = rules.matches(
        ColumnBatch(columns, topic=offset_range.topic, partition=offset_range.partition, uses=rules.uses)
    )
    if not rows_by_target:
        return None
    names = list(rows_by_target)
    taken = np.concatenate([rows_by_target[name] for name in names])
    which = np.repeat(np.arange(len(names), dtype=np.int32), [rows_by_target[name].size for name in names])
    topics = pa.array(names, pa.string()).take(pa.array(which))
    rows = to_arrow(columns, topic=offset_range.topic, partition=offset_range.partition, names=NAMES).take(
        pa.array(taken)
    )
    return rows.append_column(_TOPIC, topics)


CHECK_INTERVAL_S: Final = 5.0
"""How often the filters of subscriptions are looked up."""


class RouteJob:
    """A running route with fixed rules; changed rules are another job."""

    def __init__(self, pipeline: Pipeline, context: JobContext) -> None:
        self._context = context
        self._settings = RouteSettings.from_strings(pipeline.overrides)
        self._rules = context.rules or pipeline.rules
        self._loop = BatchLoop(pipeline, context, self._settings)
        self._routing_rules: dict[str, tuple[RoutingRule, ...]] = {}
        self._looked = 0.0
        self._missing = ""
        self._has_subscriptions = any(rule.subscription for rule in self._rules)

    def step(self) -> Step:
        """Route the available messages, up to the limit of a batch."""
        if not self._rules:
            self._context.idle()
            self._context.stopping.wait(1.0)
            return Step()
        self._refresh_filters()
        with small_batch_slot():
            plan = self._plan()
            is_idle = not plan.ranges and not self._loop.is_new(plan)
            if not is_idle and plan.rows <= ROWS_HERE_MAX:
                return self._done(plan, self._routed_here(plan))
        if is_idle:
            return self._loop.wait(plan)
        return self._done(plan, self._loop.commit(plan, lambda: self._parts(plan)))

    def _done(self, plan: Plan, sent: int | None) -> Step:
        if sent is None:
            return Step(lag=plan.lag + plan.rows)
        return Step(rows=plan.rows, lag=plan.lag, counts=plan.counts(routed=sent))

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    # -- internals ------------------------------------------------------------------------------------------------

    def _plan(self) -> Plan:
        """Plan the next batch; a missing topic is waited for without delaying the others."""
        topics = list(self._routing_rules)
        try:
            plan = self._loop.plan(topics)
            self._missing = ""
        except UnknownTopic as unknown:
            link = self._loop.link
            existing = link.call(link.client.metadata(topics)).topics
            existing_topics = [topic for topic in topics if topic in existing]
            if not existing_topics:
                raise
            if str(unknown) != self._missing:
                _logger.warning("the rules of a topic wait until it exists", extra={"reason": str(unknown)})
                self._missing = str(unknown)
            plan = self._loop.plan(existing_topics)
        return plan

    def _routed_here(self, plan: Plan) -> int | None:
        options = self._loop.options
        return self._loop.commit_here(
            plan, options, routed(plan.ranges, self._routing_rules, options.brokers, options.access)
        )

    def _parts(self, plan: Plan) -> Sequence[Part]:
        loop = self._loop
        writing = loop.options.for_tasks(plan.batch.query, {target for rule in self._rules for target in rule.targets})
        reading = loop.reading_access({offset_range.topic for offset_range in plan.ranges})
        tasks = MarkedTask(routing(plan.ranges, self._routing_rules, writing, plan.batch, reading))
        return parts_of(plan.numbers(self._context.spark).mapInArrow(tasks, PART_SCHEMA))

    def _refresh_filters(self) -> None:
        """Update rules that use a subscription's filter, which may change."""
        now = time.monotonic()
        if self._routing_rules and (not self._has_subscriptions or now - self._looked < CHECK_INTERVAL_S):
            return
        self._looked = now
        filters = self._filters({rule.subscription for rule in self._rules if rule.subscription})
        routing_rules: dict[str, list[RoutingRule]] = {}
        for rule in self._rules:
            condition = filters[rule.subscription] if rule.subscription else rule.condition.strip()
            routing_rules.setdefault(rule.topic, []).append(RoutingRule(condition, rule.targets))
        grouped = {topic: tuple(listed) for topic, listed in routing_rules.items()}
        if grouped != self._routing_rules:
            self._check(grouped.values())
            make_topics(self._loop.link, {target for rule in self._rules for target in rule.targets})
            self._routing_rules = grouped

    def _check(self, listed: Iterable[tuple[RoutingRule, ...]]) -> None:
        """Raise `FilterError`, which shows the position, before a task does."""
        for routing_rules in listed:
            if RuleSet(routing_rules).uses.payload and self._settings.decode == "none":
                raise InvalidSetting("a rule reads payloads: set decode=json, or delete the rule")

    def _filters(self, names: set[str]) -> dict[str, str]:
        if not names:
            return {}
        link = self._loop.link
        described = link.call(SubscriptionClient(link.client).describe(sorted(names)))
        return {subscription["name"]: subscription["settings"][FILTER] for subscription in described}


JOB: Final = RouteJob
