"""Questions that build on the answers before them. The docstring of each is its name."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from typing import Any, Final

from conformance.question import Broker
from conformance.questions.asking import TOPIC, Key, batch, new_topic, produced

_SUBSCRIPTION: Final = b"\x00\x01\x00\x00\x00\x01\x00\x07fixture\xff\xff\xff\xff"
_ASSIGNMENT: Final = b"\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff"
_names = count()


def _fresh_topic(broker: Broker) -> str:
    name = f"dialogue-{next(_names)}"
    broker.ask(Key.CREATE_TOPICS, 5, {"timeout": 10000, "topics": [new_topic(name)]})
    return name


def _write(broker: Broker, topic: str, producer: tuple[int, int], sequence: int, records: int = 1) -> Any:
    producer_id, epoch = producer
    data = batch(records, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence)
    answer = broker.ask(Key.PRODUCE, 9, produced(data, topic=topic))
    outcome = answer["responses"][0]["partition_responses"][0]
    return outcome["error_code"], outcome["base_offset"]


def _producer_id(broker: Broker) -> int:
    answer = broker.ask(Key.INIT_PRODUCER_ID, 4, {"transactional_id": None, "transaction_timeout": 60000})
    return int(answer["producer_id"])


def sequences(broker: Broker) -> Any:
    """Idempotent producer: repeats, gaps, and repeats of what is long ago."""
    topic, producer = _fresh_topic(broker), (_producer_id(broker), 0)
    steps = [0, 0, 1, 1, 0, 3, 2, 3, 4, 5, 6, 1, 0, 6, 7]
    return [_write(broker, topic, producer, sequence) for sequence in steps]


def lengths(broker: Broker) -> Any:
    """Idempotent producer: the same sequence with another number of records."""
    topic, producer = _fresh_topic(broker), (_producer_id(broker), 0)
    return [_write(broker, topic, producer, *step) for step in ((0, 3), (0, 2), (1, 2), (2, 1), (3, 1))]


def epochs(broker: Broker) -> Any:
    """Idempotent producer: a newer epoch begins anew, the older one is fenced."""
    topic, number = _fresh_topic(broker), _producer_id(broker)
    steps = [(0, 0), (0, 1), (1, 5), (1, 0), (0, 2), (1, 1), (3, 0), (2, 0)]
    return [_write(broker, topic, (number, epoch), sequence) for epoch, sequence in steps]


class Member:
    """A member of a group, one request at a time."""

    def __init__(self, broker: Broker, group: str, instance: str | None = None) -> None:
        self.broker = broker
        self.group = group
        self.instance = instance
        self.id = ""
        self.generation = -1

    def join(self, version: int = 7, protocol: str = "range", kind: str = "consumer") -> Any:
        """Join, and join again where the broker first gives out an id."""
        answer = self._join(version, protocol, kind)
        if answer["error_code"] == "member_id_required":
            self.id = answer["member_id"]
            answer = self._join(version, protocol, kind)
        if answer["error_code"] == "none":
            self.id, self.generation = answer["member_id"], answer["generation_id"]
        fields = {name: answer[name] for name in ("error_code", "generation_id", "protocol_name")}
        return {**fields, "is_leader": answer["leader"] == self.id, "members": len(answer["members"])}

    def _join(self, version: int, protocol: str, kind: str) -> Any:
        values: dict[str, Any] = {
            "group_id": self.group,
            "session_timeout": 10000,
            "rebalance_timeout": 10000,
            "member_id": self.id,
            "protocol_type": kind,
            "protocols": [{"name": protocol, "metadata": _SUBSCRIPTION}],
        }
        return self.broker.ask(Key.JOIN_GROUP, version, values | {"group_instance_id": self.instance})

    def _me(self, generation: int | None, member: str | None = None) -> dict[str, Any]:
        number = self.generation if generation is None else generation
        name = self.id if member is None else member
        return {"group_id": self.group, "generation_id": number, "member_id": name, "group_instance_id": self.instance}

    def sync(self, generation: int | None = None, member: str | None = None) -> Any:
        """Hand in an assignment for oneself, as the leader does."""
        assignments = [{"member_id": self.id, "assignment": _ASSIGNMENT}]
        return self.broker.ask(Key.SYNC_GROUP, 3, self._me(generation, member) | {"assignments": assignments})

    def beat(self, generation: int | None = None, member: str | None = None) -> Any:
        """Send a heartbeat."""
        return self.broker.ask(Key.HEARTBEAT, 3, self._me(generation, member))["error_code"]

    def commit(self, generation: int | None = None, member: str | None = None) -> Any:
        """Commit an offset."""
        me = self._me(generation, member)
        me["generation_id_or_member_epoch"] = me.pop("generation_id")
        partitions = [{"partition_index": 0, "committed_offset": 2, "committed_metadata": ""}]
        return self.broker.ask(Key.OFFSET_COMMIT, 7, me | {"topics": [{"name": TOPIC, "partitions": partitions}]})

    def leave(self, member: str | None = None) -> Any:
        """Leave the group."""
        members = [{"member_id": self.id if member is None else member, "group_instance_id": self.instance}]
        return self.broker.ask(Key.LEAVE_GROUP, 3, {"group_id": self.group, "members": members})


def life(broker: Broker) -> Any:
    """Group: join, sync, beat, commit, leave."""
    member = Member(broker, "dialogue-life")
    steps: list[Any] = [member.join(), member.sync(), member.beat(), member.commit(), member.leave(), member.beat()]
    return [*steps, broker.ask(Key.DESCRIBE_GROUPS, 5, {"groups": ["dialogue-life"]})]


def wrong_generation(broker: Broker) -> Any:
    """Group: requests with a generation and a member that are not."""
    member = Member(broker, "dialogue-generation")
    steps: list[Any] = [member.join(), member.sync(generation=7), member.sync(member="m"), member.sync()]
    steps += [
        member.beat(generation=7),
        member.beat(member="m"),
        member.commit(generation=7),
        member.commit(member="m"),
    ]
    return [*steps, member.commit(generation=-1, member=""), member.leave(member="m"), member.leave()]


def before_sync(broker: Broker) -> Any:
    """Group: heartbeat, commit and description before the assignment."""
    member = Member(broker, "dialogue-early")
    steps: list[Any] = [member.join(), member.beat(), member.commit()]
    described = broker.ask(Key.DESCRIBE_GROUPS, 5, {"groups": ["dialogue-early"]})["groups"][0]
    return [*steps, described["group_state"], described["protocol_data"], member.sync(), member.leave()]


def other_protocol(broker: Broker) -> Any:
    """Group: a second member without a protocol in common."""
    first, second = Member(broker, "dialogue-protocol"), Member(broker, "dialogue-protocol")
    steps: list[Any] = [first.join(), first.sync(), second.join(protocol="other"), second.join(kind="connect")]
    return [*steps, first.beat(), first.leave()]


def static(broker: Broker) -> Any:
    """Group: a static member comes back, the one before it is fenced."""
    first = Member(broker, "dialogue-static", "one")
    steps: list[Any] = [first.join(), first.sync()]
    back = Member(broker, "dialogue-static", "one")
    steps += [back.join(), back.beat(), first.beat(), first.commit(), first.sync(), first.leave()]
    return [*steps, back.commit(), back.leave(), back.beat()]


def rejoin(broker: Broker) -> Any:
    """Group: the leader joins again."""
    member = Member(broker, "dialogue-rejoin")
    return [member.join(), member.sync(), member.join(), member.beat(), member.sync(), member.leave()]


def deletion(broker: Broker) -> Any:
    """Group: deleted while in use, then when empty; offsets of a topic in use."""
    group = "dialogue-deletion"
    member = Member(broker, group)
    forget = {"group_id": group, "topics": [{"name": TOPIC, "partitions": [{"partition_index": 0}]}]}
    steps: list[Any] = [member.join(), member.sync(), member.commit()]
    steps.append(broker.ask(Key.DELETE_GROUPS, 2, {"groups_names": [group]}))
    steps.append(broker.ask(Key.OFFSET_DELETE, 0, forget))
    steps.append(member.leave())
    steps.append(broker.ask(Key.OFFSET_DELETE, 0, forget))
    return [
        *steps,
        broker.ask(Key.DELETE_GROUPS, 2, {"groups_names": [group]}),
        member.commit(generation=-1, member=""),
    ]


DIALOGUES: Final[tuple[Callable[[Broker], Any], ...]] = (
    *(sequences, lengths, epochs),
    *(life, wrong_generation, before_sync, other_protocol, static, rejoin, deletion),
)
