"""Questions of members of consumer groups that build on the responses before them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final
from uuid import UUID

from conformance.dialogues import Member
from conformance.question import Broker
from conformance.questions.asking import TOPIC, Key, new_topic

_COMPARED: Final = ("error_code", "member_epoch")
_SPREAD_S: Final = 1.0
"""How long Kafka may take until its coordinator has heard of a new topic."""


class Group:
    """A group that is talked about. Epochs are compared relative to the first, which Kafka chooses differently since
    4.3.
    """

    def __init__(self, broker: Broker, name: str, **topics: int) -> None:
        self.broker = broker
        self.name = f"consumer-{name}"
        self.topics = [f"consumed-{topic}" for topic in topics]
        self.first_epoch = 0
        new_topics = [new_topic(topic, number) for topic, number in zip(self.topics, topics.values(), strict=True)]
        broker.ask(Key.CREATE_TOPICS, 5, {"timeout": 10000, "topics": new_topics})
        time.sleep(_SPREAD_S)

    def relative(self, epoch: int) -> int | str:
        """An epoch as it differs from the first."""
        if epoch > 0 and not self.first_epoch:
            self.first_epoch = epoch
        return f"+{epoch - self.first_epoch}" if epoch > 0 else epoch

    def described(self) -> list[Any]:
        """The group as ConsumerGroupDescribe has it."""
        values = {"group_ids": [self.name], "include_authorized_operations": True}
        response = self.broker.ask(Key.CONSUMER_GROUP_DESCRIBE, 1, values)["groups"][0]
        members = sorted(
            [
                member["instance_id"] or "",
                self.relative(member["member_epoch"]),
                member["subscribed_topic_names"],
                member["subscribed_topic_regex"],
                member["member_type"],
                _count(member["assignment"]["topic_partitions"]),
                _count(member["target_assignment"]["topic_partitions"]),
            ]
            for member in response["members"]
        )
        fields = {
            name: response[name] for name in ("error_code", "group_state", "assignor_name", "authorized_operations")
        }
        epochs = {name: self.relative(response[name]) for name in ("group_epoch", "assignment_epoch")}
        return [fields | epochs, str(members)]


class Consumer:
    """A member of a consumer group, one heartbeat at a time."""

    def __init__(self, group: Group, member: str, *topics: str, **more: Any) -> None:
        self.group = group
        self.member = member
        self.topics = list(topics or group.topics)
        self.more = more
        self.epoch = 0
        self.owned: list[Any] = []
        self.assigned: list[Any] = []

    def join(self, **more: Any) -> Any:
        """Join, with all fields set."""
        self.epoch, self.owned = 0, []
        return self.report_owned(**more)

    def report_owned(self, **more: Any) -> Any:
        """A heartbeat with everything in it."""
        fields = {"rebalance_timeout": 60000, "subscribed_topic_names": self.topics, "topic_partitions": self.owned}
        return self.beat(**{**fields, **self.more, **more})

    def beat(self, **more: Any) -> Any:
        """Send a heartbeat; return its response, with the number of assigned partitions."""
        values = {"group_id": self.group.name, "member_id": self.member, "member_epoch": self.epoch, **more}
        response = self.group.broker.ask(Key.CONSUMER_GROUP_HEARTBEAT, 1, {"topic_partitions": None, **values})
        if response["error_code"] == "none":
            self.epoch = response["member_epoch"]
        assignment = response["assignment"]
        if assignment is not None:
            self.assigned = [{**topic, "topic_id": UUID(topic["topic_id"])} for topic in assignment["topic_partitions"]]
        fields = {"error_code": response["error_code"], "epoch": self.group.relative(response["member_epoch"])}
        return {
            **fields,
            "has_id": response["member_id"] is not None,
            "partitions": assignment and _count(self.assigned),
        }

    def report(self) -> Any:
        """A heartbeat after everything that is not assigned any more was given up."""
        self.owned = self.assigned
        return self.beat(topic_partitions=self.owned)

    def leave(self, epoch: int = -1) -> Any:
        """Go."""
        instance = {name: value for name, value in self.more.items() if name == "instance_id"}
        values = {"group_id": self.group.name, "member_id": self.member, "member_epoch": epoch, **instance}
        response = self.group.broker.ask(Key.CONSUMER_GROUP_HEARTBEAT, 1, {**values, "topic_partitions": None})
        return {name: response[name] for name in (*_COMPARED, "heartbeat_interval", "assignment")}


def _count(partitions: list[Any]) -> int:
    return sum(len(topic["partitions"]) for topic in partitions)


def consumer_life(broker: Broker) -> Any:
    """Consumer group: a member joins, sends heartbeats, is described and leaves."""
    group = Group(broker, "life", life=3)
    member = Consumer(group, "m")
    steps = [member.join(), member.report(), member.beat(), member.report_owned(), *group.described()]
    groups = broker.ask(Key.LIST_GROUPS, 5, {"types_filter": ["consumer"]})["groups"]
    steps += [listing for listing in groups if listing["group_id"] == group.name]
    steps.append(broker.ask(Key.DESCRIBE_GROUPS, 6, {"groups": [group.name]}))
    steps.append(broker.ask(Key.DELETE_GROUPS, 2, {"groups_names": [group.name]}))
    steps += [member.leave(), member.beat(), member.leave(), *group.described()]
    return [*steps, broker.ask(Key.DELETE_GROUPS, 2, {"groups_names": [group.name]}), member.beat()]


def consumer_share(broker: Broker) -> Any:
    """Consumer group: a second member gets the partitions that the first has revoked."""
    group = Group(broker, "share", share=4)
    first, second = Consumer(group, "m1"), Consumer(group, "m2")
    steps = [first.join(), first.report(), second.join(), second.beat(), first.beat(), first.beat(), second.beat()]
    steps += [*group.described(), first.report(), second.report(), second.report(), first.beat()]
    return [*steps, *group.described(), second.leave(), *group.described(), first.report(), first.leave()]


def consumer_epochs(broker: Broker) -> Any:
    """Consumer group: epochs that are not the member's, and joining again."""
    group = Group(broker, "epochs", epochs=2)
    first, second = Consumer(group, "m1"), Consumer(group, "m2")
    steps = [first.join(), first.report(), second.join(), first.beat(), first.report(), second.report()]
    for epoch in (first.epoch - 1, first.epoch + 1):
        steps += [first.beat(member_epoch=epoch), first.beat(member_epoch=epoch, topic_partitions=[])]
    steps += [first.beat(member_epoch=first.epoch - 1, topic_partitions=first.owned)]
    steps += [second.beat(member_id="m3"), first.join(), first.report(), second.beat()]
    return [*steps, *group.described(), first.leave(), second.leave()]


