"""Requests of administrators: features, quotas, access rules, moves of partitions, pages of topics."""

from __future__ import annotations

from typing import Any

from conformance.questions.asking import BAD_NAME, NOWHERE, TOPIC, Key, Question, question

_EXACT, _DEFAULT, _ANY = 0, 1, 2
_MISSING_NODE = 77


def _move(about: str, topic: str, partition: int, replicas: list[int] | None) -> Question:
    topics = [{"name": topic, "partitions": [{"partition_index": partition, "replicas": replicas}]}]
    return question(about, Key.ALTER_PARTITION_REASSIGNMENTS, 0, timeout=1000, topics=topics)


def _feature(about: str, version: int, name: str, level: int, kind: int = 1) -> Question:
    update = {"feature": name, "max_version_level": level, "upgrade_type": kind}
    return question(about, Key.UPDATE_FEATURES, version, timeout=1000, feature_updates=[update], validate_only=True)


def _quotas(about: str, *components: tuple[str, int, str | None], strict: bool = False) -> Question:
    asked = [{"entity_type": kind, "match_type": how, "match": match} for kind, how, match in components]
    return question(about, Key.DESCRIBE_CLIENT_QUOTAS, 1, components=asked, strict=strict)


def _limit(about: str, entity: dict[str, str | None], *operations: tuple[str, float, bool]) -> Question:
    named = [{"entity_type": kind, "entity_name": name} for kind, name in entity.items()]
    ops = [{"key": key, "value": value, "remove": remove} for key, value, remove in operations]
    entries = [{"entity": named, "ops": ops}]
    return question(about, Key.ALTER_CLIENT_QUOTAS, 1, entries=entries, validate_only=True)


def _pages(about: str, *names: str, limit: int = 10, cursor: tuple[str, int] | None = None) -> Question:
    at = None if cursor is None else {"topic_name": cursor[0], "partition_index": cursor[1]}
    topics = [{"name": name} for name in names]
    return question(about, Key.DESCRIBE_TOPIC_PARTITIONS, 0, topics=topics, response_partition_limit=limit, cursor=at)


def _rule(**more: Any) -> dict[str, Any]:
    plain = {"resource_type": 2, "resource_name": TOPIC, "resource_pattern_type": 3, "operation": 3}
    return {**plain, "principal": "User:a", "host": "*", "permission_type": 3, **more}


_RATE = ("producer_byte_rate", 1000.0, False)

QUESTIONS = (
    question(
        "unknown folder",
        Key.ALTER_REPLICA_LOG_DIRS,
        2,
        dirs=[
            {"path": "/no/such", "topics": [{"name": TOPIC, "partitions": [0]}, {"name": NOWHERE, "partitions": [0]}]}
        ],
    ),
    question("no folders", Key.ALTER_REPLICA_LOG_DIRS, 2, dirs=[]),
    _move("cancel what is not under way", TOPIC, 0, None),
    _move("unknown topic", NOWHERE, 0, None),
    _move("unknown partition", TOPIC, 9, None),
    _move("unknown node", TOPIC, 0, [_MISSING_NODE]),
    _move("no node", TOPIC, 0, []),
    _move("a node twice", TOPIC, 0, [1, 1]),
    _move("where it is", TOPIC, 0, [1]),
    _feature("unknown feature", 1, "no.such", 1),
    _feature("unknown feature", 2, "no.such", 1),
    _feature("a level to come", 2, "metadata.version", 9999),
    _feature("unknown kind of upgrade", 2, "metadata.version", 25, kind=9),
    question("nothing", Key.UPDATE_FEATURES, 2, timeout=1000, feature_updates=[]),
    question("without an authorizer", Key.CREATE_ACLS, 2, creations=[_rule(), _rule(operation=99)]),
    question("nothing", Key.CREATE_ACLS, 2, creations=[]),
    question(
        "without an authorizer",
        Key.DELETE_ACLS,
        2,
        filters=[{"resource_type_filter": 2, "pattern_type_filter": 1, "operation": 1, "permission_type": 1}],
    ),
    question("unknown type", Key.LIST_CONFIG_RESOURCES, 1, resource_types=[3]),
    question("client metrics", Key.LIST_CONFIG_RESOURCES, 0),
    question("nodes", Key.LIST_CONFIG_RESOURCES, 1, resource_types=[4]),
    _quotas("of nobody", ("client-id", _EXACT, NOWHERE)),
    _quotas("nothing, strictly", strict=True),
    _quotas("default with a name", ("user", _DEFAULT, "x")),
    _quotas("any with a name", ("user", _ANY, "x")),
    _quotas("empty kind", ("", _EXACT, "x")),
    _quotas("address and user", ("ip", _ANY, None), ("user", _ANY, None)),
    _limit("a client", {"client-id": "x"}, _RATE),
    _limit("the default client", {"client-id": None}, _RATE),
    _limit("the default of both", {"client-id": None, "user": None}, _RATE),
    _limit("zero", {"client-id": "x"}, ("producer_byte_rate", 0.0, False)),
    _limit("a part of a byte", {"client-id": "x"}, ("producer_byte_rate", 0.5, False)),
    _limit("empty name", {"client-id": ""}, _RATE),
    _limit("an address and a client", {"client-id": "x", "ip": "127.0.0.1"}, _RATE),
    _limit("twice", {"client-id": "x"}, _RATE, _RATE),
    _limit("remove what is not there", {"client-id": "x"}, ("producer_byte_rate", 0.0, True)),
    _limit("remove an unknown one", {"client-id": "x"}, ("bones", 0.0, True)),
    _pages("no partitions", TOPIC, limit=0),
    _pages("fewer than none", TOPIC, limit=-1),
    _pages("beyond the last partition", TOPIC, cursor=(TOPIC, 9)),
    _pages("a cursor elsewhere", TOPIC, cursor=(NOWHERE, 0)),
    _pages("one that is missing between two", TOPIC, BAD_NAME, "written"),
    _pages("the same twice", TOPIC, TOPIC),
    _pages("a full page and one more", TOPIC, "written", limit=2),
)
