"""Consumer groups: heartbeats that cannot be, members and groups that are not there."""

from __future__ import annotations

from typing import Any

from conformance.questions.asking import NOWHERE, TOPIC, UNKNOWN_ID, Key, Question, question


def _beat(about: str, version: int = 1, **more: Any) -> Question:
    joining = {"rebalance_timeout": 60000, "subscribed_topic_names": [TOPIC], "topic_partitions": []}
    values = {"group_id": "refused", "member_id": "m", "member_epoch": 0, **joining, **more}
    return question(about, Key.CONSUMER_GROUP_HEARTBEAT, version, **values)


def _stranger(about: str, epoch: int, **more: Any) -> Question:
    silent = {"rebalance_timeout": -1, "subscribed_topic_names": None, "topic_partitions": None}
    return _beat(about, **{"group_id": NOWHERE, "member_epoch": epoch, **silent, **more})


QUESTIONS = (
    _beat("empty member id", member_id=""),
    _beat("blank member id", member_id=" "),
    _beat("empty group", group_id=""),
    _beat("blank group", group_id=" "),
    _beat("empty instance id", instance_id=""),
    _beat("empty rack", rack_id=""),
    _beat("no rebalance timeout", rebalance_timeout=-1),
    _beat("owned partitions on joining", topic_partitions=[{"topic_id": UNKNOWN_ID, "partitions": [0]}]),
    _beat("no word of owned partitions on joining", topic_partitions=None),
    _beat("no subscription", subscribed_topic_names=None),
    _beat("unknown assignor", server_assignor="sticky"),
    _beat("wrong expression", subscribed_topic_names=None, subscribed_topic_regex="("),
    _beat("expression that looks ahead", subscribed_topic_names=None, subscribed_topic_regex="(?=a)b"),
    _beat("expression with a back reference", subscribed_topic_names=None, subscribed_topic_regex=r"(a)\1"),
    _beat("epoch below all", member_epoch=-3),
    _beat("away without an instance id", member_epoch=-2),
    _stranger("unknown group", 1),
    _stranger("unknown group, leaving", -1),
    _stranger("unknown group, away", -2, instance_id="i"),
    question("unknown group", Key.CONSUMER_GROUP_DESCRIBE, 1, group_ids=[NOWHERE], include_authorized_operations=False),
    question("empty group", Key.CONSUMER_GROUP_DESCRIBE, 0, group_ids=[""], include_authorized_operations=True),
    question("no group", Key.CONSUMER_GROUP_DESCRIBE, 1, group_ids=[], include_authorized_operations=False),
)
