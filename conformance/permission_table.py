"""Every API × each missing permission × each single permission: the responses, and what they leave out.

    python -m conformance.permission_table [--record] [--only TEXT]

Each user has the same access rules but one: `all` may do everything, `no-topic-read` everything but that, and
`only-topic-read` nothing but that. The rules concern resources whose names begin with `p-`; nobody may use the others.
Apache Kafka and Millstream are sent the same requests, and what differs between them and `permission_responses.json` is
shown; `--record` writes Kafka's responses to that file first. `make compare` runs it, and a test holds Millstream to
the file.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import struct
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final
from uuid import UUID

from benchmarks.peers.kafka import free_address, kafka
from benchmarks.subject import PeerUnavailable
from conformance.question import CLOSED, SILENT, Broker, frame_of, read_plain_response, receive_frame
from conformance.questions.asking import Key, Question, batch, new_topic, question

from millstream.core.acl import CLUSTER_NAME, OPERATIONS, Acl, Operation, PatternType, Permission, ResourceType
from millstream.embedded import EmbeddedBroker
from millstream_testing.security import declare_security

RECORDED: Final = Path(__file__).with_name("permission_responses.json")
ADMIN: Final = "admin"
PASSWORD: Final = "a-password"
"""Of every user."""
PREFIX: Final = "p-"
TYPES: Final = (ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER, ResourceType.TRANSACTIONAL_ID)
MINE, OTHER, MISSING, OTHER_MISSING = "p-topic", "other", "p-missing", "other-missing"
"""A topic that the rules are about, one that they are not, and two that do not exist."""
GROUP, OTHER_GROUP = "p-group", "other-group"
TRANSACTION, OTHER_TRANSACTION = "p-transaction", "other-transaction"
MEMBER: Final = "mQ8f0nXHSVuZ2pXo4gYb1A"
_EVERYTHING: Final = "*"
_READY_S_MAX: Final = 60.0

Responses = dict[str, dict[str, str]]
"""By question and user."""


# -- who asks -----------------------------------------------------------------------------------------------------


def rules() -> Mapping[str, Sequence[Acl]]:
    """The users, each with its access rules."""
    everything = [_rule(kind, Operation.ALL) for kind in TYPES]
    found_rules: dict[str, Sequence[Acl]] = {"all": everything, "none": ()}
    for kind in TYPES:
        for operation in OPERATIONS[kind]:
            name = f"{kind.name}-{operation.name}".lower().replace("_", "-")
            found_rules[f"no-{name}"] = [*everything, _rule(kind, operation, Permission.DENY)]
            found_rules[f"only-{name}"] = [_rule(kind, operation)]
    return found_rules


def _rule(kind: ResourceType, operation: Operation, permission: Permission = Permission.ALLOW) -> Acl:
    is_cluster = kind is ResourceType.CLUSTER
    return Acl(
        resource_type=kind,
        resource_name=CLUSTER_NAME if is_cluster else PREFIX,
        pattern=PatternType.LITERAL if is_cluster else PatternType.PREFIXED,
        principal="",
        operation=operation,
        permission=permission,
    )


USERS: Final = tuple(rules())


class SignedIn(Broker):
    """A broker that gets the requests of one user over one connection, which is reopened when it was closed."""

    def __init__(self, address: str, user: str) -> None:
        super().__init__(address)
        self._user = user
        self._connection: socket.socket | None = None

    def close(self) -> None:
        """Hang up."""
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def send(self, frame: bytes) -> bytes | str:
        """Send a frame over the connection that is open."""
        self._connection = connection = self._connection or self.connected()
        try:
            connection.sendall(frame)
            return receive_frame(connection)
        except (ConnectionError, TimeoutError) as error:
            self.close()
            return SILENT if isinstance(error, TimeoutError) else CLOSED

    def connected(self) -> socket.socket:
        """Open a connection and sign in."""
        connection = super().connected()
        token = f"\0{self._user}\0{PASSWORD}".encode()
        handshake = struct.pack(">hhihh", 17, 1, 1, -1, 5) + b"PLAIN"
        authenticate = struct.pack(">hhihi", 36, 0, 2, -1, len(token)) + token
        for request in (handshake, authenticate):
            connection.sendall(struct.pack(">i", len(request)) + request)
            response = receive_frame(connection)
            if response[4:6] != b"\0\0":
                raise ConnectionError(f"{self._user} cannot sign in: {response!r}")
        return connection


# -- what is asked ------------------------------------------------------------------------------------------------


def _topics(*names: str, key: str = "name", **more: Any) -> list[dict[str, Any]]:
    return [{key: name, **more} for name in names]


def _both(key: str = "name", **more: Any) -> list[dict[str, Any]]:
    return _topics(MINE, OTHER, MISSING, OTHER_MISSING, key=key, **more)


def _ids(**more: Any) -> list[dict[str, Any]]:
    return [{"topic_id": "{id:p-topic}", **more}, {"topic_id": "{id:other}", **more}]


def _produce_questions() -> Iterator[Question]:
    data = [{"index": 0, "records": batch()}]
    plain = {"acks": -1, "timeout": 5000}
    yield question("topics", Key.PRODUCE, 11, **plain, topic_data=_both(partition_data=data))
    yield question("topics by id", Key.PRODUCE, 13, **plain, topic_data=_ids(partition_data=data))
    unsequenced = [{"index": 0, "records": batch(producer_id=7, producer_epoch=0, base_sequence=5)}]
    yield question("idempotent", Key.PRODUCE, 11, **plain, topic_data=_topics(MINE, partition_data=unsequenced))
    open_batch = batch(producer_id=7, producer_epoch=0, base_sequence=5, transactional=True)
    in_transaction = [{"index": 0, "records": open_batch}]
    for name in (TRANSACTION, OTHER_TRANSACTION, None):
        topics = _topics(MINE, partition_data=in_transaction)
        yield question(f"in transaction {name}", Key.PRODUCE, 11, **plain, transactional_id=name, topic_data=topics)


def _fetch_questions() -> Iterator[Question]:
    partition = [{"partition": 0, "fetch_offset": 0, "partition_max_bytes": 1000}]
    plain = {"max_wait": 0, "min_bytes": 0, "session_epoch": -1, "forgotten_topics_data": []}
    yield question("topics", Key.FETCH, 12, **plain, topics=_both("topic", partitions=partition))
    yield question("topics by id", Key.FETCH, 13, **plain, topics=_ids(partitions=partition))
    as_follower = {**plain, "replica_id": 1, "topics": _topics(OTHER, key="topic", partitions=partition)}
    yield question("as a follower", Key.FETCH, 12, **as_follower)
    in_session = {**as_follower, "session_id": 7, "session_epoch": 1, "topics": []}
    yield question("as a follower in a session", Key.FETCH, 12, **in_session)
    times = [{"partition_index": 0, "timestamp": -1}]
    yield question("topics", Key.LIST_OFFSETS, 7, replica_id=-1, isolation_level=0, topics=_both(partitions=times))
    yield question("topics", Key.LIST_OFFSETS, 1, replica_id=-1, topics=_both(partitions=times))
    epochs = [{"partition": 0, "leader_epoch": 0}]
    yield question("topics", Key.OFFSET_FOR_LEADER_EPOCH, 4, topics=_both("topic", partitions=epochs))
    offsets = [{"partition_index": 0, "offset": 0}]
    yield question("topics", Key.DELETE_RECORDS, 2, topics=_both(partitions=offsets), timeout=5000)


def _metadata_questions() -> Iterator[Question]:
    plain = {"allow_auto_topic_creation": False, "include_topic_authorized_operations": True}
    names = [{"topic_id": None, "name": name} for name in (MINE, OTHER, MISSING, OTHER_MISSING)]
    yield question("topics", Key.METADATA, 12, topics=names, **plain)
    yield question("topics", Key.METADATA, 1, topics=_topics(MINE, OTHER))
    cluster = {**plain, "include_cluster_authorized_operations": True}
    yield question("topics and cluster", Key.METADATA, 8, topics=_both(), **cluster)
    unasked = {"allow_auto_topic_creation": False, "include_topic_authorized_operations": False}
    yield question("topics, not what one may do", Key.METADATA, 12, topics=names, **unasked)
    by_id = [{"topic_id": topic["topic_id"], "name": None} for topic in _ids()]
    yield question("topics by id", Key.METADATA, 12, topics=by_id, **plain)
    yield question("all topics", Key.METADATA, 12, topics=None, **plain)
    new = [{"topic_id": None, "name": name} for name in ("p-auto-{user}", "other-auto-{user}")]
    yield question("topics to create", Key.METADATA, 12, topics=new, allow_auto_topic_creation=True)
    yield question("topics", Key.DESCRIBE_TOPIC_PARTITIONS, 0, topics=_both())
    yield question("all topics", Key.DESCRIBE_TOPIC_PARTITIONS, 0, topics=[])
    yield question("plain", Key.DESCRIBE_CLUSTER, 1)
    yield question("what one may do", Key.DESCRIBE_CLUSTER, 1, include_cluster_authorized_operations=True)


def _topic_questions() -> Iterator[Question]:
    new = [new_topic(f"{name}-new-{{user}}") for name in ("p", "other")]
    yield question("topics", Key.CREATE_TOPICS, 7, topics=new, timeout=5000)
    taken = [new_topic(name) for name in (MINE, OTHER)]
    yield question("topics that exist", Key.CREATE_TOPICS, 7, topics=taken, timeout=5000)
    yield question("topics", Key.CREATE_TOPICS, 4, topics=taken, timeout=5000, validate_only=True)
    gone = _topics("p-gone-{user}", "other-gone-{user}", MISSING, OTHER_MISSING, topic_id=None)
    yield question("topics", Key.DELETE_TOPICS, 6, topics=gone, timeout=5000)
    by_id = [{"topic_id": f"{{id:{name}}}", "name": None} for name in ("p-gone-too-{user}", "other-gone-too-{user}")]
    yield question("topics by id", Key.DELETE_TOPICS, 6, topics=by_id, timeout=5000)
    yield question("topics", Key.DELETE_TOPICS, 3, topic_names=[MISSING, OTHER_MISSING], timeout=5000)
    more = _both(count=3, assignments=None)
    yield question("topics", Key.CREATE_PARTITIONS, 3, topics=more, timeout=5000, validate_only=True)
    yield question("topics", Key.DESCRIBE_PRODUCERS, 0, topics=_both(partition_indexes=[0]))
    plain = {"election_type": 0, "timeout": 5000}
    for version in (1, 2):
        body = {**plain, "topic_partitions": _topics(MINE, OTHER, key="topic", partitions=[0])}
        yield question("topics", Key.ELECT_LEADERS, version, **body)
    body = {"timeout": 5000, "topics": _topics(MINE, OTHER, partitions=[{"partition_index": 0, "replicas": None}])}
    yield question("topics", Key.ALTER_PARTITION_REASSIGNMENTS, 0, **body)
    body = {"timeout": 5000, "topics": _topics(MINE, OTHER, partition_indexes=[0])}
    yield question("topics", Key.LIST_PARTITION_REASSIGNMENTS, 0, **body)
    folder = {"path": "/nowhere", "topics": _topics(MINE, OTHER, partitions=[0])}
    yield question("topics", Key.ALTER_REPLICA_LOG_DIRS, 2, dirs=[folder])
    yield question("topics", Key.DESCRIBE_LOG_DIRS, 4, topics=_topics(MINE, OTHER, key="topic", partitions=[0]))


def _config_questions() -> Iterator[Question]:
    resources = [(2, MINE), (2, OTHER), (2, MISSING), (2, OTHER_MISSING), (4, "1"), (4, ""), (32, GROUP)]
    resources += [(32, OTHER_GROUP)]
    named: list[dict[str, Any]] = [{"resource_type": kind, "resource_name": name} for kind, name in resources]
    described = [
        {**resource, "configuration_keys": ["retention.ms", "consumer.session.timeout.ms"]} for resource in named
    ]
    yield question("resources", Key.DESCRIBE_CONFIGS, 4, resources=described)
    setting = {2: "retention.ms", 4: "message.max.bytes", 32: "consumer.session.timeout.ms"}
    changes = [
        {**resource, "configs": [{"name": setting[resource["resource_type"]], "config_operation": 0, "value": "50000"}]}
        for resource in named
    ]
    yield question("resources", Key.INCREMENTAL_ALTER_CONFIGS, 1, resources=changes, validate_only=True)
    whole = [
        {**resource, "configs": [{"name": setting[resource["resource_type"]], "value": "50000"}]}
        for resource in named
        if resource["resource_type"] != 4
    ]
    yield question("resources", Key.ALTER_CONFIGS, 2, resources=whole, validate_only=True)
    yield question("clients", Key.LIST_CONFIG_RESOURCES, 0)
    yield question("topics and groups", Key.LIST_CONFIG_RESOURCES, 1, resource_types=[2, 32])
    yield question("all", Key.DESCRIBE_CLIENT_QUOTAS, 1, components=[], strict=False)
    entry = {
        "entity": [{"entity_type": "client-id", "entity_name": "c"}],
        "ops": [{"key": "producer_byte_rate", "value": 1000.0, "remove": False}],
    }
    yield question("a client", Key.ALTER_CLIENT_QUOTAS, 1, entries=[entry], validate_only=True)
    yield question("nothing", Key.UPDATE_FEATURES, 1, feature_updates=[], validate_only=True)
    update = {"feature": "nowhere", "max_version_level": 1, "upgrade_type": 1}
    yield question("unknown feature", Key.UPDATE_FEATURES, 1, feature_updates=[update], validate_only=True)


def _security_questions() -> Iterator[Question]:
    selected = {
        "resource_type_filter": 2,
        "resource_name_filter": "p-nowhere",
        "pattern_type_filter": 3,
        "principal_filter": None,
        "host_filter": None,
        "operation": 1,
        "permission_type": 1,
    }
    yield question("rules", Key.DESCRIBE_ACLS, 3, **selected)
    yield question("rules", Key.DELETE_ACLS, 3, filters=[selected, selected])
    new = {
        "resource_type": 2,
        "resource_name": "unused",
        "resource_pattern_type": 3,
        "principal": "User:unused",
        "host": "*",
        "operation": 3,
        "permission_type": 3,
    }
    yield question("rules", Key.CREATE_ACLS, 3, creations=[new, new])
    yield question("a user", Key.DESCRIBE_USER_SCRAM_CREDENTIALS, 0, users=[{"name": "nowhere"}])
    gone = [{"name": name, "mechanism": 1} for name in ("nowhere", "nowhere-else")]
    yield question("users", Key.ALTER_USER_SCRAM_CREDENTIALS, 0, deletions=gone, upsertions=[])


def _group_questions() -> Iterator[Question]:
    offset = {"partition_index": 0, "committed_offset": 1, "committed_leader_epoch": -1, "committed_metadata": ""}
    for group in (GROUP, OTHER_GROUP):
        plain = {"group_id": group, "member_id": ""}
        yield question(f"topics, {group}", Key.OFFSET_COMMIT, 9, **plain, topics=_both(partitions=[offset]))
        yield question(f"by id, {group}", Key.OFFSET_COMMIT, 10, **plain, topics=_ids(partitions=[offset]))
        yield question(f"topics, {group}", Key.OFFSET_FETCH, 7, group_id=group, topics=_both(partition_indexes=[0]))
        yield question(f"all topics, {group}", Key.OFFSET_FETCH, 7, group_id=group, topics=None)
        member = {"group_id": group, "member_id": "nowhere"}
        yield question(group, Key.HEARTBEAT, 4, **member, generation_id=1)
        yield question(group, Key.LEAVE_GROUP, 5, group_id=group, members=[{"member_id": "nowhere"}])
        protocol = {"protocol_type": "consumer", "protocol_name": "range"}
        yield question(group, Key.SYNC_GROUP, 5, **member, **protocol, generation_id=1, assignments=[])
        joining = {"session_timeout": 10000, "rebalance_timeout": 10000, "protocol_type": "consumer"}
        protocols = [{"name": "range", "metadata": b""}]
        yield question(group, Key.JOIN_GROUP, 9, **member, **joining, protocols=protocols)
        yield question(group, Key.FIND_COORDINATOR, 3, key=group, key_type=0)
        yield question(
            f"topics, {group}", Key.OFFSET_DELETE, 0, group_id=group, topics=_both(partitions=[{"partition_index": 1}])
        )
        for key, names in ((Key.CONSUMER_GROUP_HEARTBEAT, [MINE]), (Key.SHARE_GROUP_HEARTBEAT, [MINE])):
            for about, subscribed in (("", names), (" and another topic", [*names, OTHER]), (" and none", None)):
                fields = {"member_epoch": 5, "subscribed_topic_names": subscribed}
                yield question(f"{group}{about}", key, 1, group_id=group, member_id=MEMBER, **fields)
    groups = [{"group_id": name, "topics": _both(partition_indexes=[0])} for name in (GROUP, OTHER_GROUP)]
    yield question("groups", Key.OFFSET_FETCH, 9, groups=groups)
    yield question("groups, all topics", Key.OFFSET_FETCH, 9, groups=[{**group, "topics": None} for group in groups])
    by_id = [{**group, "topics": _ids(partition_indexes=[0])} for group in groups]
    yield question("groups, topics by id", Key.OFFSET_FETCH, 10, groups=by_id)
    both = [GROUP, OTHER_GROUP]
    yield question("groups", Key.FIND_COORDINATOR, 4, key_type=0, coordinator_keys=both)
    yield question("share groups", Key.FIND_COORDINATOR, 6, key_type=2, coordinator_keys=[f"{GROUP}:{'A' * 22}:0"])
    yield question("groups", Key.DESCRIBE_GROUPS, 5, groups=both, include_authorized_operations=True)
    yield question("groups, not what one may do", Key.DESCRIBE_GROUPS, 5, groups=both)
    yield question("all", Key.LIST_GROUPS, 5)
    yield question("groups", Key.DELETE_GROUPS, 2, groups_names=["p-gone-{user}", OTHER_GROUP, "p-missing"])
    described = ["p-consumers", "p-mixed", "p-missing", OTHER_GROUP]
    body = {"group_ids": described, "include_authorized_operations": True}
    yield question("groups", Key.CONSUMER_GROUP_DESCRIBE, 1, **body)
    body = {"group_ids": ["p-sharers", "p-mixed-share", "p-missing", OTHER_GROUP]}
    yield question("groups", Key.SHARE_GROUP_DESCRIBE, 1, **body, include_authorized_operations=True)


def _transaction_questions() -> Iterator[Question]:
    for name in (TRANSACTION, OTHER_TRANSACTION):
        who = {"transactional_id": name, "producer_id": 1_000_000, "producer_epoch": 0}
        older = {f"v3_and_below_{field}": value for field, value in who.items()}
        both = _topics(MINE, OTHER, partitions=[0])
        yield question(name, Key.INIT_PRODUCER_ID, 5, **who, transaction_timeout=10_000)
        yield question(f"topics, {name}", Key.ADD_PARTITIONS_TO_TXN, 3, **older, v3_and_below_topics=both)
        mine = _topics(MINE, partitions=[0])
        yield question(f"a topic, {name}", Key.ADD_PARTITIONS_TO_TXN, 3, **older, v3_and_below_topics=mine)
        transactions = [{**who, "verify_only": False, "topics": both}]
        yield question(f"topics, {name}", Key.ADD_PARTITIONS_TO_TXN, 4, transactions=transactions)
        yield question(name, Key.END_TXN, 4, **who, committed=True)
        yield question(name, Key.FIND_COORDINATOR, 3, key=name, key_type=1)
        for group in (GROUP, OTHER_GROUP):
            yield question(f"{name}, {group}", Key.ADD_OFFSETS_TO_TXN, 4, **who, group_id=group)
            offset = {"partition_index": 0, "committed_offset": 1, "committed_metadata": ""}
            topics = _both(partitions=[offset])
            yield question(f"{name}, {group}", Key.TXN_OFFSET_COMMIT, 3, **who, group_id=group, topics=topics)
    yield question("no transaction", Key.INIT_PRODUCER_ID, 5, transactional_id=None, transaction_timeout=10_000)
    names = [TRANSACTION, OTHER_TRANSACTION, "p-missing"]
    yield question("transactions", Key.FIND_COORDINATOR, 4, key_type=1, coordinator_keys=names)
    yield question("transactions", Key.DESCRIBE_TRANSACTIONS, 0, transactional_ids=names)
    yield question("all", Key.LIST_TRANSACTIONS, 1)
    marker = {
        "producer_id": 1_000_000,
        "producer_epoch": 0,
        "transaction_result": True,
        "coordinator_epoch": 0,
        "topics": _topics(MISSING, partition_indexes=[0]),
    }
    yield question("a topic", Key.WRITE_TXN_MARKERS, 1, markers=[marker])


def _share_questions() -> Iterator[Question]:
    for group in ("p-sharers", "other-missing"):
        session = {"group_id": group, "member_id": MEMBER, "share_session_epoch": 5}
        limits = {"max_wait": 0, "min_bytes": 0, "max_records": 1, "batch_size": 1}
        topics = _ids(partitions=[{"partition_index": 0, "acknowledgement_batches": []}])
        yield question(f"topics, {group}", Key.SHARE_FETCH, 1, **session, **limits, topics=topics)
        new = {**session, "share_session_epoch": 0, "member_id": "{member}"}
        yield question(f"topics, new session, {group}", Key.SHARE_FETCH, 1, **new, **limits, topics=topics)
        yield question(f"topics, {group}", Key.SHARE_ACKNOWLEDGE, 1, **session, topics=topics)
        offsets = _topics(MINE, OTHER, key="topic_name", partitions=[{"partition_index": 0, "start_offset": 0}])
        yield question(f"topics, {group}", Key.ALTER_SHARE_GROUP_OFFSETS, 0, group_id=group, topics=offsets)
        topics = _topics(MINE, OTHER, key="topic_name")
        yield question(f"topics, {group}", Key.DELETE_SHARE_GROUP_OFFSETS, 0, group_id=group, topics=topics)
    bodies = [{"group_id": name, "topics": _both("topic_name", partitions=[0])} for name in ("p-missing", OTHER_GROUP)]
    yield question("groups", Key.DESCRIBE_SHARE_GROUP_OFFSETS, 0, groups=bodies)
    everything = [{**question_part, "topics": None} for question_part in bodies]
    yield question("groups, all topics", Key.DESCRIBE_SHARE_GROUP_OFFSETS, 0, groups=everything)


QUESTIONS: Final = tuple(
    question
    # Members leave after a while, so groups are described first.
    for some in (
        _group_questions,
        _transaction_questions,
        _metadata_questions,
        _produce_questions,
        _fetch_questions,
        _topic_questions,
        _config_questions,
        _security_questions,
        _share_questions,
    )
    for question in some()
)

# -- what it is asked about ---------------------------------------------------------------------------------------


def lay_fixtures(admin: SignedIn) -> dict[str, UUID]:
    """Make topics, groups, a transaction and the rules of all users; returns the ids of the topics."""
    kinds = ("p-gone", "p-gone-too", "other-gone", "other-gone-too")
    per_user = [f"{kind}-{user}" for kind in kinds for user in USERS]
    topics = [new_topic(MINE), new_topic(OTHER), *map(new_topic, per_user)]
    admin.ask(Key.CREATE_TOPICS, 5, {"timeout": 30_000, "topics": topics})
    _declare_rules(admin)
    first = _topics(MINE, OTHER, partition_data=[{"index": 0, "records": batch()}])
    data = {"acks": -1, "timeout": 5000, "topic_data": first}
    _until(lambda: _codes(admin.ask(Key.PRODUCE, 11, data)) == {"none"})
    for group in (GROUP, OTHER_GROUP, *(f"p-gone-{user}" for user in USERS)):
        offset = {"partition_index": 0, "committed_offset": 1, "committed_leader_epoch": -1, "committed_metadata": ""}
        commit = {"group_id": group, "member_id": "", "topics": _topics(MINE, OTHER, partitions=[offset])}
        admin.ask(Key.FIND_COORDINATOR, 3, {"key": group, "key_type": 0})
        _until(lambda: _codes(admin.ask(Key.OFFSET_COMMIT, 9, commit)) == {"none"})  # noqa: B023
    _join(admin, Key.CONSUMER_GROUP_HEARTBEAT, "p-consumers", [MINE])
    _join(admin, Key.CONSUMER_GROUP_HEARTBEAT, "p-mixed", [MINE, OTHER])
    _join(admin, Key.SHARE_GROUP_HEARTBEAT, "p-sharers", [MINE])
    _join(admin, Key.SHARE_GROUP_HEARTBEAT, "p-mixed-share", [MINE, OTHER])
    _open_transaction(admin)
    names = [{"topic_id": None, "name": name} for name in (MINE, OTHER, *per_user)]
    described = admin.ask(Key.METADATA, 12, {"topics": names, "allow_auto_topic_creation": False})
    return {topic["name"]: UUID(topic["topic_id"]) for topic in described["topics"]}


def _declare_rules(admin: SignedIn) -> None:
    creations = [
        {
            "resource_type": int(acl.resource_type),
            "resource_name": acl.resource_name,
            "resource_pattern_type": int(acl.pattern),
            "principal": f"User:{user}",
            "host": "*",
            "operation": int(acl.operation),
            "permission_type": int(acl.permission),
        }
        for user, acls in rules().items()
        for acl in acls
    ]
    response = admin.ask(Key.CREATE_ACLS, 3, {"creations": creations})
    if _codes(response) != {"none"}:
        raise ConnectionError(f"the rules cannot be set: {response}")
    everything = {"resource_type_filter": 1, "pattern_type_filter": 1, "operation": 1, "permission_type": 1}

    def are_known() -> bool:
        resources = admin.ask(Key.DESCRIBE_ACLS, 3, everything)["resources"]
        return sum(len(resource["acls"]) for resource in resources) == len(creations)

    _until(are_known)


def _join(admin: SignedIn, key: Key, group: str, topics: list[str]) -> None:
    """Add a member to a group, and wait until it has its partitions."""
    first = {"group_id": group, "member_id": MEMBER, "member_epoch": 0, "subscribed_topic_names": topics}
    if key is Key.CONSUMER_GROUP_HEARTBEAT:
        first |= {"rebalance_timeout": 60_000, "topic_partitions": []}
    response: dict[str, Any] = {}

    def has_joined() -> bool:
        nonlocal response
        response = admin.ask(key, 1, first)
        return bool(response["error_code"] == "none")

    def is_assigned() -> bool:
        nonlocal response
        assigned = response["assignment"]
        if assigned is not None and sum(
            len(partition["partitions"]) for partition in assigned["topic_partitions"]
        ) == len(topics):
            return True
        again = {"group_id": group, "member_id": MEMBER, "member_epoch": response["member_epoch"]}
        response = {
            **response,
            **{name: value for name, value in admin.ask(key, 1, again).items() if value is not None},
        }
        return False

    admin.ask(Key.FIND_COORDINATOR, 3, {"key": group, "key_type": 0})
    _until(has_joined)
    _until(is_assigned)


def _open_transaction(admin: SignedIn) -> None:
    """Begin a transaction in both topics that stays open."""
    body = {"transactional_id": TRANSACTION, "transaction_timeout": 600_000, "producer_id": -1, "producer_epoch": -1}
    response: dict[str, Any] = {}

    def is_known() -> bool:
        nonlocal response
        admin.ask(Key.FIND_COORDINATOR, 3, {"key": TRANSACTION, "key_type": 1})
        response = admin.ask(Key.INIT_PRODUCER_ID, 5, body)
        return bool(response["error_code"] == "none")

    _until(is_known)
    opened = {
        "v3_and_below_transactional_id": TRANSACTION,
        "v3_and_below_producer_id": response["producer_id"],
        "v3_and_below_producer_epoch": response["producer_epoch"],
        "v3_and_below_topics": _topics(MINE, OTHER, partitions=[0]),
    }
    _until(lambda: _codes(admin.ask(Key.ADD_PARTITIONS_TO_TXN, 3, opened)) == {"none"})


def _codes(response: Any) -> set[str]:
    """Every error code of a response."""
    if isinstance(response, dict):
        codes = {value for name, value in response.items() if name.endswith("error_code") and isinstance(value, str)}
        return codes.union(*map(_codes, response.values()))
    return set().union(*map(_codes, response)) if isinstance(response, list) else set()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _READY_S_MAX
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"a broker was not ready within {_READY_S_MAX:g} s")
        time.sleep(0.05)


# -- the responses ------------------------------------------------------------------------------------------------


def ask_all(address: str, users: Sequence[str] = USERS, *, only: str = "") -> Responses:
    """Ask everything as every one of these users."""
    admin = SignedIn(address, ADMIN)
    ids = lay_fixtures(admin)
    admin.close()
    responses: Responses = {case.name: {} for case in QUESTIONS if only in case.name}
    with ExitStack() as stack:
        brokers = {user: SignedIn(address, user) for user in users}
        for broker in brokers.values():
            stack.callback(broker.close)
        for case in QUESTIONS:
            if only in case.name:
                responses[case.name] = _ask(case, brokers, ids)
    return responses


def _ask(case: Question, brokers: Mapping[str, SignedIn], ids: Mapping[str, UUID]) -> dict[str, str]:
    """Send the requests as each user; responses that several users share are stored once."""
    is_own = any(mark in repr(case.values) for mark in ("{user}", "{member}"))
    shown: dict[tuple[bytes | str, str], str] = {}
    responses = {}
    frame = b""
    for user, broker in brokers.items():
        if is_own or not frame:
            frame = frame_of(case.key, case.version, _filled(case.values, user, ids))
        response = broker.send(frame)
        key = response, user if is_own else ""
        if key not in shown:
            shown[key] = _shown(read_plain_response(case.key, case.version, response), user)
        responses[user] = shown[key]
    return responses


def _filled(values: Any, user: str, ids: Mapping[str, UUID]) -> Any:
    """Put in the user's name and the ids of topics."""
    if isinstance(values, Mapping):
        return {name: _filled(value, user, ids) for name, value in values.items()}
    if isinstance(values, list):
        return [_filled(value, user, ids) for value in values]
    if not isinstance(values, str) or "{" not in values:
        return values
    named = values.replace("{user}", user).replace("{member}", f"{USERS.index(user):022}")
    return ids[named[4:-1]] if named.startswith("{id:") else named


