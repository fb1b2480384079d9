"""Pipelines: Spark jobs declared in the catalog, and their settings."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, ClassVar, Final
from uuid import UUID

from millstream.core.credential import NO_OWNER, Owner
from millstream.core.errors import InvalidPipeline, InvalidSetting, InvalidTopicName
from millstream.core.headers import MESSAGE_ID
from millstream.core.job import CODE_LENGTH_MAX, MISSED, ONCE, Cron, Schedule, check_code, parse_functions, parse_memory
from millstream.core.lake_url import QUARANTINE_SUFFIX, check_absolute_lake_url, check_lake_url
from millstream.core.payload_columns import MESSAGE_TIME, EventTime, check_changes, check_landed, parse_columns
from millstream.core.regex import compile_regex
from millstream.core.requirements import check_requirements
from millstream.core.setting import (
    HIDDEN,
    SealedValue,
    Settings,
    hide_secrets,
    seal_problem,
    secret_names,
    setting,
    suggestion,
)
from millstream.core.sql import check_calls, read_select
from millstream.core.topic import INTERNAL_TOPICS, SCHEMA_SUBJECT_LENGTH_MAX, SUBSCRIPTIONS, check_topic_name

NAME_LENGTH_MAX: Final = 200
TEXT_LENGTH_MAX: Final = 64 * 1024
GROUP_PREFIX: Final = "pipeline-"
GROUP_TYPE: Final = "pipeline"
"""The protocol type of these groups. Not "consumer", which forgets offsets of topics that no member subscribes to."""
LAND_PREFIX: Final = "land-"
"""Followed by the topic's name: the pipeline of a topic created with `--land`."""

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
FAIL: Final = "fail"
SKIP: Final = "skip"
ON_LOST: Final = "on.lost"
DECODE: Final = "decode"
LAKE_OPTIONS: Final = "lake.options"
DELETE_WHEN: Final = "delete.when"
EXPECT: Final = "expect"
EXPECTATIONS_MAX: Final = 100
NO_DECODING: Final = "none"
FUNCTIONS: Final = "functions"
FUNCTIONS_CODE: Final = "functions.code"
DEBEZIUM: Final = "debezium"
APPEND: Final = "append"
UPSERT: Final = "upsert"
BY_SCHEMA: Final = "schema"

_DELAY: Final = re.compile(
    r"(?:interval\s+)?(?:\d+(?:\.\d+)?\s+"
    r"(?:year|month|week|day|hour|minute|second|millisecond|microsecond)s?(?:\s+|$))+",
    re.IGNORECASE,
)
"""A duration in Spark's notation."""


