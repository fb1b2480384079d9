"""Questions of members of share groups that build on the responses before them."""

from __future__ import annotations

import time
import uuid
from base64 import urlsafe_b64encode
from collections.abc import Callable
from typing import Any, Final, Self

from conformance.dialogues import Member
from conformance.question import Broker, receive_frame
from conformance.questions.asking import NOWHERE, UNKNOWN_ID, Key, batch, new_topic, produced

_ROUNDS_MAX: Final = 100
_ACCEPT, _RELEASE, _REJECT, _RENEW = 1, 2, 3, 4
_GROUP_RESOURCE: Final = 32


class Line(Broker):
    """One connection for all questions: a share session ends with its connection."""

    def __init__(self, broker: Broker) -> None:
        super().__init__(broker.address)
        self._connection = broker.connected()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._connection.close()

    def send(self, frame: bytes) -> bytes | str:
        """Send a frame over the one connection, and receive another."""
        self._connection.sendall(frame)
        return receive_frame(self._connection)


class ShareGroup:
    """A share group of one topic with some messages."""

    def __init__(self, broker: Broker, name: str, *, messages: int = 10, partitions: int = 1) -> None:
        self.broker = broker
        self.name = f"share-{name}"
        self.topic = f"shared-{name}"
        body = {"timeout": 10000, "topics": [new_topic(self.topic, partitions)]}
        broker.ask(Key.CREATE_TOPICS, 5, body)
        for _ in range(messages):
            broker.ask(Key.PRODUCE, 9, produced(batch(), topic=self.topic))
        self.set("share.auto.offset.reset", "earliest")
        broker.ask(Key.FIND_COORDINATOR, 3, {"key": self.name, "key_type": 0})
        described = broker.ask(Key.METADATA, 12, {"topics": [{"topic_id": None, "name": self.topic}]})
        self.topic_id = uuid.UUID(described["topics"][0]["topic_id"])

    def set(self, name: str, value: str) -> Any:
        """Change a setting of the group."""
        change = {"name": name, "config_operation": 0, "value": value}
        resource = {"resource_type": _GROUP_RESOURCE, "resource_name": self.name, "configs": [change]}
        return self.broker.ask(Key.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": [resource], "validate_only": False})

    def described(self) -> Any:
        """The group as ShareGroupDescribe has it."""
        body = {"group_ids": [self.name], "include_authorized_operations": False}
        response = self.broker.ask(Key.SHARE_GROUP_DESCRIBE, 1, body)["groups"][0]
        members = [
            [
                member["subscribed_topic_names"],
                [topic["partitions"] for topic in member["assignment"]["topic_partitions"]],
            ]
            for member in response["members"]
        ]
        return [response["error_code"], response["group_state"], response["assignor_name"], str(sorted(members))]

    def offsets(self, partitions: list[int] | None = None, topic: str | None = None) -> Any:
        """Return the offsets of the group."""
        topics = None if partitions is None else [{"topic_name": topic or self.topic, "partitions": partitions}]
        group = {"group_id": self.name, "topics": topics}
        return _short(self.broker.ask(Key.DESCRIBE_SHARE_GROUP_OFFSETS, 0, {"groups": [group]})["groups"][0])

    def move(self, offset: int, partition: int = 0, topic: str | None = None) -> Any:
        """Move the group to another offset."""
        place = {"partition_index": partition, "start_offset": offset}
        topics = [{"topic_name": topic or self.topic, "partitions": [place]}]
        return _short(self.broker.ask(Key.ALTER_SHARE_GROUP_OFFSETS, 0, {"group_id": self.name, "topics": topics}))

    def forget(self, topic: str | None = None) -> Any:
        """Forget where the group is."""
        topics = [{"topic_name": topic or self.topic}]
        return _short(self.broker.ask(Key.DELETE_SHARE_GROUP_OFFSETS, 0, {"group_id": self.name, "topics": topics}))


class Sharer:
    """A member of a share group, one request at a time."""

    def __init__(self, group: ShareGroup, line: Broker) -> None:
        self.group = group
        self.line = line
        self.member = urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        self.epoch = 0
        self.first_epoch = 0
        self.session = 0

    def beat(self, **more: Any) -> Any:
        """A heartbeat; the first joins."""
        body: dict[str, Any] = {"group_id": self.group.name, "member_id": self.member, "member_epoch": self.epoch}
        if body["member_epoch"] == 0:
            body["subscribed_topic_names"] = [self.group.topic]
        response = self.line.ask(Key.SHARE_GROUP_HEARTBEAT, 1, {**body, **more})
        if response["error_code"] == "none":
            self.epoch = response["member_epoch"]
        compared = response["assignment"]
        numbers = (
            None
            if compared is None
            else sorted(number for partition in compared["topic_partitions"] for number in partition["partitions"])
        )
        return [
            response["error_code"],
            "positive" if response["member_epoch"] > 0 else response["member_epoch"],
            str(numbers),
        ]

    def join(self) -> None:
        """Join, and wait until the partitions are there: Kafka first makes their states."""
        for _ in range(_ROUNDS_MAX):
            if self.beat(subscribed_topic_names=[self.group.topic])[2] not in ("None", "[]"):
                return
            time.sleep(0.1)
        raise TimeoutError(f"{self.group.name} got no partition")

    def fetch(self, *batches: Any, version: int = 2, **more: Any) -> Any:
        """Ask for messages of the first partition, and acknowledge earlier ones."""
        return _fetched(self.ask_for(*batches, version=version, **more))

    def ask_for(self, *batches: Any, version: int = 2, **more: Any) -> Any:
        """The same, with the whole response."""
        body = self._asked(batches, opens=self.session == 0)
        limits = {"max_wait": 500, "min_bytes": 1, "max_bytes": 1 << 20, "max_records": 500, "batch_size": 500}
        response = self.line.ask(Key.SHARE_FETCH, version, {**body, **limits, "forgotten_topics_data": [], **more})
        if response["error_code"] == "none":
            self.session = body["share_session_epoch"] + 1 if "share_session_epoch" not in more else self.session
        return response

    def until(self, count: int, **more: Any) -> Any:
        """Fetch until so many messages are this member's."""
        batches: list[Any] = []
        for _ in range(_ROUNDS_MAX):
            response = self.ask_for(**more)
            for partition in (partition for topic in response["responses"] for partition in topic["partitions"]):
                batches += [
                    [r["first_offset"], r["last_offset"], r["delivery_count"]] for r in partition["acquired_records"]
                ]
            if sum(last - first + 1 for first, last, _ in batches) >= count:
                return _merged(batches)
        raise TimeoutError(f"{self.group.name} got {batches}")

    def acknowledge(self, *batches: Any, version: int = 2, **more: Any) -> Any:
        """Acknowledge without asking for more."""
        response = self.line.ask(Key.SHARE_ACKNOWLEDGE, version, {**self._asked(batches), **more})
        if response["error_code"] == "none" and "share_session_epoch" not in more:
            self.session += 1
        partitions = [partition for topic in response["responses"] for partition in topic["partitions"]]
        return [response["error_code"], *(partition["error_code"] for partition in partitions)]

    def _asked(self, batches: Any, *, opens: bool = False) -> dict[str, Any]:
        named = [
            {"first_offset": first, "last_offset": last, "acknowledge_types": list(types)}
            for first, last, *types in batches
        ]
        partition = {"partition_index": 0, "acknowledgement_batches": named}
        topic = {"topic_id": self.group.topic_id, "partitions": [partition]}
        return {
            "group_id": self.group.name,
            "member_id": self.member,
            "share_session_epoch": self.session,
            "topics": [topic] if batches or opens else [],
        }


def _fetched(response: Any) -> Any:
    compared = [response["error_code"]]
    for partition in (partition for topic in response["responses"] for partition in topic["partitions"]):
        ranges = _merged(
            [[r["first_offset"], r["last_offset"], r["delivery_count"]] for r in partition["acquired_records"]]
        )
        compared.append(
            [partition["partition_index"], partition["error_code"], partition["acknowledge_error_code"], ranges]
        )
    return str(compared)


def _merged(ranges: list[Any]) -> str:
    """Ranges that follow each other, as one: where they are cut is up to the broker."""
    merged: list[Any] = []
    for first, last, count in ranges:
        if merged and merged[-1][1] + 1 == first and merged[-1][2] == count:
            merged[-1][1] = last
        else:
            merged.append([first, last, count])
    return str(merged)


def _short(response: Any) -> str:
    """A response about offsets: only codes and numbers."""
    if isinstance(response, dict):
        names = ("error_code", "start_offset", "partition_index")
        lists = [_short(value) for value in response.values() if isinstance(value, list)]
        return str([*(f"{name} {response[name]}" for name in names if name in response), *lists])
    return str([_short(step) for step in response])


def share_life(broker: Broker) -> Any:
    """Share group: a member joins, sends heartbeats and leaves; refused requests."""
    group = ShareGroup(broker, "life")
    one, stranger = Sharer(group, broker), Sharer(group, broker)
    steps: list[Any] = [group.described(), one.beat(member_epoch=-1), one.beat(member_epoch=3)]
    one.join()
    steps += [one.beat(), one.beat(member_epoch=77), one.beat(member_epoch=-2), stranger.beat(member_epoch=1)]
    steps += [stranger.beat(member_epoch=-1), stranger.beat(subscribed_topic_names=None), group.described()]
    steps += [one.beat(member_id=""), one.beat(group_id=""), stranger.beat(subscribed_topic_names=[])]
    steps += [one.beat(member_epoch=0, subscribed_topic_names=[group.topic])[:2], one.beat(subscribed_topic_names=[])]
    one.join()
    response = one.beat(member_epoch=-1)
    return [*steps, response, group.described(), one.beat(member_epoch=1)]


def share_sessions(broker: Broker) -> Any:
    """Share session: opened, counted, gone on with, closed."""
    group = ShareGroup(broker, "sessions")
    with Line(broker) as line:
        sharer = Sharer(group, line)
        sharer.join()
        steps: list[Any] = [sharer.fetch(share_session_epoch=5), sharer.fetch(share_session_epoch=-1, topics=[])]
        steps += [
            sharer.fetch((0, 1, _ACCEPT)),
            sharer.acknowledge((0, 1, _ACCEPT)),
            sharer.acknowledge(share_session_epoch=4),
        ]
        steps += [sharer.acknowledge(share_session_epoch=-1), sharer.until(10), sharer.fetch(share_session_epoch=99)]
        steps += [sharer.acknowledge((0, 1, _ACCEPT), share_session_epoch=99), sharer.fetch((0, 4, _ACCEPT))]
        steps += [
            sharer.acknowledge((5, 5, _RELEASE)),
            sharer.fetch(share_session_epoch=-2),
            sharer.fetch(max_records=-1),
        ]
        steps += [sharer.fetch(member_id=""), sharer.fetch(group_id="")]
        steps += [sharer.acknowledge((6, 6, _ACCEPT), share_session_epoch=-1), sharer.fetch((7, 7, _ACCEPT))]
        sharer.session = 0
        # All four that are left, since a broker may give them in several responses.
        return [*steps, sharer.until(4), sharer.fetch((7, 7, _ACCEPT), share_session_epoch=-1), sharer.fetch()]


def share_session_renewed(broker: Broker) -> Any:
    """Share session: when it is reopened, the member keeps its acquired messages."""
    group = ShareGroup(broker, "renewed")
    with Line(broker) as line:
        sharer = Sharer(group, line)
        sharer.join()
        got = sharer.until(10)
        sharer.session = 0
        opened = sharer.ask_for(max_wait=0)["error_code"]
        return [got, opened, sharer.fetch((0, 9, _ACCEPT), max_wait=0)]


def share_connection_ends(broker: Broker) -> Any:
    """Share session: it ends with its connection, and others get the messages of the member."""
    group = ShareGroup(broker, "disconnect")
    with Line(broker) as line:
        two = Sharer(group, line)
        with Line(broker) as short:
            sharer = Sharer(group, short)
            sharer.join()
            steps: list[Any] = [sharer.until(10)]
        two.join()
        steps.append(two.until(10))
        sharer.line = line
        return [*steps, sharer.fetch(max_wait=0), sharer.acknowledge((0, 0, _ACCEPT))]


def share_acknowledgements(broker: Broker) -> Any:
    """Share acknowledge: which acknowledgements are taken."""
    group = ShareGroup(broker, "acknowledgements", messages=40)
    wrong: list[list[tuple[int, ...]]] = [
        [(3, 2, _ACCEPT)],
        [(4, 5, _ACCEPT), (0, 1, _ACCEPT)],
        [(0, 1)],
        [(0, 2, _ACCEPT, _ACCEPT)],
        [(0, 0, 5)],
        [(0, 0, -1)],
        [(0, 0, _RENEW)],
        [(100, 101, _ACCEPT)],
        [(39, 40, _ACCEPT)],
        [(0, 39, _ACCEPT, _ACCEPT)],
    ]
    with Line(broker) as line:
        one, two = Sharer(group, line), Sharer(group, line)
        one.join()
        steps: list[Any] = [one.until(40)]
        for batches in wrong:
            steps += [one.acknowledge(*batches), one.acknowledge(*batches, version=1)]
            steps += [one.fetch(*batches, max_wait=0), one.fetch(*batches, version=1, max_wait=0)]
        steps += [one.acknowledge((1, 3, _ACCEPT, _RELEASE, _REJECT)), one.acknowledge((1, 1, _ACCEPT))]
        steps += [one.acknowledge((4, 4, 0)), one.acknowledge((4, 4, _ACCEPT)), one.acknowledge((5, 7, 0, 1, 0))]
        steps += [one.acknowledge((8, 9, _ACCEPT), (11, 12, _RELEASE)), one.until(3)]
        steps += [
            one.acknowledge(),
            one.acknowledge((9, 12, _ACCEPT)),
            one.acknowledge((1, 1, _ACCEPT), (20, 20, _ACCEPT)),
        ]
        steps += [one.acknowledge((20, 20, _ACCEPT)), one.fetch((1, 1, _ACCEPT), (21, 21, _ACCEPT), max_wait=0)]
        steps += [one.fetch((21, 21, _ACCEPT), max_wait=0)]
        two.join()
        steps += [
            two.ask_for(max_wait=0)["error_code"],
            two.acknowledge((13, 13, _ACCEPT)),
            two.fetch((14, 14, _REJECT), max_wait=0),
        ]
        return [*steps, one.fetch((13, 13, _ACCEPT), (14, 14, _REJECT), max_wait=0)]


def share_unknown_topics(broker: Broker) -> Any:
    """Share fetch: topics and partitions that are not there."""
    group = ShareGroup(broker, "unknown")
    partition = {"partition_index": 0, "acknowledgement_batches": []}
    beyond = {"partition_index": 9, "acknowledgement_batches": []}
    one_batch = {"first_offset": 0, "last_offset": 0, "acknowledge_types": [1]}
    with Line(broker) as line:
        sharer = Sharer(group, line)
        sharer.join()
        steps: list[Any] = [sharer.fetch(topics=[{"topic_id": group.topic_id, "partitions": [beyond]}], max_wait=0)]
        nowhere = {"topic_id": UNKNOWN_ID, "partitions": [{**partition, "acknowledgement_batches": [one_batch]}]}
        steps += [sharer.acknowledge(topics=[nowhere])]
        outside = {"topic_id": group.topic_id, "partitions": [{**beyond, "acknowledgement_batches": [one_batch]}]}
        return [*steps, sharer.acknowledge(topics=[outside])]


def share_renewals(broker: Broker) -> Any:
    """Share fetch: renewals of leases."""
    group = ShareGroup(broker, "renewals")
    nothing = {"max_wait": 0, "min_bytes": 0, "max_bytes": 0, "max_records": 0}
    with Line(broker) as line:
        sharer = Sharer(group, line)
        sharer.join()
        steps: list[Any] = [sharer.until(10)]
        steps += [
            sharer.fetch((0, 4, _RENEW), is_renew_ack=True),
            sharer.fetch((0, 4, _RENEW), is_renew_ack=True, **nothing),
        ]
        steps += [sharer.fetch((0, 4, _RENEW), **nothing), sharer.acknowledge((0, 4, _RENEW), is_renew_ack=True)]
        steps += [sharer.acknowledge((0, 4, _RENEW)), sharer.acknowledge((0, 1, _RENEW, _ACCEPT), is_renew_ack=True)]
        steps += [
            sharer.acknowledge((0, 4, _ACCEPT), is_renew_ack=True),
            sharer.acknowledge((5, 5, _ACCEPT), is_renew_ack=True),
        ]
        steps += [sharer.fetch((6, 6, _ACCEPT), is_renew_ack=True, **nothing)]
        sharer.session = 0
        return [*steps, sharer.fetch(is_renew_ack=True, **nothing)]


def share_offsets(broker: Broker) -> Any:
    """Share group: its offsets are described, moved and deleted."""
    group = ShareGroup(broker, "offsets")
    steps: list[Any] = [group.offsets(), group.offsets([0]), group.move(3), group.forget()]
    with Line(broker) as line:
        sharer = Sharer(group, line)
        sharer.join()
        sharer.until(10)
        # Kafka reports the group's position later.
        steps += [sharer.acknowledge((0, 3, _ACCEPT))]
        steps += [group.move(3), group.forget(), sharer.fetch(share_session_epoch=-1, topics=[])]
        sharer.beat(member_epoch=-1)
    steps += [group.move(2), group.offsets(), group.move(2, partition=9), group.move(2, topic=NOWHERE)]
    steps += [group.forget(NOWHERE), group.forget(), group.offsets([0]), group.offsets()]
    with Line(broker) as line:
        two = Sharer(group, line)
        two.join()
        return [*steps, two.until(10)]


def share_beside_others(broker: Broker) -> Any:
    """Share group: other requests with its id, and its requests with ids of other groups."""
    group = ShareGroup(broker, "others")
    sharer = Sharer(group, broker)
    sharer.join()
    classic = Member(broker, group.name)
    steps: list[Any] = [classic.join()["error_code"]]
    beat = {"group_id": group.name, "member_id": "m", "member_epoch": 0, "rebalance_timeout": 60000}
    beat |= {"subscribed_topic_names": [group.topic], "topic_partitions": []}
    steps += [broker.ask(Key.CONSUMER_GROUP_HEARTBEAT, 1, beat)["error_code"]]
    compared = broker.ask(Key.DESCRIBE_GROUPS, 6, {"groups": [group.name]})["groups"][0]
    steps += [compared["error_code"], compared["group_state"]]
    compared = broker.ask(Key.DESCRIBE_GROUPS, 5, {"groups": [group.name]})["groups"][0]
    steps += [compared["error_code"], compared["group_state"]]
    body = {"group_ids": [group.name], "include_authorized_operations": False}
    steps += [broker.ask(Key.CONSUMER_GROUP_DESCRIBE, 1, body)["groups"][0]["error_code"]]
    for types in ([], ["share"], ["SHARE"], ["consumer"]):
        groups = broker.ask(Key.LIST_GROUPS, 5, {"states_filter": [], "types_filter": types})["groups"]
        steps += [str([dict(listing) for listing in groups if listing["group_id"] == group.name])]
    commit = {"group_id": group.name, "generation_id_or_member_epoch": -1, "member_id": "", "topics": []}
    topic = {
        "name": group.topic,
        "partitions": [{"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}],
    }
    response = broker.ask(Key.OFFSET_COMMIT, 8, {**commit, "topics": [topic]})
    steps += [response["topics"][0]["partitions"][0]["error_code"]]
    deleted = {"groups_names": [group.name]}
    steps += [broker.ask(Key.DELETE_GROUPS, 2, deleted)["results"][0]["error_code"]]
    sharer.beat(member_epoch=-1)
    steps += [broker.ask(Key.DELETE_GROUPS, 2, deleted)["results"][0]["error_code"], group.described()]
    other = ShareGroup(broker, "classic")
    member = Member(broker, other.name)
    member.join()
    two = Sharer(other, broker)
    steps += [two.beat(), other.described(), other.move(1), other.forget()]
    member.leave()
    return [*steps, two.beat()[0]]


def share_settings(broker: Broker) -> Any:
    """Share group: its settings."""
    group = ShareGroup(broker, "settings")
    settings = [
        *(
            ("share.auto.offset.reset", "latest"),
            ("share.auto.offset.reset", "never"),
            ("share.isolation.level", "none"),
        ),
        *(("share.record.lock.duration.ms", "20000"), ("share.record.lock.duration.ms", "1")),
        *(("share.session.timeout.ms", "50000"), ("share.heartbeat.interval.ms", "6000"), ("share.nothing", "1")),
        *(("share.delivery.count.limit", "3"), ("share.delivery.count.limit", "1000")),
    ]
    return [f"{name} {group.set(name, value)['responses'][0]['error_code']}" for name, value in settings]


DIALOGUES: Final[tuple[Callable[[Broker], Any], ...]] = (
    *(share_life, share_sessions, share_session_renewed, share_connection_ends, share_acknowledgements),
    *(share_unknown_topics, share_renewals, share_offsets, share_beside_others, share_settings),
)