# What differs between any two brokers.
_DROPPED: Final = frozenset(
    [
        *("throttle_time", "error_message", "error_string", "batch_index_error_message", "cluster_id", "log_dir"),
        *("total_bytes", "usable_bytes", "partition_size", "leader_epoch", "group_epoch", "assignment_epoch"),
        *("member_epoch", "transaction_start_time", "client_host", "session_id", "record_errors", "offset_lag"),
        *("base_offset", "log_append_time", "log_start_offset", "offset", "end_offset", "high_watermark"),
        *("last_stable_offset", "low_watermark", "acquisition_lock_timeout", "client_id", "preferred_read_replica"),
        *("producer_id", "producer_epoch", "aborted_transactions"),
        *("controller_id", "current_txn_start_offset", "is_cordoned", "topic_config_error_message"),
    ]
)
# What differs too, but not in whether it is there.
_PRESENCE: Final = frozenset(
    [
        *("topic_id", "records", "configs", "host", "port", "brokers", "member_id", "config_resources"),
        *("leader_id", "replica_nodes", "isr_nodes", "active_producers"),
        *("node_id", "endpoints", "entries"),
    ]
)
_IDENTITY: Final = ("name", "topic", "topic_name", "group_id", "key", "transactional_id", "user", "resource_name")


def _shown(response: Any, user: str) -> str:
    """A response in one line, without the fields that differ between any two brokers."""
    return json.dumps(_reduced(_without_user(response, user)), separators=(",", ":"))