class PipelineKind(StrEnum):
    LAND = "land"
    TRANSFORM = "transform"
    ROUTE = "route"
    JOB = "job"
    LEDGER = "ledger"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule of a route: which messages of a topic go where."""

    name: str
    topic: str
    targets: tuple[str, ...]
    condition: str = ""
    """A SQL condition over the columns of a message; empty matches all."""
    subscription: str = ""
    """A subscription whose filter is the condition; `condition` is then empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipeline:
    noun: ClassVar = "pipeline"
    pipeline_id: UUID
    name: str
    kind: PipelineKind
    overrides: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The settings that were given, by name."""
    is_enabled: bool = True
    """Whether it should run."""
    parked: str = ""
    """The reason why it is parked: it cannot run as declared."""
    created_ms: int = 0
    rules: tuple[Rule, ...] = ()
    """The rules of a route, by name."""
    version: int = 0
    """How often it has changed since it was declared; the higher of two reported versions is newer."""
    sealed: Mapping[str, SealedValue] = field(default_factory=dict, repr=False)
    """Secrets that this node cannot open, by setting; they are not among `overrides`."""
    owner: Owner = NO_OWNER
    """The principal who changed it last, with whose rights it runs."""
    requests: int = 0
    """How many runs of a job were requested, instead of scheduled."""

    @property
    def settings_class(self) -> type[PipelineSettings]:
        return SETTINGS[self.kind]

    @property
    def group(self) -> str:
        """Return the consumer group that shows its progress and whose only member runs it."""
        return f"{GROUP_PREFIX}{self.name}"

    @property
    def is_due(self) -> bool:
        """Return whether a node should be running it."""
        return self.is_enabled and not self.parked and not self.sealed

    @property
    def idle_reason(self) -> str:
        """The reason why it is not run although it should be; empty if nothing prevents it."""
        return self.parked or seal_problem(self.sealed)

    def shown_overrides(self) -> dict[str, str]:
        """Return the settings that were given, without secrets."""
        return {**hide_secrets(SETTINGS[self.kind], self.overrides), **dict.fromkeys(self.sealed, HIDDEN)}

    @property
    def settings(self) -> PipelineSettings:
        return SETTINGS[self.kind].from_strings(self.overrides)

    @property
    def has_own_driver(self) -> bool:
        """Whether it runs code of users, and so in a separate process."""
        return self.kind is PipelineKind.JOB or bool(self.overrides.get(FUNCTIONS, "").strip())

    @property
    def job_settings(self) -> JobSettings:
        """Return how its own driver is run; raise `InvalidSetting` if it has none."""
        settings = self.settings
        if isinstance(settings, JobSettings):
            return settings
        if isinstance(settings, TransformSettings) and self.has_own_driver:
            return settings.as_job()
        raise InvalidSetting(f"pipeline {self.name!r} has no separate driver")

    def flows(self) -> dict[str, set[str]]:
        """Return the topics that it reads by name, as far as known without Spark, each with the topics it leads to."""
        return self.settings.flows(self.rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings(Settings):
    holder: ClassVar = "a pipeline of this kind"

    start: str = setting(
        "from",
        EARLIEST,
        "Where it starts on partitions that it has not read: `earliest` or `latest`.",
        choices=(EARLIEST, LATEST),
    )
    batch_max: int = setting(
        "batch.max.messages", 1_000_000, "The maximum number of messages in one batch.", minimum=1, maximum=100_000_000
    )
    stall_ms: int = setting(
        "stall.ms",
        30 * 60_000,
        "How long a batch may make no progress (no task ends or advances) before it is cancelled and counts as "
        "failed. 0 waits forever.",
        minimum=0,
        maximum=7 * 24 * 3600 * 1000,
    )

    def check_texts(self) -> None:
        """Raise `InvalidSetting` for texts that cannot be run; called when they are given.

        Stored texts are not checked again, so that they can always be shown and changed.
        """

    def flows(self, rules: Iterable[Rule]) -> dict[str, set[str]]:
        """Return the topics that are read by name, each with the topics that its messages lead to."""
        return {}

    @property
    def names_every_topic(self) -> bool:
        """Whether `flows` has every topic that is read by name."""
        return True

    def unused_names(self) -> Iterator[tuple[str, str, Collection[str]]]:
        """Yield settings that name something the pipeline does not read: setting, name, and the names that it reads."""
        return iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicToTopicSettings(PipelineSettings):
    """Settings of pipelines that read topics and write topics."""

    on_lost: str = setting(
        ON_LOST,
        FAIL,
        "What to do when retention has deleted messages before they were read: `fail`, or `skip` and count them.",
        choices=(FAIL, SKIP),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LandSettings(PipelineSettings):
    """Settings of pipelines that turn topics into tables."""

    topics: str = setting("topics", "", "The topics to land, separated by commas.")
    pattern: str = setting(
        "pattern",
        "",
        "A regular expression instead: every topic whose whole name matches it, including topics created later.",
    )
    lake: str = setting(
        "lake",
        "",
        "Where the tables are stored: a folder or a URL such as s3://bucket/path; empty means the node's "
        "`pipelines-lake`.",
    )
    lake_options: str = setting(
        LAKE_OPTIONS,
        "",
        "Options of the object store that holds the tables, such as credentials, as a JSON object of strings: "
        '{"AWS_ACCESS_KEY_ID": "…"}. They override the environment of the driver, and are never shown.',
        is_secret=True,
    )
    format: str = setting("format", "delta", "The table format.", choices=("delta", "parquet"))
    every_ms: int = setting(
        "every.ms",
        60_000,
        "How long messages are collected before they are landed; a full batch is landed at once.",
        minimum=100,
        maximum=24 * 3600 * 1000,
    )
    decode: str = setting(
        DECODE,
        NO_DECODING,
        "Whether payloads become columns: `json` decodes them by the setting `schema`, or infers the columns; `schema` "
        "decodes them by the registered schemas that they name; `debezium` decodes the rows in "
        "Debezium's change events.",
        choices=(NO_DECODING, "json", BY_SCHEMA, DEBEZIUM),
    )
    mode: str = setting(
        "mode",
        APPEND,
        "`append` adds every message to the table as a row; `upsert` keeps one row per key, the newest.",
        choices=(APPEND, UPSERT),
    )
    key: str = setting(
        "key",
        "",
        "With mode=upsert: the payload fields that identify a row, separated by commas, as in `customer_id` or "
        "`region,order.id`; empty means the key of the message.",
    )
    order_by: str = setting(
        "order.by",
        "",
        "With mode=upsert: the payload field that says which of two changes to a key is newer, as in `updated_at`; if "
        "its values are equal, the higher offset is newer. Empty means the offset alone, which needs each key to stay "
        "in one partition.",
    )
    delete_when: str = setting(
        DELETE_WHEN,
        "",
        "With mode=upsert: a condition on the payload under which a message deletes its key, as in `op = 'd'`. A "
        "message without a payload always deletes its key.",
    )
    delete_retention_ms: int = setting(
        "delete.retention.ms",
        7 * 24 * 3600 * 1000,
        "With mode=upsert: how long a delete is remembered, so that a late update does not restore its key.",
        minimum=0,
        maximum=10 * 365 * 24 * 3600 * 1000,
    )
    bucket_bytes: int = setting(
        "bucket.bytes",
        32 * 1024 * 1024,
        "With mode=upsert: the size at which a bucket, the unit that is rewritten, is split in two.",
        minimum=1024,
        maximum=1024**3,
    )
    replaced_retention_ms: int = setting(
        "replaced.retention.ms",
        3600 * 1000,
        "With mode=upsert: how long replaced files are kept for queries that are reading them, in whole hours.",
        minimum=0,
        maximum=7 * 24 * 3600 * 1000,
    )
    partition_by: str = setting(
        "partition.by",
        "",
        "The event time by which the table is partitioned, as in `day(created_at)` or `hour(created_at)`: a column of "
        "the table, or `timestamp`, the message's own time. Empty partitions by the hour of landing. It is fixed when "
        "the table is created.",
    )
    schema: str = setting(
        "schema",
        "",
        "The columns of decoded payloads in Spark's notation, for example `id long, customer struct<name string>`; "
        "empty infers them from the payloads and adds new ones as they appear.",
    )
    detect_types: bool = setting(
        "detect.types",
        False,
        "Whether the sample that decides the columns of a new table also detects timestamps, in text that is "
        "always a time.",
    )
    maps: str = setting(
        "maps",
        "",
        "Payload fields, separated by commas, whose objects become maps of text instead of a column per field.",
    )
    cloud_events: bool = setting(
        "cloudevents", False, "Whether the attributes of CloudEvents in headers (`ce_id`, `ce_type` …) become columns."
    )
    expect: str = setting(
        EXPECT,
        "",
        'Conditions that messages should meet, as a JSON list: ["total >= 0"]. A condition that is unknown, because a '
        "field is missing, counts as met.",
    )
    on_violation: str = setting(
        "on.violation",
        "quarantine",
        "What to do with messages that do not meet `expect`: put them into the `quarantine`, `fail` the pipeline, or "
        "land and `count` them.",
        choices=("quarantine", FAIL, "count"),
    )
    widen_max_bytes: int = setting(
        "widen.max.bytes",
        100 * 1024**3,
        "The largest table that is rewritten when a column of integers has to hold fractions, or its schema says "
        "so. In larger tables such columns stay, and values that do not fit go to the quarantine; 0 rewrites "
        "none.",
        minimum=0,
        maximum=2**60,
    )
    dedupe_ms: int = setting(
        "dedupe.ms",
        0,
        "How long message ids are remembered: a message whose id was landed within this time is skipped; 0 keeps all.",
        minimum=0,
        maximum=7 * 24 * 3600 * 1000,
    )
    dedupe_header: str = setting("dedupe.header", MESSAGE_ID, "The header that holds the id of a message.")
    compact: bool = setting("compact", True, "Whether small files of past hours are merged into large ones.")

    def _check(self) -> None:
        if self.topics and self.pattern:
            raise InvalidSetting(
                "`topics` and `pattern` are both set; set one of them: a pattern can also list topics, as in a|b"
            )
        if not self.topics and not self.pattern:
            raise InvalidSetting("set either `topics` (--topic) or `pattern` (--pattern)")
        if self.pattern:
            compile_regex(self.pattern)
        for name in self.topic_names:
            check_topic_name(name)
        if self.schema and self.decode == NO_DECODING:
            raise InvalidSetting("a `schema` is for payloads that are decoded: set decode=json with it")
        if self.schema and self.decode == BY_SCHEMA:
            raise InvalidSetting("with decode=schema the registry determines the columns; leave `schema` out")
        if self.mode == UPSERT:
            self._check_upsert()
        elif self._upsert_settings or self.decode == DEBEZIUM:
            named = self._upsert_settings or "decode=debezium"
            raise InvalidSetting(f"a table with one row per key is needed for {named}: set mode=upsert (--mode upsert)")
        event_time = self.event_time
        if event_time is not None and self.decode == NO_DECODING and event_time.column != MESSAGE_TIME:
            raise InvalidSetting(
                f"`partition.by` names {event_time.column!r}, and payloads are not decoded: set decode=json (--decode "
                f"json), or partition by {MESSAGE_TIME}, the time of the message"
            )

    def _check_upsert(self) -> None:
        if self.format != "delta":
            raise InvalidSetting("mode=upsert needs format=delta: readers of plain files would see half a commit")
        if self.dedupe_ms:
            raise InvalidSetting("mode=upsert has one row per key already; leave `dedupe.ms` out")
        if self.partition_by:
            raise InvalidSetting(
                "mode=upsert stores rows by their key, and a change can give a row another time; leave `partition.by` "
                "out"
            )
        if self._upsert_settings and self.decode in (NO_DECODING, BY_SCHEMA):
            raise InvalidSetting(
                f"JSON payloads are needed for {self._upsert_settings}: set decode=json (--decode json), or keep the "
                "newest payload of each message key without naming fields"
            )
        if len(set(self.key_fields)) != len(self.key_fields) or "" in self.key_fields:
            raise InvalidSetting(f"`key` must name distinct fields, separated by commas, not {self.key!r}")

    @property
    def _upsert_settings(self) -> str:
        """Return the given settings that name payload fields for upserts."""
        values = {"key": self.key, "order.by": self.order_by, DELETE_WHEN: self.delete_when}
        return " and ".join(f"`{name}`" for name, value in values.items() if value)

    @property
    def event_time(self) -> EventTime | None:
        """Return the time by which its tables are partitioned; None if that is the time of landing."""
        return EventTime.parse(self.partition_by) if self.partition_by.strip() else None

    @property
    def expectations(self) -> list[str]:
        """Return the conditions that messages should meet."""
        return expectations_of(self.expect)

    @property
    def map_fields(self) -> list[str]:
        return [name.strip() for name in self.maps.split(",") if name.strip()]

    @property
    def key_fields(self) -> list[str]:
        """Return the payload fields of the key; none if it is the key of the message."""
        return [name.strip() for name in self.key.split(",")] if self.key.strip() else []

    def check_texts(self) -> None:
        """Raise `InvalidSetting` for a schema that no table can have, clashing names or invalid locations."""
        if self.lake:
            check_absolute_lake_url(self.lake)
        self.storage_options()
        expectations = self.expectations
        if self.schema:
            columns = parse_columns(self.schema)
            check_landed(columns)
            if event_time := self.event_time:
                event_time.check_columns(columns)
            check_changes(columns, self.key_fields, self.order_by.strip(), is_debezium=self.decode == DEBEZIUM)
        if self.decode in (NO_DECODING, BY_SCHEMA) and (expectations or self.maps or self.detect_types):
            raise InvalidSetting(
                "`expect`, `maps` and `detect.types` are for decoded JSON payloads: set decode=json with them"
            )
        if self.maps and self.schema:
            raise InvalidSetting("`maps` is for inferred columns; in `schema`, declare them as map<string, string>")
        names = self.topic_names
        for name in names:
            if names.count(name) > 1:
                raise InvalidSetting(f"`topics` names {name!r} twice")
            if name + QUARANTINE_SUFFIX in names:
                raise InvalidSetting(f"topic {name + QUARANTINE_SUFFIX!r} has the name of the quarantine of {name!r}")

    def storage_options(self) -> dict[str, str]:
        """Return the options of the object store by name; no error holds a value."""
        return named_texts(LAKE_OPTIONS, self.lake_options)

    def flows(self, rules: Iterable[Rule]) -> dict[str, set[str]]:
        """Return the topics that are landed by name; their messages go to no topic."""
        return {topic: set() for topic in self.topic_names}

    @property
    def topic_names(self) -> list[str]:
        return [name.strip() for name in self.topics.split(",") if name.strip()]

    def takes(self, topic: str) -> bool:
        return self.matcher()(topic)

    def matcher(self) -> Callable[[str], bool]:
        """Return a predicate over topic names, for callers that check many."""
        if not self.pattern:
            return frozenset(self.topic_names).__contains__
        expression = compile_regex(self.pattern)
        return lambda topic: expression.fullmatch(topic) is not None


def _requirements() -> Any:
    about = (
        "The packages that the code needs, as in a requirements.txt; they are resolved to wheels when the pipeline "
        "first runs."
    )
    return setting("requirements", "", about)


def _lock() -> Any:
    about = (
        "The resolved requirements, each with its version and hashes; written by the node that resolved them. Unset it "
        "to resolve them again."
    )
    return setting("lock", "", about)


def _memory(name: str, whose: str) -> Any:
    about = f"The memory of its own driver's {whose}, such as 512m or 2g."
    return setting(name, "1g", about, length_max=16)


@dataclass(frozen=True, slots=True, kw_only=True)
class TransformSettings(TopicToTopicSettings):
    """Settings of pipelines that turn topics into a topic with a SQL statement."""

    sql: str = setting(
        "sql", "", "The SELECT statement. Topics are tables by their names, decoded payloads are columns."
    )
    into: str = setting("into", "", "The topic to write the rows to.")
    into_schema: str = setting(
        "into.schema",
        "",
        "The subject of the schema registry whose latest schema encodes the rows; without one they are JSON.",
        length_max=SCHEMA_SUBJECT_LENGTH_MAX,
    )
    decode: str = setting(
        DECODE,
        "json",
        "How payloads are decoded: `json` decodes their fields into columns, `schema` uses the registered schemas "
        "that they name, `none` leaves key and value unchanged.",
        choices=(NO_DECODING, "json", BY_SCHEMA),
    )
    schemas: str = setting(
        "schemas",
        "",
        'The columns of payloads by topic, as a JSON object: {"orders": "id long, amount double"}; for other '
        "topics, they are inferred from a sample when the pipeline first runs.",
    )
    tables: str = setting(
        "tables", "", 'Lake tables that the statement joins with, as a JSON object: {"customers": "/lake/customers"}.'
    )
    watermarks: str = setting(
        "watermarks", "", 'For windows: how late rows may arrive, as a JSON object: {"orders": "placed_at 10 minutes"}.'
    )
    functions: str = setting(
        FUNCTIONS,
        "",
        "Python functions that the statement calls, as module:function, separated by commas. The pipeline then has "
        "its own driver, like a job.",
    )
    functions_code: str = setting(
        FUNCTIONS_CODE,
        "",
        'The source of the modules of `functions`, as a JSON object: {"prices": "def vat(…) …"}; modules that are not '
        "listed come from packages.",
    )
    requirements: str = _requirements()
    lock: str = _lock()
    memory: str = _memory("memory", "Java process")
    python_memory: str = _memory("python.memory", "Python: the code itself, and each worker that runs its functions")

    def _check(self) -> None:
        if not self.sql.strip() or not self.into:
            raise InvalidSetting("a transform needs `sql`, a SELECT statement, and `into`, the topic for its rows")
        check_target(self.into)
        if self.requirements.strip() and not self.functions.strip():
            raise InvalidSetting("`requirements` are the packages of `functions`, and there are none")
        parse_memory(self.memory, name="memory")
        parse_memory(self.python_memory, name="python.memory")

    def modules(self) -> dict[str, str]:
        """Return the module of each Python function that the statement may call."""
        return parse_functions(self.functions, named_texts(FUNCTIONS_CODE, self.functions_code))

    def as_job(self) -> JobSettings:
        """Return how the driver of a statement with functions is run: like a continuous job."""
        return JobSettings(
            start=self.start,
            code=self.functions_code or self.functions,
            requirements=self.requirements,
            lock=self.lock,
            continuous=True,
            memory=self.memory,
            python_memory=self.python_memory,
        )

    def check_texts(self) -> None:
        """Raise `InvalidSetting` for an invalid statement, one that reads nothing or its own output, and malformed
        JSON.
        """
        if self.schemas.strip() and self.decode == NO_DECODING:
            raise InvalidSetting("`schemas` are for payloads that are decoded: set decode=json with them")
        if self.schemas.strip() and self.decode == BY_SCHEMA:
            raise InvalidSetting("with decode=schema the registry determines the columns; leave `schemas` out")
        for topic, text in named_texts("schemas", self.schemas).items():
            parse_columns(text, about=f"the schema of {topic!r}")
        check_requirements(self.requirements)
        self.delays()
        check_calls(self.sql, self.modules())
        for place in named_texts("tables", self.tables).values():
            check_lake_url(place)
        statement = read_select(self.sql)
        topics = self.topics()
        if not topics and statement.is_complete:
            raise InvalidSetting("the statement reads no topic: name topics as tables")
        for what, instead, names in statement.endless:
            of_topics = sorted(names.intersection(topics))
            if of_topics:
                raise InvalidSetting(
                    f"{what} needs all messages of {of_topics[0]!r} at once, and a topic never ends; {instead}"
                )
        if self.into in topics:
            raise InvalidSetting(f"the statement reads the topic {self.into!r} that it writes, and would never end")

    def topics(self) -> tuple[str, ...]:
        """Return the topics that the statement reads, as far as known without Spark."""
        tables = named_texts("tables", self.tables)
        return tuple(name for name in read_select(self.sql).reads if name not in tables)

    def flows(self, rules: Iterable[Rule]) -> dict[str, set[str]]:
        """Return the topics that the statement reads, each with the topic that takes the rows."""
        return {topic: {self.into} for topic in self.topics()}

    @property
    def names_every_topic(self) -> bool:
        """Whether the statement could be read without Spark."""
        return read_select(self.sql).is_complete

    def unused_names(self) -> Iterator[tuple[str, str, Collection[str]]]:
        """Yield names of `schemas`, `watermarks` and `tables` that the statement does not read."""
        reads = read_select(self.sql).reads
        documents = {"schemas": self.schemas, "watermarks": self.watermarks, "tables": self.tables}
        for setting_name, text in documents.items():
            for name in named_texts(setting_name, text):
                if name not in reads and self.names_every_topic:
                    yield setting_name, name, reads

    def delays(self) -> dict[str, tuple[str, str]]:
        """Return the watermarks by topic: a column and its delay."""
        delays: dict[str, tuple[str, str]] = {}
        for topic, text in named_texts("watermarks", self.watermarks).items():
            column, _, delay = text.strip().partition(" ")
            if not _DELAY.fullmatch(delay.strip()):
                raise InvalidSetting(
                    f"the watermark of {topic!r} must be a column and a delay, such as `placed_at 10 minutes`, "
                    f"not {text!r}"
                )
            delays[topic] = (column, delay.strip())
        return delays


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSettings(TopicToTopicSettings):
    """Settings of pipelines that route messages into topics, by rules that the catalog stores with the pipeline."""

    decode: str = setting(
        DECODE,
        "json",
        "What conditions may use: with `json` the fields of payloads, as in `payload.total`; with `none` only the "
        "other columns.",
        choices=(NO_DECODING, "json"),
    )

    def flows(self, rules: Iterable[Rule]) -> dict[str, set[str]]:
        """Return the topics of the rules, each with the targets of its rules."""
        flows: dict[str, set[str]] = {}
        for rule in rules:
            flows.setdefault(rule.topic, set()).update(rule.targets)
        return flows


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSettings(PipelineSettings):
    """Settings of users' own programs."""

    code: str = setting("code", "", "The program: Python that defines `run(spark, millstream)`.")
    requirements: str = _requirements()
    lock: str = _lock()
    every_ms: int = setting(
        "every.ms",
        0,
        "The interval between runs; the first run starts at once. 0 means no interval.",
        minimum=0,
        maximum=366 * 24 * 3600 * 1000,
    )
    cron: str = setting("cron", "", "The times of runs, as minute, hour, day, month and weekday: `0 3 * * *`.")
    timezone: str = setting("timezone", "UTC", "The time zone of `cron`, such as Europe/Berlin.", length_max=64)
    continuous: bool = setting(
        "continuous", False, "Whether the job runs continuously: its streaming queries are restarted when they fail."
    )
    missed: str = setting(
        "missed",
        ONCE,
        "What to do when scheduled times were missed: `once` runs once for all of them, `skip` waits for the next, "
        "`all` runs for each.",
        choices=MISSED,
    )
    retries: int = setting("retries", 3, "How often a failed run is tried again.", minimum=0, maximum=1000)
    retry_ms: int = setting(
        "retry.ms",
        5000,
        "The pause before a failed run is tried again; it doubles with each attempt, up to five minutes.",
        minimum=0,
        maximum=3600 * 1000,
    )
    timeout_ms: int = setting(
        "timeout.ms",
        24 * 3600 * 1000,
        "How long an attempt may take before it is ended and counts as failed; 0 waits forever. Not for continuous "
        "jobs.",
        minimum=0,
        maximum=366 * 24 * 3600 * 1000,
    )
    memory: str = _memory("memory", "Java process")
    python_memory: str = _memory("python.memory", "Python: the code itself, and each worker that runs its functions")
    parameters: str = setting(
        "parameters", "", 'Parameters for the code, as a JSON object of strings: {"day": "monday"}.'
    )
    spark: str = setting(
        "spark", "", 'Settings of its Spark session, as a JSON object: {"spark.sql.shuffle.partitions": "8"}.'
    )
    stall_ms: int = setting("stall.ms", 0, "A job has `timeout.ms` instead.", is_fixed=True)

    def _check(self) -> None:
        if not self.code.strip():
            raise InvalidSetting("a job needs `code` (--file), a program that defines run(spark, millstream)")
        present = [
            name
            for name, has in (("every.ms", self.every_ms), ("cron", self.cron), ("continuous", self.continuous))
            if has
        ]
        if len(present) > 1:
            raise InvalidSetting(f"{' and '.join(present)} are set; a job has one of them, or none")
        if self.every_ms and self.every_ms < _EVERY_MS_MIN:
            raise InvalidSetting(
                f"every.ms must be at least {_EVERY_MS_MIN} ms, not {self.every_ms} ms: Spark has to start"
            )
        parse_memory(self.memory, name="memory")
        parse_memory(self.python_memory, name="python.memory")

    def check_texts(self) -> None:
        """Raise `InvalidSetting` for code, times, parameters or Spark settings that cannot be used."""
        check_code(self.code)
        check_requirements(self.requirements)
        self.schedule()
        named_texts("parameters", self.parameters)
        for name in named_texts("spark", self.spark):
            if not name.startswith("spark."):
                raise InvalidSetting(f"`spark` has {name!r}; settings of Spark begin with spark.")

    def schedule(self) -> Schedule:
        cron = Cron.parse(self.cron, self.timezone) if self.cron else None
        return Schedule(every_ms=self.every_ms, cron=cron, missed=self.missed)

    @property
    def names_every_topic(self) -> bool:
        """Return False: only the code of the job knows them."""
        return False


