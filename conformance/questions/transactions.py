"""Requests about transactions that do not exist, or are in another state than requested."""

from __future__ import annotations

from typing import Any

from conformance.questions.asking import NOWHERE, TAKEN, TOPIC, Key, Question, question

_UNKNOWN_PRODUCER = {"transactional_id": NOWHERE, "producer_id": 4711, "producer_epoch": 0}
_OFFSET = {"partition_index": 0, "committed_offset": 1, "committed_metadata": None}


def _init(about: str, version: int = 4, **values: Any) -> Question:
    settings = {"transactional_id": NOWHERE, "transaction_timeout": 60000, **values}
    return question(about, Key.INIT_PRODUCER_ID, version, **settings)


def _add(about: str, version: int, topic: str = TOPIC, partition: int = 0) -> Question:
    topics = [{"name": topic, "partitions": [partition]}]
    older = {f"v3_and_below_{name}": value for name, value in {**_UNKNOWN_PRODUCER, "topics": topics}.items()}
    return question(about, Key.ADD_PARTITIONS_TO_TXN, version, **older)


def _end(about: str, version: int, **values: Any) -> Question:
    return question(about, Key.END_TXN, version, **{**_UNKNOWN_PRODUCER, "committed": True, **values})


def _offsets(about: str, version: int, topic: str = TOPIC, **values: Any) -> Question:
    epoch = {"committed_leader_epoch": -1} if version >= 2 else {}
    topics = [{"name": topic, "partitions": [{**_OFFSET, **epoch}]}]
    return question(
        about, Key.TXN_OFFSET_COMMIT, version, **{**_UNKNOWN_PRODUCER, "group_id": NOWHERE, "topics": topics, **values}
    )


QUESTIONS = (
    _init("timeout beyond the limit", transaction_timeout=10_000_000),
    _init("no time at all", transaction_timeout=0),
    _init("negative time", transaction_timeout=-5),
    _add("unknown id", 0),
    _add("unknown id", 3),
    _add("unknown topic", 3, NOWHERE),
    _add("unknown partition", 3, TOPIC, 9),
    question("unknown id", Key.ADD_OFFSETS_TO_TXN, 0, **_UNKNOWN_PRODUCER, group_id=NOWHERE),
    question("unknown id", Key.ADD_OFFSETS_TO_TXN, 4, **_UNKNOWN_PRODUCER, group_id=NOWHERE),
    *(_end("unknown id", version) for version in (0, 4, 5)),
    _end("empty id", 4, transactional_id=""),
    *(_offsets("unknown id", version) for version in (0, 2, 3, 4)),
    _offsets("unknown topic", 3, NOWHERE),
    _offsets("unknown generation", 3, generation_id=5, member_id="m"),
    question("unknown ids", Key.DESCRIBE_TRANSACTIONS, 0, transactional_ids=[NOWHERE, ""]),
    _end("commit of nothing", 4, transactional_id=TAKEN),
    _end("commit of nothing by another producer", 5, transactional_id=TAKEN),
    question("all", Key.LIST_TRANSACTIONS, 0, state_filters=[], producer_id_filters=[]),
    question("unknown state", Key.LIST_TRANSACTIONS, 1, state_filters=["Odd", "Ongoing"], producer_id_filters=[]),
)