def _without_user(value: Any, user: str) -> Any:
    if isinstance(value, dict):
        return {name: _without_user(part, user) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_user(part, user) for part in value]
    # Only where it ends a name: that of a user may begin another's.
    is_own = isinstance(value, str) and value.endswith(f"-{user}")
    return value.removesuffix(user) + "{user}" if is_own else value


def _reduced(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: _presence(part) if name in _PRESENCE else _reduced(part)
            for name, part in value.items()
            if name not in _DROPPED
        }
    if isinstance(value, list):
        return sorted((_reduced(part) for part in value if not _is_passing(part)), key=_identity)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def _presence(value: Any) -> str:
    if value is None or value == -1:
        return "none"
    return "some" if value else "empty"


def _is_passing(value: Any) -> bool:
    """Whether an entry depends on the requests of other users, or is internal to the broker."""
    if not isinstance(value, dict):
        return False
    name = next((value[key] for key in _IDENTITY if value.get(key)), "")
    return str(name).startswith(("__", "p-gone", "p-new", "p-auto")) and "{user}" not in str(name)


def _identity(value: Any) -> str:
    """Return the key of a list entry, since the order of most lists has no meaning."""
    if not isinstance(value, dict):
        return str(value)
    return " ".join(str(value[name]) for name in _IDENTITY if name in value) + json.dumps(value)