_EVERY_MS_MIN: Final = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerSettings(PipelineSettings):
    """Settings of the pipeline that lands the events of deliveries, and audits them."""

    lake: str = setting(
        "lake",
        "",
        "Where the ledger's table is stored: a folder or a URL such as s3://bucket/path; empty means the node's "
        "`pipelines-lake`.",
    )
    lake_options: str = setting(
        LAKE_OPTIONS,
        "",
        "Options of the object store that holds the table, as a JSON object of strings. They override the environment "
        "of the driver, and are never shown.",
        is_secret=True,
    )
    every_ms: int = setting(
        "every.ms",
        60_000,
        "How long events are collected before they are landed; a full batch is landed at once.",
        minimum=100,
        maximum=24 * 3600 * 1000,
    )
    audit_every_ms: int = setting(
        "audit.every.ms",
        24 * 3600 * 1000,
        "How often all messages are accounted for; findings are exported as metrics. 0 disables the audit.",
        minimum=0,
        maximum=365 * 24 * 3600 * 1000,
    )

    format: ClassVar[str] = "delta"

    def check_texts(self) -> None:
        """Raise `InvalidSetting` for an invalid location."""
        if self.lake:
            check_absolute_lake_url(self.lake)
        self.storage_options()

    def storage_options(self) -> dict[str, str]:
        """Return the options of the object store by name; no error holds a value."""
        return named_texts(LAKE_OPTIONS, self.lake_options)

    def matcher(self) -> Callable[[str], bool]:
        """Return a predicate over topic names: it reads the delivery state alone."""
        return SUBSCRIPTIONS.__eq__


