"""Questions that build on the responses before them. The docstring of each is its name."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from typing import Any, Final

from conformance.question import Broker
from conformance.questions.asking import TOPIC, Key, batch, new_topic, produced

_SUBSCRIPTION: Final = b"\x00\x01\x00\x00\x00\x01\x00\x07fixture\xff\xff\xff\xff"
_ASSIGNMENT: Final = b"\x00\x00\x00\x00\x00\x00\xff\xff\xff\xff"
_SIZES: Final = (1000, 500)
_NODE_KIND, _GROUP_KIND = 4, 32
_NODE_SETTINGS: Final = (
    *("auto.create.topics.enable", "broker.rack", "compression.type", "default.replication.factor"),
    *("group.consumer.heartbeat.interval.ms", "group.consumer.session.timeout.ms", "group.max.size"),
    *("log.cleanup.policy", "log.dirs", "log.message.timestamp.type", "log.retention.bytes", "log.retention.ms"),
    *("log.roll.ms", "log.segment.bytes", "message.max.bytes", "min.insync.replicas", "node.id", "num.partitions"),
    *("socket.request.max.bytes", "transaction.max.timeout.ms", "unclean.leader.election.enable"),
)
_names = count()


def _fresh_topic(broker: Broker) -> str:
    name = f"dialogue-{next(_names)}"
    broker.ask(Key.CREATE_TOPICS, 5, {"timeout": 10000, "topics": [new_topic(name)]})
    return name


def _write(broker: Broker, topic: str, producer: tuple[int, int], sequence: int, records: int = 1) -> Any:
    producer_id, epoch = producer
    data = batch(records, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence)
    response = broker.ask(Key.PRODUCE, 9, produced(data, topic=topic))
    outcome = response["responses"][0]["partition_responses"][0]
    return outcome["error_code"], outcome["base_offset"]


def _producer_id(broker: Broker) -> int:
    response = broker.ask(Key.INIT_PRODUCER_ID, 4, {"transactional_id": None, "transaction_timeout": 60000})
    return int(response["producer_id"])


def sequences(broker: Broker) -> Any:
    """Idempotent producer: repeated batches, gaps, and repetitions of much older batches."""
    topic, producer = _fresh_topic(broker), (_producer_id(broker), 0)
    steps = [0, 0, 1, 1, 0, 3, 2, 3, 4, 5, 6, 1, 0, 6, 7]
    return [_write(broker, topic, producer, sequence) for sequence in steps]


def lengths(broker: Broker) -> Any:
    """Idempotent producer: the same sequence with another number of records."""
    topic, producer = _fresh_topic(broker), (_producer_id(broker), 0)
    return [_write(broker, topic, producer, *step) for step in ((0, 3), (0, 2), (1, 2), (2, 1), (3, 1))]


def epochs(broker: Broker) -> Any:
    """Idempotent producer: a newer epoch starts at sequence 0, the older one is fenced."""
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
        """Join, and join again if the broker first assigns an id."""
        response = self._join(version, protocol, kind)
        if response["error_code"] == "member_id_required":
            self.id = response["member_id"]
            response = self._join(version, protocol, kind)
        if response["error_code"] == "none":
            self.id, self.generation = response["member_id"], response["generation_id"]
        fields = {name: response[name] for name in ("error_code", "generation_id", "protocol_name")}
        return {**fields, "is_leader": response["leader"] == self.id, "members": len(response["members"])}

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
    """Group: join, sync, send heartbeats, commit, leave."""
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
    """Group: a static member returns, and its predecessor is fenced."""
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


def _filled_topic(broker: Broker) -> str:
    """A topic of four partitions, all but the first with a large and a small batch."""
    name = f"dialogue-{next(_names)}"
    broker.ask(Key.CREATE_TOPICS, 5, {"timeout": 10000, "topics": [new_topic(name, 4)]})
    for partition in (1, 2, 3):
        for size in _SIZES:
            _write_until_taken(broker, produced(batch(size=size), topic=name, partition=partition))
    return name


def fetch_turns(broker: Broker) -> Any:
    """Fetch: the partitions of a session take turns within a limit on bytes."""
    name = _filled_topic(broker)
    steps: list[str] = []
    partitions = [{"partition": index, "fetch_offset": 0, "partition_max_bytes": 1 << 20} for index in range(4)]
    values: dict[str, Any] = {"max_wait": 100, "min_bytes": 0, "max_bytes": 1, "session_epoch": 0}
    values["topics"] = [{"topic": name, "partitions": partitions}]
    for epoch in range(1, 8):
        response = broker.ask(Key.FETCH, 11, values)
        filled = [
            partition for topic in response["responses"] for partition in topic["partitions"] if partition["records"]
        ]
        steps.append(f"{response['error_code']} {[partition['partition_index'] for partition in filled]}")
        values.update(session_id=response["session_id"], session_epoch=epoch, topics=[])
    # Turns begin with the first response of a session here and with the second in Kafka, so each round is sorted.
    return [steps[0], sorted(steps[1:4]), sorted(steps[4:])]


def fetch_limits(broker: Broker) -> Any:
    """Fetch: which partitions may exceed the limits on bytes."""
    name = _filled_topic(broker)
    whole, first = 1 << 20, len(batch(size=_SIZES[0]))
    limits = [(whole, whole), (0, whole), (1, whole), (whole, 0), (whole, 1), (first, whole), (first + 1, whole)]
    limits += [(2 * first, whole), (whole, first), (2 * first + 100, first), (0, 0), (whole, first - 1), (4000, 1700)]
    orders = ([0, 1, 2, 3], [3, 2, 0, 1])
    return [_fetched_bytes(broker, name, order, *limit) for limit in limits for order in orders]


def _fetched_bytes(broker: Broker, topic: str, order: list[int], max_bytes: int, of_each: int) -> Any:
    partitions = [{"partition": index, "fetch_offset": 0, "partition_max_bytes": of_each} for index in order]
    values = {"max_wait": 100, "min_bytes": 0, "max_bytes": max_bytes, "session_epoch": -1}
    response = broker.ask(Key.FETCH, 11, {**values, "topics": [{"topic": topic, "partitions": partitions}]})
    sizes = {
        partition["partition_index"]: len(partition["records"] or b"")
        for partition in response["responses"][0]["partitions"]
    }
    # Kafka also sends the beginning of a batch that does not fit; what counts is how many are whole.
    ends = [sum(len(batch(size=size)) for size in _SIZES[:count]) for count in (1, 2)]
    return [str(max_bytes), str(of_each), *(sum(sizes[index] >= end for end in ends) for index in order)]


def _write_until_taken(broker: Broker, values: dict[str, Any]) -> None:
    """Write to a topic that is new, of which Kafka's broker hears a little later."""
    for _ in range(50):
        response = broker.ask(Key.PRODUCE, 9, values)
        if response["responses"][0]["partition_responses"][0]["error_code"] == "none":
            return
        time.sleep(0.1)
    raise TimeoutError("a new topic took no records within 5 s")


