"""Topics, their settings, and the partition of a key."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar
from uuid import UUID

from millstream.core.errors import InvalidSetting, InvalidTopicName
from millstream.core.ids import CONTEXT_CHARACTERS_MAX, SUBJECT_CHARACTERS_MAX, PartitionIndex
from millstream.core.setting import Settings, setting

_REMOTE = "retention through remote storage is not available; a topic keeps all its segments on the node's own disk"

_RECOMPRESSION = "batches are stored as their producer compressed them; set the level in the producer"

_THROTTLE = "replication is not throttled by topic, and a single node does not replicate"

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
"""Kafka settings that topics do not have, each with the reason."""


NAME_LENGTH_MAX = 249

_NAME = re.compile(r"[a-zA-Z0-9._-]+\Z")

CONSUMER_OFFSETS = "__consumer_offsets"

TRANSACTION_STATE = "__transaction_state"

SUBSCRIPTIONS = "__subscriptions"

AUDIT = "__audit"

INTERNAL_TOPICS = frozenset({CONSUMER_OFFSETS, TRANSACTION_STATE, SUBSCRIPTIONS, "__deliveries", AUDIT})

OWNER = "millstream.owner"

DESCRIPTION = "millstream.description"

CONTRACT = "millstream.contract"

SCHEMA_KEY = "millstream.schema.key"

SCHEMA_VALUE = "millstream.schema.value"

SCHEMA_VALIDATE = "millstream.schema.validate"

VALIDATE_ID, VALIDATE_CONTENT, VALIDATE_OFF = "id", "content", "off"

OWNER_LENGTH_MAX = 200

DESCRIPTION_LENGTH_MAX = 2000

CONTRACT_LENGTH_MAX = 2000

SCHEMA_SUBJECT_LENGTH_MAX = SUBJECT_CHARACTERS_MAX + CONTEXT_CHARACTERS_MAX

INT64_MAX = 2**63 - 1

FLUSH_ALWAYS = "always"

FLUSH_INTERVAL = "interval"

FLUSH_OS = "os"


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSettings(Settings):
    """The settings of a topic, with Kafka's names where Kafka has them."""

    holder: ClassVar = "a topic"
    missing: ClassVar = MISSING

    retention_ms: int = setting(
        "retention.ms",
        7 * 24 * 3600 * 1000,
        "How long a record is kept, in milliseconds; -1 keeps it forever.",
        minimum=-1,
    )
    retention_bytes: int = setting(
        "retention.bytes",
        -1,
        "The maximum size of a partition; -1 means no limit. Whole segments are deleted, the oldest first.",
        minimum=-1,
    )
    retention_until_delivered: bool = setting(
        "retention.until.delivered",
        False,
        "Whether records older than `retention.ms` are kept until every subscription is done with them, for at "
        "most `retention.until.max.ms`. `retention.bytes` applies regardless.",
    )
    retention_until_landed: bool = setting(
        "retention.until.landed",
        False,
        "Whether records older than `retention.ms` are kept until every pipeline that lands the topic has them in "
        "its table, for at most `retention.until.max.ms`; compaction also keeps them until then. While no pipeline "
        "lands the topic, all records are kept. `retention.bytes` applies regardless.",
    )
    retention_until_max_ms: int = setting(
        "retention.until.max.ms",
        30 * 24 * 3600 * 1000,
        "With `retention.until.delivered` or `retention.until.landed`: the longest time that a record is kept, so "
        "that a forgotten subscription or pipeline cannot fill the disk.",
        minimum=1,
    )
    segment_bytes: int = setting(
        "segment.bytes",
        1024 * 1024 * 1024,
        "The size beyond which a segment file is closed and a new one started.",
        minimum=1024 * 1024,
        maximum=2**31 - 1,
    )
    segment_ms: int = setting(
        "segment.ms",
        3600 * 1000,
        "The age at which a segment file is closed, in milliseconds; the default lays out data by the hour.",
        minimum=1,
    )
    index_interval_bytes: int = setting(
        "index.interval.bytes",
        4096,
        "The approximate number of log bytes between two entries of the offset and time index.",
        minimum=1,
    )
    max_message_bytes: int = setting(
        "max.message.bytes",
        1024 * 1024 + 12,
        "The largest record batch (as sent, so after compression) that the topic accepts.",
        minimum=0,
        maximum=2**31 - 1,
    )
    flush: str = setting(
        "flush",
        FLUSH_ALWAYS,
        "When records are acknowledged: `always` after fsync (many producers share one), `interval` before it, "
        "with an fsync every `flush.ms`, `os` before it, leaving the write-back to the operating system.",
        choices=(FLUSH_ALWAYS, FLUSH_INTERVAL, FLUSH_OS),
    )
    flush_ms: int = setting(
        "flush.ms",
        1000,
        "With `flush=interval`: the longest time that an acknowledged record may be unsynced.",
        minimum=1,
    )
    flush_messages: int = setting(
        "flush.messages",
        INT64_MAX,
        "Kafka's sync after a number of messages. A topic that sets it is synced as with `flush=always`, which is more "
        "often, and cannot set another `flush`.",
        minimum=1,
    )
    cleanup_policy: str = setting(
        "cleanup.policy",
        "delete",
        "What happens to old segments: `delete` removes them by age and size, `compact` keeps the last record per key.",
        choices=("delete", "compact", "compact,delete", "delete,compact"),
    )
    message_timestamp_type: str = setting(
        "message.timestamp.type",
        "CreateTime",
        "Whether a record carries the producer's time (`CreateTime`) or the broker's (`LogAppendTime`).",
        choices=("CreateTime", "LogAppendTime"),
    )
    message_timestamp_before_max_ms: int = setting(
        "message.timestamp.before.max.ms",
        INT64_MAX,
        "With `CreateTime`: how far a record's timestamp may be before the broker's time; a batch with an older "
        "one is rejected. If it is set, the broker reads the timestamps of all records, which costs throughput.",
        minimum=0,
    )
    message_timestamp_after_max_ms: int = setting(
        "message.timestamp.after.max.ms",
        3600 * 1000,
        "With `CreateTime`: how far a record's timestamp may be after the broker's time; a batch with a later one "
        "is rejected.",
        minimum=0,
    )
    min_compaction_lag_ms: int = setting(
        "min.compaction.lag.ms",
        0,
        "With `cleanup.policy=compact`: how long a record is kept before compaction may remove it.",
        minimum=0,
    )
    max_compaction_lag_ms: int = setting(
        "max.compaction.lag.ms",
        INT64_MAX,
        "With `cleanup.policy=compact`: how long a record may wait for compaction, regardless of "
        "`min.cleanable.dirty.ratio`.",
        minimum=1,
    )
    min_cleanable_dirty_ratio: float = setting(
        "min.cleanable.dirty.ratio",
        0.5,
        "With `cleanup.policy=compact`: the fraction of the log that must be new before it is compacted again.",
        minimum=0,
        maximum=1,
    )
    delete_retention_ms: int = setting(
        "delete.retention.ms",
        24 * 3600 * 1000,
        "With `cleanup.policy=compact`: how long a tombstone (a record without a value) is kept for consumers to see.",
        minimum=0,
    )
    min_insync_replicas: int = setting(
        "min.insync.replicas",
        1,
        "How many replicas must have a record before `acks=all` is acknowledged. The default is 2 for topics with "
        "three or more replicas. It is capped at the number of replicas, so on a single node it is always 1.",
        minimum=1,
    )
    compression_type: str = setting(
        "compression.type",
        "producer",
        "No effect; accepted because Kafka tools send it. Batches are stored as the producer compressed them.",
        choices=("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"),
    )
    unclean_leader_election_enable: bool = setting(
        "unclean.leader.election.enable",
        False,
        "Whether a replica that is not in sync may lead when no other can: the partition becomes available, and "
        "acknowledged records that only the others have are lost.",
    )
    preallocate: bool = setting(
        "preallocate", False, "Accepted for Kafka tools: segments grow as they are written.", is_fixed=True
    )
    remote_storage_enable: bool = setting(
        "remote.storage.enable",
        False,
        "Accepted for Kafka tools: retention through remote storage is not available.",
        is_fixed=True,
    )
    segment_index_bytes: int = setting(
        "segment.index.bytes",
        10 * 1024 * 1024,
        "No effect; accepted because Kafka tools send it. An index is as large as its segment needs.",
        minimum=4,
        maximum=2**31 - 1,
    )
    segment_jitter_ms: int = setting(
        "segment.jitter.ms",
        0,
        "No effect; accepted because Kafka tools send it. Segments are closed after `segment.ms`.",
        minimum=0,
    )
    file_delete_delay_ms: int = setting(
        "file.delete.delay.ms",
        60_000,
        "No effect; accepted because Kafka tools send it. Files of old segments are deleted at once.",
        minimum=0,
    )
    deduplication_window_ms: int = setting(
        "deduplication.window.ms",
        120_000,
        "How long the `message-id` of a message published with deduplication is remembered, from its timestamp on: a "
        "message with the same id that is published within this time is not stored. A partition remembers the last "
        "200,000 ids.",
        minimum=1,
        maximum=24 * 3600 * 1000,
    )
    owner: str = setting(
        OWNER, "", "Who is responsible for the topic: a person, a team or an address.", length_max=OWNER_LENGTH_MAX
    )
    description: str = setting(
        DESCRIPTION, "", "What the topic is about, in a sentence or two.", length_max=DESCRIPTION_LENGTH_MAX
    )
    contract: str = setting(
        CONTRACT, "", "A link to the definition of the topic's messages.", length_max=CONTRACT_LENGTH_MAX
    )
    schema_key: str = setting(
        SCHEMA_KEY,
        "",
        "The subject of the schema registry whose schemas the keys of the topic's records must use.",
        length_max=SCHEMA_SUBJECT_LENGTH_MAX,
    )
    schema_value: str = setting(
        SCHEMA_VALUE,
        "",
        "The subject of the schema registry whose schemas the values of the topic's records must use.",
        length_max=SCHEMA_SUBJECT_LENGTH_MAX,
    )
    schema_validate: str = setting(
        SCHEMA_VALIDATE,
        VALIDATE_ID,
        "What is checked before records are stored, with `millstream.schema.key` or `millstream.schema.value`: that "
        "they name a schema of the subject (`id`), that they also decode and satisfy it (`content`), or nothing "
        "(`off`).",
        choices=(VALIDATE_ID, VALIDATE_CONTENT, VALIDATE_OFF),
    )

    @classmethod
    def from_strings(cls, texts: Mapping[str, str], *, base: TopicSettings | None = None) -> TopicSettings:
        """Parse settings on top of `base`; raise `InvalidSetting` for an invalid one."""
        values = cls._parse(texts)
        if values.get("flush_messages", INT64_MAX) != INT64_MAX:
            # Regardless of the node's default: no other value honours `flush.messages`.
            values.setdefault("flush", FLUSH_ALWAYS)
        settings = dataclasses.replace(base or cls(), **values)
        settings._check()
        return settings

    @property
    def deletes(self) -> bool:
        """Return whether old segments are deleted by age and size."""
        return "delete" in self.cleanup_policy

    @property
    def compacts(self) -> bool:
        """Return whether only the last record of each key is kept."""
        return "compact" in self.cleanup_policy

    @property
    def bounds_past(self) -> bool:
        """Return whether records with old timestamps are rejected."""
        return self.message_timestamp_before_max_ms < INT64_MAX and self.message_timestamp_type == "CreateTime"

    @property
    def reads_records(self) -> bool:
        """Return whether every record is read before it is stored, for its key or its timestamp."""
        return self.compacts or self.bounds_past

    @property
    def validates_schemas(self) -> bool:
        """Return whether records are checked against the topic's schemas before they are stored."""
        return self.schema_validate != VALIDATE_OFF and bool(self.schema_key or self.schema_value)

    def _check(self) -> None:
        if self.min_compaction_lag_ms > self.max_compaction_lag_ms:
            raise InvalidSetting(
                f"min.compaction.lag.ms ({self.min_compaction_lag_ms}) is larger than max.compaction.lag.ms "
                f"({self.max_compaction_lag_ms})"
            )
        if self.flush_messages != INT64_MAX and self.flush != FLUSH_ALWAYS:
            raise InvalidSetting(
                f"flush.messages cannot be combined with flush={self.flush}, which does not sync by messages; set "
                "flush=always to have every message synced, or leave flush.messages out"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A topic as declared in the catalog; `overrides` holds only what its owner set."""

    name: str
    topic_id: UUID
    partitions: int
    replication: int
    overrides: Mapping[str, str]
    created_ms: int
    mirror: str = ""
    """The mirror that writes the topic; empty for a topic that clients write."""
    is_draining: bool = False
    """With `mirror`: nothing is copied yet, and transactions that were open may still end."""
    origins: tuple[str, ...] = ()
    """The ids of the clusters through which its records came here, the first one first. It outlives the mirror."""
    original_id: UUID | None = None
    """With `mirror`: the id of the topic that it is a copy of; None if the source has no topic ids."""

    @property
    def is_internal(self) -> bool:
        """Return whether the topic holds the broker's own state."""
        return self.name in INTERNAL_TOPICS

    @property
    def has_schema_rule(self) -> bool:
        """Return whether the topic names the schemas of its records, which may have to be checked."""
        return SCHEMA_KEY in self.overrides or SCHEMA_VALUE in self.overrides


@dataclass(frozen=True, slots=True)
class TopicPartition:
    """A partition, by the topic's name."""

    topic: str
    partition: PartitionIndex

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


def by_topic(partitions: Iterable[TopicPartition]) -> dict[str, list[PartitionIndex]]:
    """Group partitions by topic, sorted, as Kafka's messages list them."""
    grouped: dict[str, list[PartitionIndex]] = {}
    for partition_key in sorted(partitions, key=lambda partition: (partition.topic, partition.partition)):
        grouped.setdefault(partition_key.topic, []).append(partition_key.partition)
    return grouped


def check_topic_name(name: str, *, noun: str = "topic") -> None:
    """Raise `InvalidTopicName` unless the name follows Kafka's rule; `noun` names what has the name."""
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


_SEED = 0x9747B28C
_MULTIPLIER = 0x5BD1E995
_ROTATION = 24
_MASK = 0xFFFFFFFF


def partition_for_key(key: bytes, partitions: int) -> int:
    """Return the partition of a key by the rule of Kafka's Java client, so that all tools agree.

    It is the murmur2 hash of the key, sign bit cleared, modulo the number of partitions. (librdkafka's default differs;
    it follows this rule with `partitioner=murmur2_random`.)
    """
    return (murmur2(key) & 0x7FFFFFFF) % partitions


def murmur2(data: bytes) -> int:
    """Return the unsigned 32-bit murmur2 hash with Kafka's seed."""
    length = len(data)
    h = _SEED ^ length
    whole = length & ~3
    for at in range(0, whole, 4):
        k = int.from_bytes(data[at : at + 4], "little") * _MULTIPLIER & _MASK
        k = (k ^ k >> _ROTATION) * _MULTIPLIER & _MASK
        h = h * _MULTIPLIER & _MASK ^ k
    if whole < length:
        h = (h ^ int.from_bytes(data[whole:], "little")) * _MULTIPLIER & _MASK
    h = (h ^ h >> 13) * _MULTIPLIER & _MASK
    return h ^ h >> 15