# -- comparing ----------------------------------------------------------------------------------------------------

_REPEATED: Final = "each partition repeats the group's error, for clients that look only there"
ACCEPTED: Final[Mapping[str, str]] = {
    "offset fetch v7: topics, other-group": _REPEATED,
    "offset fetch v7: topics, p-group": _REPEATED,
    "list partition reassignments v0: topics": "Kafka repeats what it was asked about beside the error",
    "describe user scram credentials v0: a user": "Kafka adds a result for a user without a name",
    "produce v11: in transaction None": "records are not looked at before the topic is allowed",
}
"""By question: why some responses are other ones, on purpose."""
OTHERWISE: Final[Mapping[str, str]] = {
    "find coordinator v6: share groups": "share groups have no coordinators of their own",
    "share fetch v1: topics, new session, p-sharers": "Kafka fails on its own for a group that is missing",
    "describe share group offsets v0: groups": "a topic that is missing is an error",
    "alter configs v2: resources": "settings of groups are changed one by one",
    "metadata v12: topics to create": "a topic exists at once; Kafka has its client ask again",
}
"""By question: why those who may get another response; refusals are the same."""


def recorded() -> Responses:
    """Kafka's responses, as last recorded."""
    responses: Responses = {}
    for name, groups in json.loads(RECORDED.read_text(encoding="utf-8")).items():
        responses[name] = {}
        for response, users in groups.items():
            responses[name] |= dict.fromkeys(USERS if users == _EVERYTHING else users.split(), response)
        for response, users in groups.items():
            if users != _EVERYTHING:
                responses[name] |= dict.fromkeys(users.split(), response)
    return responses


