"""Topics, and the settings each of them carries."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any
from uuid import UUID

from millstream.core.errors import InvalidSetting, InvalidTopicName
from millstream.core.ids import PartitionIndex
from millstream.core.setting import Setting, setting, settings_of, suggestion

_REMOTE = "retention through remote storage is not available; a topic keeps all its segments on the node's own disk"

_RECOMPRESSION = "batches are stored as their producer compressed them; set the level in the producer"

_THROTTLE = "replication is not throttled by topic, and a cluster of one node has none"

_REMOVED = "Kafka 4.0 removed it too"


MISSING: Mapping[str, str] = MappingProxyType(
    {
        "compression.gzip.level": _RECOMPRESSION,
        "compression.lz4.level": _RECOMPRESSION,
        "compression.zstd.level": _RECOMPRESSION,
        "follower.replication.throttled.replicas": _THROTTLE,
        "leader.replication.throttled.replicas": _THROTTLE,
        "local.retention.bytes": _REMOTE,
        "local.retention.ms": _REMOTE,
        "message.downconversion.enable": f"{_REMOVED}; consumers of all versions served read the stored format",
        "message.format.version": f"{_REMOVED}; batches are stored in format v2",
        "message.timestamp.difference.max.ms": f"{_REMOVED}; set message.timestamp.before.max.ms and "
        "message.timestamp.after.max.ms",
        "remote.log.copy.disable": _REMOTE,
        "remote.log.delete.on.disable": _REMOTE,
    }
)

"""The name of each setting and the reason why it is not here."""


def unknown_setting(name: str, known: Iterable[str]) -> InvalidSetting:
    """The error for a setting that a topic does not have: Kafka's, with the reason, or nobody's."""
    if name in MISSING:
        return InvalidSetting(f"{name} is a setting of Kafka that Millstream does not have: {MISSING[name]}")
    names = sorted(known)
    meant = suggestion(name, names) or f"; known are: {', '.join(names)}"
    return InvalidSetting(f"unknown topic setting {name!r}{meant}")


NAME_LENGTH_MAX = 249

_NAME = re.compile(r"[a-zA-Z0-9._-]+\Z")


CONSUMER_OFFSETS = "__consumer_offsets"

TRANSACTION_STATE = "__transaction_state"

SUBSCRIPTIONS = "__subscriptions"

INTERNAL_TOPICS = frozenset({CONSUMER_OFFSETS, TRANSACTION_STATE, SUBSCRIPTIONS, "__deliveries"})


OWNER = "millstream.owner"

DESCRIPTION = "millstream.description"

CONTRACT = "millstream.contract"

OWNER_LENGTH_MAX = 200

DESCRIPTION_LENGTH_MAX = 2000

CONTRACT_LENGTH_MAX = 2000

INT64_MAX = 2**63 - 1


FLUSH_ALWAYS = "always"

FLUSH_INTERVAL = "interval"

FLUSH_OS = "os"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSettings:
    """What a topic's owner can set. Names are Kafka's where Kafka has them."""

    retention_ms: int = setting(
        "retention.ms",
        7 * 24 * 3600 * 1000,
        "How long a record is kept, in milliseconds; -1 keeps it for ever.",
        minimum=-1,
        needs_restart=False,
    )
    retention_bytes: int = setting(
        "retention.bytes",
        -1,
        "How many bytes a partition keeps at most; -1 means no limit. Whole old segments are deleted.",
        minimum=-1,
        needs_restart=False,
    )
    retention_until_delivered: bool = setting(
        "retention.until.delivered",
        False,
        "Whether records that are older than `retention.ms` stay until every subscription is done with them, but not "
        "longer than `retention.until.max.ms`. `retention.bytes` holds all the same.",
        needs_restart=False,
    )
    retention_until_landed: bool = setting(
        "retention.until.landed",
        False,
        "Whether records that are older than `retention.ms` stay until every pipeline that lands the topic has them in "
        "its table, but not longer than `retention.until.max.ms`; compaction leaves them alone so long, too. All of "
        "them stay while no pipeline lands the topic. `retention.bytes` holds all the same.",
        needs_restart=False,
    )
    retention_until_max_ms: int = setting(
        "retention.until.max.ms",
        30 * 24 * 3600 * 1000,
        "With `retention.until.delivered` or `retention.until.landed`: the longest time that a record waits, so that a "
        "forgotten subscription or pipeline cannot fill the disk.",
        minimum=1,
        needs_restart=False,
    )
    segment_bytes: int = setting(
        "segment.bytes",
        1024 * 1024 * 1024,
        "A segment file is closed and a new one begun when it would grow beyond this size.",
        minimum=1024 * 1024,
        maximum=2**31 - 1,
        needs_restart=False,
    )
    segment_ms: int = setting(
        "segment.ms",
        3600 * 1000,
        "A segment file is closed after this many milliseconds of appends, so that data is laid out by the hour.",
        minimum=1,
        needs_restart=False,
    )
    index_interval_bytes: int = setting(
        "index.interval.bytes",
        4096,
        "About how many bytes of log lie between two entries of the offset and time index.",
        minimum=1,
        needs_restart=False,
    )
    max_message_bytes: int = setting(
        "max.message.bytes",
        1024 * 1024 + 12,
        "The largest record batch (as sent, so after compression) that the topic takes.",
        minimum=0,
        maximum=2**31 - 1,
        needs_restart=False,
    )
    flush: str = setting(
        "flush",
        FLUSH_ALWAYS,
        "When an acknowledgement is given: `always` after fsync (many producers share one), `interval` before it, "
        "with an fsync every `flush.ms`, `os` before it, leaving the write-back to the operating system.",
        choices=(FLUSH_ALWAYS, FLUSH_INTERVAL, FLUSH_OS),
        needs_restart=False,
    )
    flush_ms: int = setting(
        "flush.ms",
        1000,
        "With `flush=interval`: the longest time an acknowledged record may be unsynced.",
        minimum=1,
        needs_restart=False,
    )
    flush_messages: int = setting(
        "flush.messages",
        INT64_MAX,
        "Syncs by messages: a topic that sets it is synced as with `flush=always`, which is more often, and cannot set "
        "another `flush`.",
        minimum=1,
        needs_restart=False,
    )
    cleanup_policy: str = setting(
        "cleanup.policy",
        "delete",
        "What happens to old segments: `delete` removes them by age and size, `compact` keeps the last record per key.",
        choices=("delete", "compact", "compact,delete", "delete,compact"),
        needs_restart=False,
    )
    message_timestamp_type: str = setting(
        "message.timestamp.type",
        "CreateTime",
        "Whether a record carries the producer's time (`CreateTime`) or the broker's (`LogAppendTime`).",
        choices=("CreateTime", "LogAppendTime"),
        needs_restart=False,
    )
    message_timestamp_before_max_ms: int = setting(
        "message.timestamp.before.max.ms",
        INT64_MAX,
        "With `CreateTime`: how far a record's time may lie before the broker's; a batch with an older one is refused. "
        "A topic that sets it has the times of all records read, which costs throughput.",
        minimum=0,
        needs_restart=False,
    )
    message_timestamp_after_max_ms: int = setting(
        "message.timestamp.after.max.ms",
        3600 * 1000,
        "With `CreateTime`: how far a record's time may lie after the broker's; a batch with a later one is refused.",
        minimum=0,
        needs_restart=False,
    )
    min_compaction_lag_ms: int = setting(
        "min.compaction.lag.ms",
        0,
        "With `cleanup.policy=compact`: how long a record is left alone before compaction may take it away.",
        minimum=0,
        needs_restart=False,
    )
    max_compaction_lag_ms: int = setting(
        "max.compaction.lag.ms",
        INT64_MAX,
        "With `cleanup.policy=compact`: how long a record may wait for compaction, however few others do.",
        minimum=1,
        needs_restart=False,
    )
    min_cleanable_dirty_ratio: float = setting(
        "min.cleanable.dirty.ratio",
        0.5,
        "With `cleanup.policy=compact`: which part of the log must be new before it is compacted again.",
        minimum=0,
        maximum=1,
        needs_restart=False,
    )
    delete_retention_ms: int = setting(
        "delete.retention.ms",
        24 * 3600 * 1000,
        "With `cleanup.policy=compact`: how long a deletion (a record without a value) is kept for consumers to see.",
        minimum=0,
        needs_restart=False,
    )
    min_insync_replicas: int = setting(
        "min.insync.replicas",
        1,
        "How many replicas must have a record before `acks=all` is answered. The default is 2 for topics with three or "
        "more replicas. A topic never needs more than it has replicas, so that on a single node 1 is in force whatever "
        "is set.",
        minimum=1,
        needs_restart=False,
    )
    compression_type: str = setting(
        "compression.type",
        "producer",
        "Has no effect, and is taken because Kafka tools send it: batches are stored as the producer compressed them.",
        choices=("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"),
        needs_restart=False,
    )
    unclean_leader_election_enable: bool = setting(
        "unclean.leader.election.enable",
        False,
        "Whether a replica that is not in sync may lead when no other can: the partition is there again, and "
        "acknowledged records that only the others have are lost.",
        needs_restart=False,
    )
    preallocate: bool = setting(
        "preallocate",
        False,
        "Kept for Kafka tools: segments grow as they are written.",
        is_fixed=True,
        needs_restart=False,
    )
    remote_storage_enable: bool = setting(
        "remote.storage.enable",
        False,
        "Kept for Kafka tools: retention through remote storage is not available.",
        is_fixed=True,
        needs_restart=False,
    )
    segment_index_bytes: int = setting(
        "segment.index.bytes",
        10 * 1024 * 1024,
        "Has no effect, and is taken because Kafka tools send it: an index is as large as its segment needs.",
        minimum=4,
        maximum=2**31 - 1,
        needs_restart=False,
    )
    segment_jitter_ms: int = setting(
        "segment.jitter.ms",
        0,
        "Has no effect, and is taken because Kafka tools send it: segments are closed when `segment.ms` says.",
        minimum=0,
        needs_restart=False,
    )
    file_delete_delay_ms: int = setting(
        "file.delete.delay.ms",
        60_000,
        "Has no effect, and is taken because Kafka tools send it: files of old segments are removed at once.",
        minimum=0,
        needs_restart=False,
    )
    deduplication_window_ms: int = setting(
        "deduplication.window.ms",
        120_000,
        "How long a message that is published with deduplication is known by its `message-id`: published again within "
        "this time of the first one's timestamp, it is not stored again. A partition remembers the last 200,000 ids.",
        minimum=1,
        maximum=24 * 3600 * 1000,
        needs_restart=False,
    )
    owner: str = setting(
        OWNER,
        "",
        "Who answers for the topic: a person, a team or an address.",
        length_max=OWNER_LENGTH_MAX,
        needs_restart=False,
    )
    description: str = setting(
        DESCRIPTION,
        "",
        "What the topic is about, in a sentence or two.",
        length_max=DESCRIPTION_LENGTH_MAX,
        needs_restart=False,
    )
    contract: str = setting(
        CONTRACT,
        "",
        "Where the contract of the topic's messages is written down: a link.",
        length_max=CONTRACT_LENGTH_MAX,
        needs_restart=False,
    )

    @classmethod
    def from_strings(cls, given: Mapping[str, str], *, base: TopicSettings | None = None) -> TopicSettings:
        """Build from Kafka-style names and texts, on top of `base`; raise `InvalidSetting` for what does not fit."""
        by_name = {declared.name: (attribute, declared) for attribute, declared in settings_of(cls)}
        values: dict[str, Any] = {}
        for name, text in given.items():
            if name not in by_name:
                raise unknown_setting(name, by_name)
            attribute, declared = by_name[name]
            values[attribute] = declared.parse(text)
        if values.get("flush_messages", INT64_MAX) != INT64_MAX:
            # Whatever the node's default is: nothing less than this keeps what was asked for.
            values.setdefault("flush", FLUSH_ALWAYS)
        settings = dataclasses.replace(base or cls(), **values)
        settings._check_together()
        return settings

    @classmethod
    def declared(cls) -> Mapping[str, Setting]:
        """Every setting of a topic, by its Kafka-style name."""
        return {declared.name: declared for _, declared in settings_of(cls)}

    def as_strings(self) -> dict[str, str]:
        """Every setting as Kafka shows it: name to text."""
        return {declared.name: _as_text(getattr(self, attribute)) for attribute, declared in settings_of(type(self))}

    @property
    def deletes(self) -> bool:
        """Whether old segments go by age and size."""
        return "delete" in self.cleanup_policy

    @property
    def compacts(self) -> bool:
        """Whether only the last record of each key is kept."""
        return "compact" in self.cleanup_policy

    @property
    def bounds_past(self) -> bool:
        """Whether records with old timestamps are refused."""
        return self.message_timestamp_before_max_ms < INT64_MAX and self.message_timestamp_type == "CreateTime"

    @property
    def reads_records(self) -> bool:
        """Whether every record has to be looked at before it is stored: for its key, or for its timestamp."""
        return self.compacts or self.bounds_past

    def _check_together(self) -> None:
        if self.min_compaction_lag_ms > self.max_compaction_lag_ms:
            raise InvalidSetting(
                f"min.compaction.lag.ms ({self.min_compaction_lag_ms}) is larger than max.compaction.lag.ms "
                f"({self.max_compaction_lag_ms})"
            )
        if self.flush_messages != INT64_MAX and self.flush != FLUSH_ALWAYS:
            raise InvalidSetting(
                f"flush.messages cannot be kept with flush={self.flush}, which syncs by time and not by messages; set "
                "flush=always to have every message synced, or leave flush.messages out"
            )


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A named log as it is declared in the catalog. `overrides` holds only what its owner set."""

    name: str
    topic_id: UUID
    partitions: int
    replication: int
    overrides: Mapping[str, str]
    created_ms: int

    @property
    def is_internal(self) -> bool:
        """Whether the broker keeps its own state in it."""
        return self.name in INTERNAL_TOPICS


@dataclass(frozen=True, slots=True)
class TopicPartition:
    """One partition, by the topic's name."""

    topic: str
    partition: PartitionIndex

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[PartitionIndex]]:
    """The numbers of partitions by their topics, as Kafka's messages list them; in order, whatever the order was."""
    found: dict[str, list[PartitionIndex]] = {}
    for one in sorted(partitions, key=lambda partition: (partition.topic, partition.partition)):
        found.setdefault(one.topic, []).append(one.partition)
    return found


def check_topic_name(name: str, *, noun: str = "topic") -> None:
    """Raise `InvalidTopicName` unless the name follows Kafka's rule; `noun` is what bears it."""
    if not name:
        raise InvalidTopicName(f"a {noun} name cannot be empty")
    if name in (".", ".."):
        raise InvalidTopicName(f"a {noun} cannot be named {name!r}")
    if len(name) > NAME_LENGTH_MAX:
        raise InvalidTopicName(f"a {noun} name has at most {NAME_LENGTH_MAX} characters, this one has {len(name)}")
    if not _NAME.match(name):
        raise InvalidTopicName(
            f"{noun} name {name!r} may hold only letters, digits, '.', '_' and '-' (no spaces, no other alphabets)"
        )
