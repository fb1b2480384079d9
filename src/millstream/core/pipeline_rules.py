"""The rules that a route pipeline may have: limits, and no cycles."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from millstream.core.errors import InvalidPipeline
from millstream.core.pipeline import NAME_LENGTH_MAX, PipelineKind, Rule, check_target
from millstream.core.topic import check_topic_name

RULES_MAX: Final = 10_000
TARGETS_MAX: Final = 1000
CONDITION_LENGTH_MAX: Final = 8192


def check_rules(kind: PipelineKind, rules: Iterable[Rule]) -> None:
    """Raise `InvalidPipeline` for rules that a pipeline of this kind cannot have together."""
    listed = tuple(rules)
    if listed and kind is not PipelineKind.ROUTE:
        raise InvalidPipeline(f"only {PipelineKind.ROUTE} pipelines have rules; this is a {kind} pipeline")
    if len(listed) > RULES_MAX:
        raise InvalidPipeline(f"a pipeline has at most {RULES_MAX} rules, this one would have {len(listed)}")
    if len({rule.name for rule in listed}) != len(listed):
        raise InvalidPipeline("two rules of a pipeline have the same name")
    for rule in listed:
        _check_rule(rule)
    _check_cycles(listed)


def _check_rule(rule: Rule) -> None:
    about = f"rule {rule.name!r}"
    if not 0 < len(rule.name) <= NAME_LENGTH_MAX or not rule.name.isprintable():
        raise InvalidPipeline(f"the name of a rule is one line of 1 to {NAME_LENGTH_MAX} characters")
    if not rule.targets or len(rule.targets) > TARGETS_MAX:
        raise InvalidPipeline(f"{about} needs 1 to {TARGETS_MAX} topics that its messages go to")
    if len(set(rule.targets)) != len(rule.targets):
        raise InvalidPipeline(f"{about} names a target twice")
    check_topic_name(rule.topic)
    for target in rule.targets:
        check_target(target)
    if rule.condition and rule.subscription:
        raise InvalidPipeline(f"{about} has either a condition or a subscription whose filter it takes, not both")
    if len(rule.condition) > CONDITION_LENGTH_MAX:
        raise InvalidPipeline(f"the condition of {about} has more than {CONDITION_LENGTH_MAX} characters")


def _check_cycles(rules: Iterable[Rule]) -> None:
    """Reject cycles, in which a message would be routed forever."""
    leads: dict[str, set[str]] = {}
    for rule in rules:
        leads.setdefault(rule.topic, set()).update(rule.targets)
    while leads:
        # A topic that leads nowhere cannot be part of a cycle.
        open_ended = [topic for topic, targets in leads.items() if not any(target in leads for target in targets)]
        if not open_ended:
            topics = ", ".join(sorted(leads))
            raise InvalidPipeline(f"messages would be routed in a cycle; check the rules of {topics}")
        for topic in open_ended:
            del leads[topic]
