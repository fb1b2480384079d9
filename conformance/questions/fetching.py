"""Reading from offsets, epochs and times that are odd."""

from __future__ import annotations

from typing import Any

from conformance.questions.asking import NOWHERE, TOPIC, UNKNOWN_ID, Key, Question, question

_BY_ID = 13
_LATEST, _EARLIEST = -1, -2


def _fetch(about: str, version: int = 11, *, of: dict[str, Any] | None = None, **more: Any) -> Question:
    """`of` changes the fields of the one partition in the request."""
    topic = {"topic_id": UNKNOWN_ID} if version >= _BY_ID else {"topic": more.pop("topic", TOPIC)}
    partition = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1 << 20, **(of or {})}
    limits = {"max_wait": 100, "min_bytes": 0, "max_bytes": 1 << 20}
    topics = [{**topic, "partitions": [partition]}]
    return question(about, Key.FETCH, version, **{**limits, "topics": topics, **more})


def _offsets(about: str, time_ms: int, version: int = 7, *, topic: str = TOPIC, **more: Any) -> Question:
    partitions = [{"partition_index": 0, "timestamp": time_ms, **more}]
    topics = [{"name": topic, "partitions": partitions}]
    return question(about, Key.LIST_OFFSETS, version, replica_id=-1, topics=topics)


def _epoch_end(epoch: int, partition: int, version: int, topic: str = TOPIC) -> Question:
    topics = [{"topic": topic, "partitions": [{"partition": partition, "leader_epoch": epoch}]}]
    about = f"epoch {epoch} of {topic} {partition}"
    return question(about, Key.OFFSET_FOR_LEADER_EPOCH, version, replica_id=-1, topics=topics)


QUESTIONS = (
    _fetch("from the start", 4),
    _fetch("from the start"),
    _fetch("read committed", isolation_level=1),
    _fetch("beyond the end", of={"fetch_offset": 1000}),
    _fetch("before the start", of={"fetch_offset": -1}),
    _fetch("unknown topic", topic=NOWHERE),
    _fetch("unknown topic id", 13),
    _fetch("unknown topic id", 16),
    _fetch("unknown partition", of={"partition": 9}),
    _fetch("leader epoch to come", of={"current_leader_epoch": 99}),
    _fetch("unknown session", session_id=4711, session_epoch=3),
    _fetch("unknown session, last word", session_id=4711, session_epoch=-1),
    _fetch("no bytes allowed", max_bytes=0),
    _fetch("no bytes allowed of the partition", of={"partition_max_bytes": 0}),
    _fetch("as a follower", replica_id=3),
    _fetch("last fetched epoch", 12, of={"fetch_offset": 5, "last_fetched_epoch": 0}),
    _fetch("last fetched epoch to come", 12, of={"fetch_offset": 5, "last_fetched_epoch": 7}),
    *(
        _offsets(f"time {time_ms}", time_ms, version)
        for version in (1, 5, 7, 8, 9, 10)
        for time_ms in (_LATEST, _EARLIEST, -3, -4, -5, -7, 0)
    ),
    _offsets("time after all", 4_000_000_000_000),
    _offsets("unknown topic", _LATEST, topic=NOWHERE),
    _offsets("unknown partition", _LATEST, partition_index=9),
    _offsets("unknown partition", _LATEST, 1, partition_index=9),
    _offsets("leader epoch to come", _LATEST, current_leader_epoch=99),
    question(
        "the same partition twice",
        Key.LIST_OFFSETS,
        7,
        replica_id=-1,
        topics=[
            {
                "name": TOPIC,
                "partitions": [
                    {"partition_index": 0, "timestamp": _LATEST},
                    {"partition_index": 0, "timestamp": _EARLIEST},
                ],
            }
        ],
    ),
    *(_epoch_end(epoch, partition, version) for version in (3, 4) for epoch in (0, 5, -1) for partition in (0, 9)),
    _epoch_end(0, 0, 4, NOWHERE),
)
