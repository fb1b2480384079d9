"""Making, growing, cutting and deleting topics in ways that are refused."""

from __future__ import annotations

from typing import Any

from conformance.questions.asking import BAD_NAME, NOWHERE, TOPIC, UNKNOWN_ID, Key, Question, new_topic, question

_BY_ID = 6


def _create(about: str, *topics: dict[str, Any], check_only: bool = False) -> Question:
    return question(about, Key.CREATE_TOPICS, 7, timeout=10000, topics=topics, validate_only=check_only)


def _set(*settings: tuple[str, str | None], name: str = "new") -> dict[str, Any]:
    return new_topic(name, configs=[{"name": key, "value": value} for key, value in settings])


def _placed(*partitions: tuple[int, list[int]], count: int = -1) -> dict[str, Any]:
    assignments = [{"partition_index": index, "broker_ids": nodes} for index, nodes in partitions]
    return new_topic("new", count, -1 if count == -1 else 1, assignments=assignments)


def _delete(about: str, *topics: Any, version: int = 5) -> Question:
    field = "topics" if version >= _BY_ID else "topic_names"
    return question(about, Key.DELETE_TOPICS, version, timeout=1000, **{field: topics})


def _grow(about: str, count: int, *placed: list[int], topic: str = TOPIC, times: int = 1) -> Question:
    assignments = [{"broker_ids": nodes} for nodes in placed] or None
    topics = [{"name": topic, "count": count, "assignments": assignments}] * times
    return question(about, Key.CREATE_PARTITIONS, 3, timeout=5000, topics=topics)


def _cut(about: str, offset: int, *, topic: str = TOPIC, partition: int = 0) -> Question:
    topics = [{"name": topic, "partitions": [{"partition_index": partition, "offset": offset}]}]
    return question(about, Key.DELETE_RECORDS, 2, timeout=5000, topics=topics)


QUESTIONS = (
    _create("no topics"),
    _create("no partitions", new_topic("new", 0)),
    _create("minus two partitions", new_topic("new", -2)),
    _create("too many replicas", new_topic("new", 1, 2)),
    _create("no replicas", new_topic("new", 1, 0)),
    _create("bad name", new_topic(BAD_NAME)),
    _create("empty name", new_topic("")),
    _create("a dot", new_topic(".")),
    _create("long name", new_topic("a" * 250)),
    _create("name that collides", new_topic("with_dot")),
    _create("name that exists", new_topic(TOPIC)),
    _create("name twice", new_topic("twice"), new_topic("twice")),
    _create("internal name", new_topic("__consumer_offsets")),
    _create("unknown setting", _set(("no.such", "1"))),
    _create("bad value", _set(("retention.ms", "soon"))),
    _create("null value", _set(("retention.ms", None))),
    _create("value out of bounds", _set(("max.message.bytes", "-5"))),
    _create("setting twice", _set(("retention.ms", "1000"), ("retention.ms", "2000")), check_only=True),
    _create("bad cleanup policy", _set(("cleanup.policy", "burn"))),
    _create("empty cleanup policy", _set(("cleanup.policy", ""), name="new-policy"), check_only=True),
    _create("bad timestamp type", _set(("message.timestamp.type", "Never"))),
    _create("bad compression", _set(("compression.type", "rar"))),
    _create("more in sync than replicas", _set(("min.insync.replicas", "2")), check_only=True),
    _create("placed and counted", _placed((0, [1]), count=2)),
    _create("placed with a gap", _placed((1, [1]))),
    _create("placed twice", _placed((0, [1]), (0, [1]))),
    _create("placed on a node that is not there", _placed((0, [77]))),
    _create("placed on a node twice", _placed((0, [1, 1]))),
    _create("placed nowhere", _placed((0, []))),
    _create("valid, only checked", new_topic("new-valid", 3), check_only=True),
    _create("valid by default, only checked", new_topic("new-valid", -1, -1), check_only=True),
    _delete("none"),
    _delete("unknown", NOWHERE),
    _delete("unknown twice", NOWHERE, NOWHERE),
    _delete("bad name", BAD_NAME),
    _delete("unknown id", {"name": None, "topic_id": UNKNOWN_ID}, version=6),
    _delete("name and id", {"name": TOPIC, "topic_id": UNKNOWN_ID}, version=6),
    _delete("neither name nor id", {"name": None}, version=6),
    _grow("fewer", 1),
    _grow("as many", 2),
    _grow("minus one", -1),
    _grow("unknown topic", 5, topic=NOWHERE),
    _grow("topic twice", 5, times=2),
    _grow("placed too few", 5, [1]),
    _grow("placed nowhere", 3, []),
    _grow("placed on a node that is not there", 3, [7]),
    _grow("placed on a node twice", 3, [1, 1]),
    _cut("beyond the end", 1000),
    _cut("minus two", -2),
    _cut("before the first", 0),
    _cut("unknown topic", 0, topic=NOWHERE),
    _cut("unknown partition", 0, partition=9),
    _cut("internal topic", 0, topic="__consumer_offsets"),
)