SETTINGS: Final[Mapping[PipelineKind, type[PipelineSettings]]] = {
    PipelineKind.LAND: LandSettings,
    PipelineKind.TRANSFORM: TransformSettings,
    PipelineKind.ROUTE: RouteSettings,
    PipelineKind.JOB: JobSettings,
    PipelineKind.LEDGER: LedgerSettings,
}
"""The kinds. Each has its job in `pipelines/jobs/<kind>/job.py`, and its command in `cli/pipeline.py`; those
of users have separate drivers, `pipelines/runtime/job_driver.py`.
"""

LONG_TEXTS: Final = {"code": CODE_LENGTH_MAX, FUNCTIONS_CODE: CODE_LENGTH_MAX, "lock": CODE_LENGTH_MAX}
"""Settings that may be longer than others."""


SECRET_SETTINGS: Final = frozenset(name for kind in SETTINGS.values() for name in secret_names(kind))


def kind_of(text: str) -> PipelineKind:
    """Return the kind with this name; raise `InvalidPipeline` if there is none."""
    try:
        return PipelineKind(text)
    except ValueError:
        kinds = ", ".join(PipelineKind)
        hint = suggestion(text, [kind.value for kind in PipelineKind])
        raise InvalidPipeline(f"{text!r} is not a kind of pipeline; the kinds are: {kinds}{hint}") from None