def consumer_static(broker: Broker) -> Any:
    """Consumer group: a static member leaves temporarily, and its next process joins."""
    group = Group(broker, "static", static=2)
    first, second = Consumer(group, "m1", instance_id="one"), Consumer(group, "m2", instance_id="one")
    steps = [first.join(), first.report(), second.join(), second.leave(), first.leave(-2), *group.described()]
    steps += [second.join(), second.report(), first.beat(instance_id="one"), first.beat(), first.leave(-2)]
    return [*steps, second.beat(instance_id="two"), *group.described(), second.leave()]


def consumer_topics(broker: Broker) -> Any:
    """Consumer group: other topics, topics that are not there, no topics at all."""
    group = Group(broker, "topics", topics=2, others=1)
    topic, other = group.topics
    member = Consumer(group, "m", topic)
    steps = [
        member.join(),
        member.report(),
        member.report_owned(subscribed_topic_names=[topic, other]),
        member.report(),
    ]
    steps += [member.report_owned(subscribed_topic_names=[other]), member.report(), member.beat()]
    steps += [member.report_owned(subscribed_topic_names=["not-there"]), member.report(), member.beat()]
    return [*steps, member.report_owned(subscribed_topic_names=[]), member.report(), *group.described(), member.leave()]


def consumer_assignors(broker: Broker) -> Any:
    """Consumer group: the assignor that most members want."""
    group = Group(broker, "assignors", assignors=2)
    members = [Consumer(group, f"m{number}", server_assignor="range") for number in range(2)]
    other = Consumer(group, "other", server_assignor="uniform")
    steps = [member.join() for member in (other, *members)]
    return [*steps, group.described()[0]["assignor_name"], *(member.leave() for member in (other, *members))]