def _settings(broker: Broker, kind: int, name: str, keys: list[str]) -> Any:
    """The settings of these names: their values and where these come from."""
    resources = [{"resource_type": kind, "resource_name": name, "configuration_keys": keys}]
    result = broker.ask(Key.DESCRIBE_CONFIGS, 4, {"resources": resources, "include_synonyms": True})["results"][0]
    configs = {config["name"]: config for config in result["configs"]}
    shown = ("value", "read_only", "config_source", "is_sensitive")
    return [
        result["error_code"],
        {key: {name: value[name] for name in shown} for key, value in sorted(configs.items())},
    ]


def _alter(broker: Broker, kind: int, name: str, changes: dict[str, str | None]) -> Any:
    configs = [{"name": key, "value": to, "config_operation": int(to is None)} for key, to in changes.items()]
    resources = [{"resource_type": kind, "resource_name": name, "configs": configs}]
    response = broker.ask(Key.INCREMENTAL_ALTER_CONFIGS, 1, {"resources": resources, "validate_only": False})
    return response["responses"][0]["error_code"]


def group_settings(broker: Broker) -> Any:
    """Settings of a group: defaults, set, and back to the default."""
    group, keys = "dialogue-settings", ["consumer.session.timeout.ms", "consumer.heartbeat.interval.ms"]
    steps = [_settings(broker, _GROUP_KIND, group, keys)]
    for value in ("50000", None):
        steps.append(_alter(broker, _GROUP_KIND, group, {keys[0]: value}))
        steps.append(_eventually(lambda: _settings(broker, _GROUP_KIND, group, keys), value or "45000"))
        resources = broker.ask(Key.LIST_CONFIG_RESOURCES, 1, {"resource_types": [_GROUP_KIND]})["config_resources"]
        steps.append(group in [resource["resource_name"] for resource in resources])
    return steps


def _eventually(ask: Callable[[], Any], value: str) -> Any:
    """Ask until the first setting has this value: Kafka applies changes a little later."""
    for _ in range(50):
        response = ask()
        if any(config["value"] == value for config in response[1].values()):
            break
        time.sleep(0.1)
    return response


def node_names(broker: Broker) -> Any:
    """Settings of a node that go by Kafka's names."""
    resources = [{"resource_type": _NODE_KIND, "resource_name": "1", "configuration_keys": list(_NODE_SETTINGS)}]
    result = broker.ask(Key.DESCRIBE_CONFIGS, 4, {"resources": resources})["results"][0]
    return [result["error_code"], sorted((config["name"], config["is_sensitive"]) for config in result["configs"])]


def log_dirs(broker: Broker) -> Any:
    """Replicas moved to the folder that they are in, and partitions that are not there."""
    described = broker.ask(Key.DESCRIBE_LOG_DIRS, 4, {"topics": None})["results"]
    topics = [{"name": TOPIC, "partitions": [0, 9]}, {"name": "nowhere", "partitions": [0]}]
    dirs = [{"path": described[0]["log_dir"], "topics": topics}]
    return [broker.ask(Key.ALTER_REPLICA_LOG_DIRS, version, {"dirs": dirs}) for version in (1, 2)]


DIALOGUES: Final[tuple[Callable[[Broker], Any], ...]] = (
    *(sequences, lengths, epochs),
    *(life, wrong_generation, before_sync, other_protocol, static, rejoin, deletion),
    *(fetch_limits, fetch_turns, group_settings, node_names, log_dirs),
)