def check_pipeline(name: str, kind: PipelineKind, overrides: Mapping[str, str]) -> PipelineSettings:
    """Return the parsed settings; raise `InvalidRequest` if the pipeline cannot be declared."""
    if not name or len(name) > NAME_LENGTH_MAX:
        raise InvalidPipeline(f"the name of a pipeline has 1 to {NAME_LENGTH_MAX} characters")
    if name in set(PipelineKind):
        raise InvalidPipeline(
            f"a pipeline cannot be called {name!r}, since `millstream pipeline run` takes that for a kind"
        )
    _check_name(name)
    for setting_name, text in overrides.items():
        limit = LONG_TEXTS.get(setting_name, TEXT_LENGTH_MAX)
        if len(text) > limit:
            raise InvalidSetting(f"setting {setting_name} has at most {limit} characters, not {len(text)}")
    settings = SETTINGS[kind].from_strings(overrides)
    settings.check_texts()
    return settings


def _check_name(name: str) -> None:
    """Raise `InvalidPipeline` for a name that its group or a folder cannot have: the rule for topic names applies."""
    try:
        check_topic_name(name, noun="pipeline")
    except InvalidTopicName as refused:
        raise InvalidPipeline(str(refused)) from None


def check_target(topic: str) -> None:
    """Raise `InvalidRequest` for a topic that pipelines cannot write to."""
    check_topic_name(topic)
    if topic in INTERNAL_TOPICS:
        raise InvalidPipeline(f"{topic!r} is the broker's own; a pipeline cannot write to it")


def expectations_of(text: str) -> list[str]:
    """Parse the conditions that messages should meet; raise `InvalidSetting` if they are not a list of texts."""
    if not text.strip():
        return []
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidSetting(f'`{EXPECT}` must be a JSON list, as in ["total >= 0"]: {error}') from None
    if not isinstance(listed, list) or not all(
        isinstance(condition, str) and condition.strip() for condition in listed
    ):
        raise InvalidSetting(f'`{EXPECT}` must be a JSON list of conditions, as in ["total >= 0"]')
    if len(listed) > EXPECTATIONS_MAX:
        raise InvalidSetting(f"`{EXPECT}` has at most {EXPECTATIONS_MAX} conditions, not {len(listed)}")
    return listed


def named_texts(setting_name: str, text: str) -> dict[str, str]:
    """Parse a setting that is a JSON object of strings; raise `InvalidSetting` otherwise."""
    if not text.strip():
        return {}
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidSetting(f"{setting_name} must be a JSON object: {error}") from None
    if not isinstance(document, dict) or not all(isinstance(value, str) for value in document.values()):
        raise InvalidSetting(f"{setting_name} must be a JSON object whose values are strings")
    return document