def record(responses: Responses) -> None:
    """Write responses, each once for all users who get it; the most frequent one is that of everyone else."""
    document: dict[str, dict[str, str]] = {}
    for name, by_user in responses.items():
        groups: dict[str, list[str]] = defaultdict(list)
        for user, response in by_user.items():
            groups[response].append(user)
        common = max(groups, key=lambda response: len(groups[response]))
        others = {response: " ".join(users) for response, users in groups.items() if response != common}
        document[name] = {common: _EVERYTHING, **others}
    RECORDED.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def differences(expected: Responses, got: Responses) -> list[str]:
    """A line for each pair of responses that differ, with the users who get them, less those accepted."""
    lines = []
    for name in sorted(expected.keys() | got.keys()):
        users: dict[tuple[str, str], list[str]] = defaultdict(list)
        theirs, ours = expected.get(name, {}), got.get(name, {})
        for user in sorted(theirs.keys() | ours.keys()):
            pair = theirs.get(user, ""), ours.get(user, "")
            is_same = _refusals(pair[0]) == _refusals(pair[1]) if name in OTHERWISE else pair[0] == pair[1]
            if not is_same and name not in ACCEPTED:
                users[pair].append(user)
        lines += [f"{name} as {' '.join(who)}:\n  kafka      {a}\n  millstream {b}" for (a, b), who in users.items()]
    return lines


