"""The type of a question, and the topics and groups that all of them use."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final
from uuid import UUID

from conformance.question import Broker, Values

from millstream.protocol.records.record import NewRecord, encode_batch

TOPIC: Final = "fixture"
"""Two partitions, ten records in the first of them, none in the second; no question changes it."""
COMPACTED: Final = "compacted"
"""One partition of a compacted topic."""
RECENT: Final = "recent"
"""One partition that accepts only records of the last hour."""
COMPACTED_RECENT: Final = "compacted-recent"
"""Both."""
WRITTEN: Final = "written"
"""One partition, to which questions append."""
NOWHERE: Final = "nowhere"
"""A topic and a group that are not there."""
TAKEN: Final = "taken"
"""A transactional id that has a producer, but no transaction."""
BAD_NAME: Final = "no/slash"
UNKNOWN_ID: Final = UUID("12345678-1234-1234-1234-123456789012")
FIXTURE_MS: Final = 1_700_000_000_000
_READY_S_MAX = 30.0


class Key(IntEnum):
    """The APIs that get requests."""

    PRODUCE = 0
    FETCH = 1
    LIST_OFFSETS = 2
    METADATA = 3
    OFFSET_COMMIT = 8
    OFFSET_FETCH = 9
    FIND_COORDINATOR = 10
    JOIN_GROUP = 11
    HEARTBEAT = 12
    LEAVE_GROUP = 13
    SYNC_GROUP = 14
    DESCRIBE_GROUPS = 15
    LIST_GROUPS = 16
    API_VERSIONS = 18
    CREATE_TOPICS = 19
    DELETE_TOPICS = 20
    DELETE_RECORDS = 21
    INIT_PRODUCER_ID = 22
    OFFSET_FOR_LEADER_EPOCH = 23
    ADD_PARTITIONS_TO_TXN = 24
    ADD_OFFSETS_TO_TXN = 25
    END_TXN = 26
    WRITE_TXN_MARKERS = 27
    TXN_OFFSET_COMMIT = 28
    DESCRIBE_ACLS = 29
    CREATE_ACLS = 30
    DELETE_ACLS = 31
    DESCRIBE_CONFIGS = 32
    ALTER_CONFIGS = 33
    ALTER_REPLICA_LOG_DIRS = 34
    DESCRIBE_LOG_DIRS = 35
    CREATE_PARTITIONS = 37
    DELETE_GROUPS = 42
    ELECT_LEADERS = 43
    INCREMENTAL_ALTER_CONFIGS = 44
    ALTER_PARTITION_REASSIGNMENTS = 45
    LIST_PARTITION_REASSIGNMENTS = 46
    OFFSET_DELETE = 47
    DESCRIBE_CLIENT_QUOTAS = 48
    ALTER_CLIENT_QUOTAS = 49
    DESCRIBE_USER_SCRAM_CREDENTIALS = 50
    ALTER_USER_SCRAM_CREDENTIALS = 51
    UPDATE_FEATURES = 57
    DESCRIBE_CLUSTER = 60
    DESCRIBE_PRODUCERS = 61
    DESCRIBE_TRANSACTIONS = 65
    LIST_TRANSACTIONS = 66
    CONSUMER_GROUP_HEARTBEAT = 68
    CONSUMER_GROUP_DESCRIBE = 69
    LIST_CONFIG_RESOURCES = 74
    DESCRIBE_TOPIC_PARTITIONS = 75
    SHARE_GROUP_HEARTBEAT = 76
    SHARE_GROUP_DESCRIBE = 77
    SHARE_FETCH = 78
    SHARE_ACKNOWLEDGE = 79
    DESCRIBE_SHARE_GROUP_OFFSETS = 90
    ALTER_SHARE_GROUP_OFFSETS = 91
    DELETE_SHARE_GROUP_OFFSETS = 92


@dataclass(frozen=True, slots=True)
class Question:
    """A request and its subject."""

    name: str
    key: Key
    version: int
    values: Values

    def ask(self, broker: Broker) -> Any:
        return broker.ask(self.key, self.version, self.values)


def question(about: str, key: Key, version: int, /, **values: Any) -> Question:
    """A question whose name begins with that of the API."""
    return Question(f"{key.name.lower().replace('_', ' ')} v{version}: {about}", key, version, values)


def keyed_batch(*keys: bytes | None, times_ms: Sequence[int] = (), **settings: Any) -> bytes:
    """A batch of records with these keys and, if given, these times."""
    times = times_ms or [FIXTURE_MS] * len(keys)
    records = [NewRecord(key=key, value=b"v", timestamp_ms=at) for key, at in zip(keys, times, strict=True)]
    return bytes(encode_batch(records, **settings))


def batch(count: int = 1, *, size: int = 10, time_ms: int = FIXTURE_MS, **settings: Any) -> bytes:
    """A batch of so many records."""
    records = [NewRecord(key=None, value=b"v" * size, timestamp_ms=time_ms)] * count
    return bytes(encode_batch(records, **settings))


def produced(records: bytes | None, *, topic: str = WRITTEN, partition: int = 0, acks: int = -1) -> dict[str, Any]:
    """The fields of a request to append one set of records."""
    data = [{"name": topic, "partition_data": [{"index": partition, "records": records}]}]
    return {"acks": acks, "timeout": 5000, "topic_data": data}


def new_topic(name: str, partitions: int = 1, replication: int = 1, **more: Any) -> dict[str, Any]:
    counts = {"num_partitions": partitions, "replication_factor": replication}
    return {"name": name, **counts, "assignments": [], "configs": [], **more}


def lay_fixtures(broker: Broker) -> None:
    """Create the topics and groups of the questions, and wait until the broker serves them."""
    compacted = {"name": "cleanup.policy", "value": "compact"}
    recent = {"name": "message.timestamp.before.max.ms", "value": "3600000"}
    topics = [
        *(new_topic(TOPIC, 2), new_topic(WRITTEN), new_topic("with.dot")),
        *(new_topic(COMPACTED, configs=[compacted]), new_topic(RECENT, configs=[recent])),
        new_topic(COMPACTED_RECENT, configs=[compacted, recent]),
    ]
    broker.ask(Key.CREATE_TOPICS, 5, {"timeout": 10000, "topics": topics})
    deadline = time.monotonic() + _READY_S_MAX
    while not _is_written(broker.ask(Key.PRODUCE, 9, produced(batch(10), topic=TOPIC))):
        _wait_until(deadline)
    # The offsets topic is made by the first question for a coordinator.
    while broker.ask(Key.OFFSET_FETCH, 5, {"group_id": NOWHERE, "topics": None})["error_code"] != "none":
        broker.ask(Key.FIND_COORDINATOR, 3, {"key": NOWHERE, "key_type": 0})
        _wait_until(deadline)
    # So is the one of transactions, and an id that is taken shows that its coordinators are loaded.
    body = {"transactional_id": TAKEN, "transaction_timeout": 60000, "producer_id": -1, "producer_epoch": -1}
    while broker.ask(Key.INIT_PRODUCER_ID, 4, body)["error_code"] != "none":
        broker.ask(Key.FIND_COORDINATOR, 3, {"key": TAKEN, "key_type": 1})
        _wait_until(deadline)


def _is_written(response: Any) -> bool:
    return bool(response["responses"][0]["partition_responses"][0]["error_code"] == "none")


def _wait_until(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise TimeoutError(f"a broker was not ready within {_READY_S_MAX:g} s")
    time.sleep(0.2)
