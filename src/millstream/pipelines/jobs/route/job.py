"""route: messages into consumer queues by rules, exactly once. Each queue is an ordinary topic.

All rules of a topic are asked in one pass over its messages, in the tasks that fetch them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from millstream.core.errors import InvalidSetting, UnknownTopic
from millstream.core.pipeline import Pipeline, RouteSettings
from millstream.core.subscription import FILTER
from millstream.pipelines.jobs.batch_loop import PART_SCHEMA, BatchLoop, Plan
from millstream.pipelines.jobs.job import JobContext, Step
from millstream.pipelines.jobs.route.rule_set import RuleSet, Way
from millstream.pipelines.jobs.route.task import routing
from millstream.pipelines.jobs.target_topic import make_topics
from millstream.pipelines.runtime.fault import Marked
from millstream.protocol.private.subscriptions import SubscriptionClient

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_logger = logging.getLogger(__name__)

LOOK_S: Final = 5.0
"""How often the filters of subscriptions are looked up."""


class RouteJob:
    """One route that runs, with the rules that it was made with; other rules are another job."""

    def __init__(self, pipeline: Pipeline, context: JobContext) -> None:
        self._context = context
        self._settings = RouteSettings.from_strings(pipeline.overrides)
        self._rules = context.rules or pipeline.rules
        self._loop = BatchLoop(pipeline, context, self._settings)
        self._ways: dict[str, tuple[Way, ...]] = {}
        self._looked = 0.0
        self._missing = ""
        self._has_subscriptions = any(rule.subscription for rule in self._rules)

    def step(self) -> Step:
        """Route what there is, up to the limit of a batch."""
        if not self._rules:
            self._context.stopping.wait(1.0)
            return Step()
        self._look()
        plan = self._plan()
        if not plan.ranges and not self._loop.is_new(plan):
            return self._loop.wait(plan)
        sent = self._loop.commit(plan, self._parts(plan) if plan.ranges else None)
        if sent is None:
            return Step(lag=plan.lag + plan.rows)
        return Step(rows=plan.rows, lag=plan.lag, counts=plan.counts(routed=sent))

    def close(self) -> None:
        """There is nothing that a batch leaves behind."""

    # -- how ------------------------------------------------------------------------------------------------------

    def _plan(self) -> Plan:
        """The next batch; a topic that is missing is waited for, and holds up no other."""
        topics = list(self._ways)
        try:
            plan = self._loop.plan(topics)
            self._missing = ""
        except UnknownTopic as unknown:
            link = self._loop.link
            there = link.call(link.client.metadata(topics)).topics
            left = [topic for topic in topics if topic in there]
            if not left:
                raise
            if str(unknown) != self._missing:
                _logger.warning("the rules of a topic wait for it", extra={"reason": str(unknown)})
                self._missing = str(unknown)
            plan = self._loop.plan(left)
        return plan

    def _parts(self, plan: Plan) -> DataFrame:
        numbers = plan.numbers(self._context.spark)
        tasks = Marked(routing(plan.ranges, self._ways, self._loop.options, plan.batch))
        return numbers.mapInArrow(tasks, PART_SCHEMA)

    def _look(self) -> None:
        """Bring the rules up to date; those that name a subscription have its filter, which may change."""
        now = time.monotonic()
        if self._ways and (not self._has_subscriptions or now - self._looked < LOOK_S):
            return
        self._looked = now
        filters = self._filters({rule.subscription for rule in self._rules if rule.subscription})
        ways: dict[str, list[Way]] = {}
        for rule in self._rules:
            condition = filters[rule.subscription] if rule.subscription else rule.condition.strip()
            ways.setdefault(rule.topic, []).append(Way(condition, rule.targets))
        grouped = {topic: tuple(listed) for topic, listed in ways.items()}
        if grouped != self._ways:
            self._check(grouped.values())
            make_topics(self._loop.link, {target for rule in self._rules for target in rule.targets})
            self._ways = grouped

    def _check(self, listed: Iterable[tuple[Way, ...]]) -> None:
        """Raise `FilterError`, which points at the place, before a task does."""
        for ways in listed:
            if RuleSet(ways).uses.payload and self._settings.decode == "none":
                raise InvalidSetting("a rule looks into payloads: set decode=json, or take it away")

    def _filters(self, names: set[str]) -> dict[str, str]:
        if not names:
            return {}
        link = self._loop.link
        told = link.call(SubscriptionClient(link.client).describe(sorted(names)))
        return {one["name"]: one["settings"][FILTER] for one in told}