def _refusals(response: str) -> Counter[str]:
    return Counter(_REFUSAL.findall(response))


_REFUSAL: Final = re.compile(r"\w+_authorization_failed")
_SECURITY: Final = """\
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,LOCKED:SASL_PLAINTEXT
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS;User:admin
sasl.enabled.mechanisms=PLAIN
listener.name.locked.plain.sasl.jaas.config={jaas}
"""


def kafka_responses(folder: Path, *, only: str = "") -> Responses:
    users = " ".join(f'user_{user}="{PASSWORD}"' for user in (ADMIN, *USERS))
    jaas = f"org.apache.kafka.common.security.plain.PlainLoginModule required {users};"
    address = free_address()
    listener, properties = f"LOCKED://{address}", _SECURITY.format(jaas=jaas)
    with kafka(folder, "os", partitions=1, listener=listener, properties=properties):
        return ask_all(address, only=only)


def millstream_responses(folder: Path, users: Sequence[str] = USERS, *, only: str = "") -> Responses:
    declare_security(folder, dict.fromkeys((ADMIN, *USERS), PASSWORD))
    settings = {"auth": "required", "super-users": ADMIN, "default-partitions": 1}
    node = EmbeddedBroker(folder, kafka="127.0.0.1:0", http="", settings=settings)
    node.start_and_wait()
    try:
        return ask_all(node.kafka_address, users, only=only)
    finally:
        node.stop_and_wait()


