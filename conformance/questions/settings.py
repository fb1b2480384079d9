"""Settings of topics and nodes, and quotas."""

from __future__ import annotations

from typing import Any

from conformance.questions.asking import BAD_NAME, NOWHERE, TOPIC, Key, Question, question

_TOPIC_KIND, _NODE_KIND, _GROUP_KIND, _UNKNOWN_KIND = 2, 4, 32, 99
_SET, _DELETE, _APPEND, _SUBTRACT, _UNKNOWN_VERB = 0, 1, 2, 3, 9
_RATE = "producer_byte_rate"


def _describe(about: str, name: str, kind: int = _TOPIC_KIND, keys: list[str] | None = None) -> Question:
    resources = [{"resource_type": kind, "resource_name": name, "configuration_keys": keys}]
    return question(about, Key.DESCRIBE_CONFIGS, 4, resources=resources)


def _change(key: str, value: str | None, verb: int = _SET, *, name: str = TOPIC, kind: int = _TOPIC_KIND) -> Any:
    configs = [{"name": key, "value": value, "config_operation": verb}]
    return {"resource_type": kind, "resource_name": name, "configs": configs}


def _alter(about: str, *resources: Any, check_only: bool = False) -> Question:
    return question(about, Key.INCREMENTAL_ALTER_CONFIGS, 1, resources=resources, validate_only=check_only)


def _group(about: str, *changes: tuple[str, str | None], name: str = "settings") -> Question:
    """Settings of a group; None deletes one."""
    configs = [{"name": key, "value": to, "config_operation": _DELETE if to is None else _SET} for key, to in changes]
    resource = {"resource_type": _GROUP_KIND, "resource_name": name, "configs": configs}
    return _alter(f"{about}, of a group", resource, check_only=True)


def _replace(about: str, name: str, *configs: tuple[str, str | None]) -> Question:
    settings = [{"name": key, "value": value} for key, value in configs]
    resources = [{"resource_type": _TOPIC_KIND, "resource_name": name, "configs": settings}]
    return question(about, Key.ALTER_CONFIGS, 2, resources=resources)


def _quotas(about: str, *components: tuple[str, int, str | None]) -> Question:
    asked = [{"entity_type": kind, "match_type": how, "match": match} for kind, how, match in components]
    return question(about, Key.DESCRIBE_CLIENT_QUOTAS, 1, components=asked)


def _limit(about: str, kinds: list[str], key: str = _RATE, value: float = 1.0) -> Question:
    entity = [{"entity_type": kind, "entity_name": "x"} for kind in kinds]
    entries = [{"entity": entity, "ops": [{"key": key, "value": value}]}]
    return question(about, Key.ALTER_CLIENT_QUOTAS, 1, entries=entries)


QUESTIONS = (
    _describe("unknown topic", NOWHERE),
    _describe("bad topic name", BAD_NAME),
    _describe("unknown kind", "x", _UNKNOWN_KIND),
    _describe("unknown node", "77", _NODE_KIND),
    _describe("node that is no number", "abc", _NODE_KIND),
    _describe("one key", TOPIC, keys=["retention.ms"]),
    _describe("unknown key", TOPIC, keys=["no.such"]),
    _alter("nothing"),
    _alter("unknown topic", _change("retention.ms", "1", name=NOWHERE)),
    _alter("bad topic name", _change("retention.ms", "1", name=BAD_NAME)),
    _alter("unknown setting", _change("no.such", "1")),
    _alter("delete an unknown setting", _change("no.such", None, _DELETE)),
    _alter("bad value", _change("retention.ms", "soon")),
    _alter("null value", _change("retention.ms", None)),
    _alter("unknown operation", _change("retention.ms", "1", _UNKNOWN_VERB)),
    _alter("append to what is no list", _change("retention.ms", "1", _APPEND)),
    _alter("append what is there", _change("cleanup.policy", "delete", _APPEND), check_only=True),
    _alter("append a bad value", _change("cleanup.policy", "burn", _APPEND)),
    _alter("subtract what is not there", _change("cleanup.policy", "compact", _SUBTRACT), check_only=True),
    _alter("delete what is not set", _change("retention.ms", None, _DELETE)),
    _alter("topic twice", _change("retention.ms", "9999999"), _change("retention.bytes", "1")),
    _alter("unknown kind", _change("retention.ms", "1", name="x", kind=_UNKNOWN_KIND)),
    _alter("unknown node", _change("log.retention.ms", "1", name="77", kind=_NODE_KIND)),
    _alter("only checked", _change("retention.ms", "5000"), check_only=True),
    _group("unknown setting", ("no.such", "1")),
    _group("delete an unknown setting", ("no.such", None)),
    _group("bad value", ("consumer.session.timeout.ms", "soon")),
    _group("session too short", ("consumer.session.timeout.ms", "1")),
    _group("session too long", ("consumer.session.timeout.ms", "1000000")),
    _group("heartbeats too often", ("consumer.heartbeat.interval.ms", "1")),
    _group("heartbeats too rare", ("consumer.heartbeat.interval.ms", "100000")),
    _group("in bounds", ("consumer.session.timeout.ms", "50000"), ("consumer.heartbeat.interval.ms", "6000")),
    _group("delete what is not set", ("consumer.session.timeout.ms", None)),
    _group("empty group", ("consumer.session.timeout.ms", "50000"), name=""),
    _alter("append to a group's", _change("consumer.session.timeout.ms", "1", _APPEND, name="g", kind=_GROUP_KIND)),
    _describe("empty group", "", _GROUP_KIND),
    _alter("read-only setting of a node", _change("node.id", "7", name="1", kind=_NODE_KIND)),
    _alter("unknown setting of a node", _change("no.such", "7", name="1", kind=_NODE_KIND), check_only=True),
    _alter("bad value for a node", _change("log.retention.ms", "soon", name="1", kind=_NODE_KIND)),
    _alter("read-only setting of all nodes", _change("node.id", "7", name="", kind=_NODE_KIND)),
    _alter("node that is no number", _change("log.retention.ms", "1", name="abc", kind=_NODE_KIND)),
    _replace("unknown topic", NOWHERE),
    _replace("bad topic name", BAD_NAME),
    _replace("bad value", TOPIC, ("retention.ms", "soon")),
    _replace("unknown setting", TOPIC, ("no.such", "1")),
    _quotas("all"),
    _quotas("bad kind", ("dog", 0, "x")),
    _quotas("bad match", ("user", 9, "x")),
    _quotas("kind twice", ("user", 0, "x"), ("user", 0, "y")),
    _quotas("exact match of null", ("user", 0, None)),
    _limit("bad kind", ["dog"]),
    _limit("bad key", ["user"], "bones"),
    _limit("negative", ["user"], _RATE, -1.0),
    _limit("nobody", []),
)
