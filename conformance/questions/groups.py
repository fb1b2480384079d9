"""Groups that are not there, members that never joined, offsets that cannot be."""

from __future__ import annotations

from typing import Any

from conformance.questions.asking import NOWHERE, TOPIC, Key, Question, question

_COMMITTED = "committed"
_SUBSCRIPTION = b"\x00\x01\x00\x00\x00\x00\xff\xff\xff\xff"
_STRANGER: dict[str, Any] = {"generation_id": 1, "member_id": "m"}


def _coordinator(about: str, kind: int, *keys: str) -> Question:
    return question(about, Key.FIND_COORDINATOR, 4, key_type=kind, coordinator_keys=keys)


def _join(about: str, version: int = 5, **more: Any) -> Question:
    timeouts = {"session_timeout": 10000, "rebalance_timeout": 10000}
    protocols = [{"name": "range", "metadata": _SUBSCRIPTION}]
    values = {"group_id": "joined", **timeouts, "protocol_type": "consumer", "protocols": protocols, **more}
    return question(about, Key.JOIN_GROUP, version, **values)


def _commit(about: str, version: int = 7, *, topic: str = TOPIC, partition: int = 0, **more: Any) -> Question:
    metadata, offset = more.pop("metadata", ""), more.pop("offset", 3)
    committed = {"partition_index": partition, "committed_offset": offset, "committed_metadata": metadata}
    topics = [{"name": topic, "partitions": [committed]}]
    member = {"generation_id_or_member_epoch": -1, "member_id": ""}
    return question(about, Key.OFFSET_COMMIT, version, **{"group_id": _COMMITTED, **member, "topics": topics, **more})


def _stored(about: str, version: int = 5, *, group: str = _COMMITTED, topic: str = TOPIC) -> Question:
    topics = [{"name": topic, "partition_indexes": [0, 1, 9]}]
    return question(about, Key.OFFSET_FETCH, version, group_id=group, topics=topics)


def _forget(about: str, *, group: str = _COMMITTED, topic: str = TOPIC, partition: int = 0) -> Question:
    topics = [{"name": topic, "partitions": [{"partition_index": partition}]}]
    return question(about, Key.OFFSET_DELETE, 0, group_id=group, topics=topics)


def _describe(about: str, version: int, group: str, **more: Any) -> Question:
    return question(about, Key.DESCRIBE_GROUPS, version, groups=[group], **more)


QUESTIONS = (
    question("empty group", Key.FIND_COORDINATOR, 3, key="", key_type=0),
    question("unknown kind", Key.FIND_COORDINATOR, 3, key="x", key_type=9),
    _coordinator("two groups", 0, "a", "b"),
    _coordinator("unknown kind", 9, "a"),
    _coordinator("none", 0),
    _join("unknown member", member_id="nobody"),
    _join("without a member id"),
    _join("session too short", session_timeout=10),
    _join("session too long", session_timeout=10_000_000),
    _join("no protocols", protocols=[]),
    _join("no protocol type", protocol_type=""),
    _join("empty group", group_id=""),
    _join("without a member id, as of old", 2, group_id="joined-as-of-old"),
    question("unknown group", Key.SYNC_GROUP, 3, group_id=NOWHERE, **_STRANGER),
    question("empty group", Key.SYNC_GROUP, 3, group_id="", **_STRANGER),
    question("unknown group", Key.HEARTBEAT, 3, group_id=NOWHERE, **_STRANGER),
    question("empty group", Key.HEARTBEAT, 3, group_id="", **_STRANGER),
    question("unknown group", Key.LEAVE_GROUP, 2, group_id=NOWHERE, member_id="m"),
    question("unknown group", Key.LEAVE_GROUP, 3, group_id=NOWHERE, members=[{"member_id": "m"}]),
    question("nobody", Key.LEAVE_GROUP, 3, group_id=NOWHERE, members=[]),
    question("empty group", Key.LEAVE_GROUP, 3, group_id="", members=[{"member_id": "m"}]),
    *(_commit("without membership", version) for version in (2, 7, 9)),
    _commit("no topics", topics=[]),
    _commit("empty group", group_id=""),
    _commit("member of no group", group_id=NOWHERE, generation_id_or_member_epoch=4, member_id="m"),
    _commit("stranger to a group", generation_id_or_member_epoch=4, member_id="m"),
    _commit("unknown topic", topic=NOWHERE),
    _commit("unknown partition", partition=9),
    _commit("long metadata", metadata="m" * 5000),
    _commit("null metadata", partition=1, metadata=None),
    _commit("negative offset", partition=1, offset=-1),
    *(_stored("committed", version) for version in (1, 5, 7)),
    question("all", Key.OFFSET_FETCH, 5, group_id=_COMMITTED, topics=None),
    _stored("unknown group", group=NOWHERE),
    _stored("unknown topic", topic=NOWHERE),
    question("empty group", Key.OFFSET_FETCH, 5, group_id="", topics=None),
    question(
        "two groups",
        Key.OFFSET_FETCH,
        8,
        groups=[{"group_id": _COMMITTED, "topics": None}, {"group_id": NOWHERE, "topics": None}],
    ),
    question(
        "epoch of a stranger",
        Key.OFFSET_FETCH,
        9,
        groups=[{"group_id": _COMMITTED, "member_id": "m", "member_epoch": 3, "topics": None}],
    ),
    _describe("unknown", 5, NOWHERE),
    _describe("unknown", 6, NOWHERE),
    _describe("empty id", 5, ""),
    _describe("with offsets only", 5, _COMMITTED),
    _describe("what one may do", 5, _COMMITTED, include_authorized_operations=True),
    question("unknown state", Key.LIST_GROUPS, 4, states_filter=["Asleep"]),
    question("unknown type", Key.LIST_GROUPS, 5, types_filter=["odd"]),
    question("share groups", Key.LIST_GROUPS, 5, types_filter=["share"]),
    question("empty ones", Key.LIST_GROUPS, 4, states_filter=["empty"]),
    question("unknown", Key.DELETE_GROUPS, 2, groups_names=[NOWHERE]),
    question("unknown twice", Key.DELETE_GROUPS, 2, groups_names=[NOWHERE, NOWHERE]),
    question("empty id", Key.DELETE_GROUPS, 2, groups_names=[""]),
    _forget("unknown group", group=NOWHERE),
    _forget("unknown topic", topic=NOWHERE),
    _forget("unknown partition", partition=9),
    question("empty group", Key.OFFSET_DELETE, 0, group_id="", topics=[]),
)