def compare(folder: Path, *, renew: bool = False, only: str = "") -> int:
    """Ask both, and show where they or the recorded responses differ; how many do."""
    theirs = kafka_responses(folder / "kafka-permissions", only=only)
    if renew:
        record({**(recorded() if only else {}), **theirs})
    before = {name: users for name, users in recorded().items() if only in name} if RECORDED.exists() else {}
    lines = [f"recorded otherwise: {line}" for line in differences(before, theirs)]
    lines += differences(theirs, millstream_responses(folder / "millstream-permissions", only=only))
    for line in lines:
        print(f"  DIFFERENT   {line}")
    accepted = len(ACCEPTED) + len(OTHERWISE)
    print(f"{sum(map(len, theirs.values()))} requests by permission, {accepted} accepted, {len(lines)} different")
    return len(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.permission_table")
    parser.add_argument("--only", default="", help="ask only the questions whose names contain this")
    parser.add_argument("--record", action="store_true", help="write Kafka's responses to the file")
    arguments = parser.parse_args()
    with suppress(PeerUnavailable), tempfile.TemporaryDirectory(prefix="millstream-compare-") as folder:
        return 1 if compare(Path(folder), renew=arguments.record, only=arguments.only) else 0
    print("skipped: Apache Kafka cannot be started here")
    return 0


if __name__ == "__main__":
    sys.exit(main())