def consumer_offsets(broker: Broker) -> Any:
    """Consumer group: commits and fetches with epochs, and by others."""
    group = Group(broker, "offsets", offsets=1)
    (topic,) = group.topics
    member = Consumer(group, "m")
    member.join()

    def commit(version: int, epoch: int, member_id: str) -> Any:
        partition = {"partition_index": 0, "committed_offset": 5, "committed_metadata": ""}
        values = {"group_id": group.name, "generation_id_or_member_epoch": epoch, "member_id": member_id}
        body = {**values, "topics": [{"name": topic, "partitions": [partition]}]}
        return broker.ask(Key.OFFSET_COMMIT, version, body)["topics"][0]["partitions"]

    def fetch(epoch: int, member_id: str | None) -> Any:
        topics = [{"name": topic, "partition_indexes": [0]}]
        body = {"group_id": group.name, "member_id": member_id, "member_epoch": epoch, "topics": topics}
        return broker.ask(Key.OFFSET_FETCH, 9, {"groups": [body]})["groups"][0]["error_code"]

    steps = [commit(9, epoch, "m") for epoch in (member.epoch, member.epoch + 1, -1)]
    steps += [commit(8, member.epoch, "m"), commit(9, member.epoch, "stranger"), commit(9, -1, "")]
    steps += [fetch(member.epoch, "m"), fetch(member.epoch + 1, "m"), fetch(member.epoch, "stranger"), fetch(-1, None)]
    forget = {"group_id": group.name, "topics": [{"name": topic, "partitions": [{"partition_index": 0}]}]}
    steps += [broker.ask(Key.OFFSET_DELETE, 0, forget), member.leave(), commit(9, -1, ""), commit(9, 1, "m")]
    return [*steps, broker.ask(Key.OFFSET_DELETE, 0, forget)]


def consumer_older_epochs(broker: Broker) -> Any:
    """Consumer group: commits of a member that has not heard of its newest epoch."""
    group = Group(broker, "older", older=4)
    first, second = Consumer(group, "m1"), Consumer(group, "m2")
    first.join()
    first.report()
    before, all_of_it = first.epoch, _numbers(first)

    def commit(member: Consumer, epoch: int, numbers: set[int]) -> Any:
        partitions = [
            {"partition_index": number, "committed_offset": 5, "committed_metadata": ""} for number in sorted(numbers)
        ]
        values = {"group_id": group.name, "generation_id_or_member_epoch": epoch, "member_id": member.member}
        body = {**values, "topics": [{"name": group.topics[0], "partitions": partitions}]}
        response = broker.ask(Key.OFFSET_COMMIT, 9, body)["topics"][0]["partitions"]
        return sorted(response_part["error_code"] for response_part in response)

    second.join()
    first.beat()
    kept_numbers = _numbers(first)
    steps = [commit(first, before, kept_numbers), commit(first, before, all_of_it - kept_numbers)]
    steps += [first.report(), second.report(), second.report()]
    steps += [commit(first, epoch, kept_numbers) for epoch in (before, first.epoch, before - 1, first.epoch + 1)]
    steps += [commit(first, before, all_of_it - kept_numbers), commit(second, before, all_of_it - kept_numbers)]
    steps += [commit(first, before, all_of_it), commit(second, second.epoch, all_of_it - kept_numbers)]
    return [*steps, first.leave(), second.leave()]


def _numbers(member: Consumer) -> set[int]:
    return {number for topic in member.assigned for number in topic["partitions"]}


def consumer_takes_over(broker: Broker) -> Any:
    """Consumer group: a classic group is taken over while it lives, and given back."""
    group = Group(broker, "takes-over")
    old, new = Member(broker, group.name), Consumer(group, "new", TOPIC)
    steps: list[Any] = [old.join(), old.sync(), old.beat(), new.join(), old.beat(), *group.described()]
    steps += [old.join(), old.sync(), old.beat(), new.report(), new.report(), old.beat(), *group.described()]
    steps += [old.beat(generation=99), old.beat(member="stranger"), old.commit(), old.commit(generation=99)]
    steps += [new.leave(), old.beat()]
    described = broker.ask(Key.DESCRIBE_GROUPS, 6, {"groups": [group.name]})["groups"][0]
    return [*steps, described["error_code"], described["group_state"], old.leave()]


def consumer_converts(broker: Broker) -> Any:
    """Consumer group: empty groups change their protocol."""
    group = Group(broker, "converts", converts=1)
    old, new = Member(broker, group.name), Consumer(group, "new")
    steps: list[Any] = [old.join(), old.sync(), old.leave(), new.join(), *group.described(), new.leave()]
    back = Member(broker, group.name)
    return [*steps, back.join(), back.sync(), *group.described()[:1], new.beat(), back.leave()]


def consumer_refused_takeover(broker: Broker) -> Any:
    """Consumer group: a classic group of another protocol type is not converted."""
    group = Group(broker, "refused")
    old, new = Member(broker, group.name), Consumer(group, "new", TOPIC)
    return [old.join(kind="connect"), old.sync(), new.join(), old.beat(), old.leave()]


DIALOGUES: Final[tuple[Callable[[Broker], Any], ...]] = (
    *(consumer_life, consumer_share, consumer_epochs, consumer_static, consumer_topics, consumer_assignors),
    *(consumer_offsets, consumer_older_epochs, consumer_takes_over, consumer_converts, consumer_refused_takeover),
)
