"""The options of `format("millstream")`: those of Spark's Kafka source and sink, and a few more.

Every option is honoured or refused with advice, so that neither a typing error nor an unsupported setting changes what
is read, where rows go, or who can see them. Options that only tune Spark's Kafka client are the exception: they cause a
warning.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from millstream.core.errors import InvalidSetting
from millstream.core.setting import parse_duration_ms, suggestion
from millstream.pipelines.source.access import ACCESS_OPTIONS, NO_ACCESS, Access, may_write, parse_access
from millstream.protocol.records.arrow import NAMES
from millstream.protocol.wire.fetch import READ_COMMITTED, READ_UNCOMMITTED
from millstream.protocol.wire.group_offsets import GroupMember

OFFSET_LATEST: Final = -1
OFFSET_EARLIEST: Final = -2
"""Kafka's codes for the two ends of a partition, in JSON offsets and in lookups."""

Offsets = Mapping[str, Mapping[int, int]]
"""Offsets by topic and partition."""


@dataclass(frozen=True, slots=True)
class End:
    """One of the two ends of every partition."""

    offset: int


@dataclass(frozen=True, slots=True)
class StartingTimestamp:
    """The first record of every partition since a time."""

    timestamp_ms: int
    or_latest: bool


@dataclass(frozen=True, slots=True)
class Timestamps:
    times_ms: Offsets
    or_latest: bool


@dataclass(frozen=True, slots=True)
class NamedOffsets:
    """An offset for every partition; -2 is the earliest and -1 the latest."""

    offsets: Offsets


@dataclass(frozen=True, slots=True)
class FromLake:
    """The first message in the log or the landed table."""


Position = End | StartingTimestamp | Timestamps | NamedOffsets | FromLake

EARLIEST: Final = End(OFFSET_EARLIEST)
LATEST: Final = End(OFFSET_LATEST)
EARLIEST_LANDED: Final = FromLake()


def parse_offsets(option: str, text: str, *, minimum: int = OFFSET_EARLIEST) -> Offsets:
    """Parse `{"orders": {"0": 23, "1": -1}}`."""
    if minimum >= 0:
        kind = "a JSON document"
    elif option.startswith("starting"):
        kind = "earliest, latest, earliest-landed or a JSON document"
    else:
        kind = "latest or a JSON document"
    return _parse(option, text, kind, minimum)


def parse_times(option: str, text: str) -> Offsets:
    """Parse `{"orders": {"0": 1700000000000}}`."""
    return _parse(option, text, "a JSON document", 0)


def _parse(option: str, text: str, kind: str, minimum: int) -> Offsets:
    try:
        document = json.loads(text)
        return {
            str(topic): {int(partition): _number(value, minimum) for partition, value in dict(numbers).items()}
            for topic, numbers in dict(document).items()
        }
    except (ValueError, TypeError) as error:
        example = '{"orders": {"0": 23, "1": 42}}'
        raise InvalidSetting(f"option {option} must be {kind} such as {example}: {error}") from None


def _number(value: object, minimum: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{value!r} is not allowed here")
    return value


BROKERS: Final = "kafka.bootstrap.servers"
DEFAULT_BROKERS: Final = "localhost:9092"

_BOTH: Final = (BROKERS, "includeHeaders", "kafka.client.id", "kafka.request.timeout.ms", "path", *ACCESS_OPTIONS)
_READ: Final = (
    *_BOTH,
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "failOnDataLoss",
    "failOnUnreadable",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    "groupId",
    "kafka.group.id",
    "isolation",
    "kafka.isolation.level",
    "kafka.max.partition.fetch.bytes",
    "filter",
    "columns",
    "valueFormat",
    "decode",
    "schemaSubject",
    "schemaMessage",
    "mode",
    "lake",
)
_WRITE: Final = (
    *_BOTH,
    "topic",
    "schema",
    "kafka.compression.type",
    "compression",
    "txnAppId",
    "txnVersion",
    "sourceGroup",
    "sourceOffsets",
    "sourceMember",
    "sourceGeneration",
    "kafka.acks",
)
READ_ONLY: Final = frozenset(name.lower() for name in _READ) - frozenset(name.lower() for name in _WRITE)
WRITE_ONLY: Final = frozenset(name.lower() for name in _WRITE) - frozenset(name.lower() for name in _READ)
_WITHOUT_EFFECT: Final = {
    "kafkaConsumer.pollTimeoutMs": "a fetch is retried until kafka.request.timeout.ms has passed",
    "fetchOffset.numRetries": "offset lookups are retried until kafka.request.timeout.ms has passed",
    "fetchOffset.retryIntervalMs": "offset lookups are retried until kafka.request.timeout.ms has passed",
    "groupIdPrefix": "no consumer group is created; groupId names the one that progress is committed to",
    **dict.fromkeys(
        (
            "kafka.batch.size",
            "kafka.buffer.memory",
            "kafka.check.crcs",
            "kafka.connections.max.idle.ms",
            "kafka.default.api.timeout.ms",
            "kafka.delivery.timeout.ms",
            "kafka.enable.idempotence",
            "kafka.fetch.max.bytes",
            "kafka.fetch.max.wait.ms",
            "kafka.fetch.min.bytes",
            "kafka.heartbeat.interval.ms",
            "kafka.linger.ms",
            "kafka.max.block.ms",
            "kafka.max.in.flight.requests.per.connection",
            "kafka.max.poll.interval.ms",
            "kafka.max.poll.records",
            "kafka.max.request.size",
            "kafka.metadata.max.age.ms",
            "kafka.receive.buffer.bytes",
            "kafka.reconnect.backoff.max.ms",
            "kafka.reconnect.backoff.ms",
            "kafka.retries",
            "kafka.retry.backoff.max.ms",
            "kafka.retry.backoff.ms",
            "kafka.send.buffer.bytes",
            "kafka.session.timeout.ms",
        ),
        "it tunes Kafka's Java client, which is not used",
    ),
}
"""Options of Spark's Kafka source that affect neither rows nor where they go."""
BY_SCHEMA: Final = "schema"
_SECURITY: Final = ("kafka.security.", "kafka.sasl.", "kafka.ssl.")
_SPARKS_OWN: Final = frozenset(
    {
        "checkpointlocation",
        "queryname",
        "outputmode",
        "asyncprogresstrackingenabled",
        "asyncprogresstrackingcheckpointintervalms",
        "asyncprogresstrackingoverridesinksupportcheck",
    }
)
"""Options that Spark itself reads and passes on to the source."""

DEFAULTS_VARIABLE: Final = "_MILLSTREAM_SOURCE"
"""Holds options for every query of a process and its workers that names no brokers, as a JSON object."""
SAMPLE_VARIABLE: Final = "_MILLSTREAM_SAMPLE"
"""In a dry run, how many messages of a partition are read; nothing is written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    brokers: str = DEFAULT_BROKERS
    access: Access = NO_ACCESS
    client_id: str = "millstream-spark"
    timeout_s: float = 60.0
    subscribe: tuple[str, ...] = ()
    pattern: str | None = None
    assign: Mapping[str, tuple[int, ...]] | None = None
    starting: Position | None = None
    """None: the earliest for a batch, the latest for a stream, as in Spark."""
    ending: Position = LATEST
    fail_on_data_loss: bool = True
    fail_on_unreadable: bool = True
    """Whether unreadable batches fail the query, or are skipped with a warning."""
    offsets_max: int | None = None
    offsets_min: int | None = None
    trigger_delay_ms: int = 15 * 60_000
    min_partitions: int | None = None
    records_per_task_max: int | None = None
    include_headers: bool = False
    group_id: str | None = None
    isolation: int = READ_COMMITTED
    fetch_bytes: int = 8 * 1024 * 1024
    filter: str = ""
    columns: tuple[str, ...] | None = None
    text_columns: frozenset[str] = frozenset()
    """The columns, key or value, that are built as text."""
    value_format: str = "bytes"
    """Or `string`, `json`; `schema` decodes values by the registered schemas that they name."""
    subject: str | None = None
    message: str | None = None
    """The Protobuf message whose fields are the columns."""
    """Whose schemas say which fields there are; by default the topics' own."""
    ranges: bool = False
    lake: str | None = None
    """The folder or URL of landed tables, if not the pipelines' own."""

    def for_tasks(self) -> ReadOptions:
        """Return the options without the driver's credentials."""
        return replace(self, access=self.access.without_secrets())

    def of(self, access: Access | None) -> ReadOptions:
        """Return the options with a task's own access, if it has one."""
        return self if access is None else replace(self, access=access)

    @property
    def reaches_lake(self) -> bool:
        """Whether messages that the log no longer has are read from landed tables."""
        if isinstance(self.starting, FromLake):
            return True
        is_plain = not self.filter and not self.ranges and self.value_format != BY_SCHEMA
        return isinstance(self.starting, StartingTimestamp | Timestamps) and is_plain


@dataclass(frozen=True, slots=True)
class SourceOffsets:
    """The offsets that the rows of a batch come from, committed with the rows as those of a consumer group."""

    group: str
    offsets: Offsets = field(hash=False)
    member: GroupMember = field(default_factory=GroupMember)
    """The member of the group that commits them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    brokers: str = DEFAULT_BROKERS
    access: Access = NO_ACCESS
    client_id: str = "millstream-spark"
    timeout_s: float = 120.0
    topic: str | None = None
    schema: str | None = None
    """The subject whose latest schema encodes the column `value`, a struct."""
    compression: str = "none"
    application: str | None = None
    version: int | None = None
    checkpoint: str | None = None
    """The folder of a stream's progress, if given."""
    source: SourceOffsets | None = None
    """The source offsets that are committed together with the rows."""

    def for_tasks(self, query: str, topics: Iterable[str] | None = None) -> WriteOptions:
        """Return the options of tasks, and of the commit: they sign in with a token that covers the query's output.

        `topics` are those that the rows name. Without a query, which a stream does not know yet, the token is valid for
        any.
        """
        named = topics if self.topic is None else [self.topic]
        scope = (
            may_write(named, query)
            if self.source is None
            else may_write(named, query, groups=[self.source.group], sources=self.source.offsets)
        )
        return replace(self, access=self.access.for_tasks(self.brokers, scope))


def read_options(raw_options: Mapping[str, str], access: Access | None = None) -> ReadOptions:
    """Validate the options of a reader; raise `InvalidSetting` for unknown, missing or invalid ones.

    Without an access, the credentials come from the options and the environment.
    """
    reader = _OptionReader(_with_defaults(raw_options), _READ, "read")
    topics = _topics(reader)
    isolation = reader.choice("isolation", ("read_committed", "read_uncommitted"), other="kafka.isolation.level")
    options = ReadOptions(
        brokers=reader.text(BROKERS) or DEFAULT_BROKERS,
        access=reader.access() if access is None else access,
        client_id=reader.text("kafka.client.id") or "millstream-spark",
        timeout_s=reader.number("kafka.request.timeout.ms", 60_000, minimum=100) / 1000,
        subscribe=topics.subscribe,
        pattern=topics.pattern,
        assign=topics.assign,
        starting=_position(reader, "starting"),
        ending=_position(reader, "ending") or LATEST,
        fail_on_data_loss=(fails := reader.flag("failOnDataLoss", True)),
        fail_on_unreadable=reader.flag("failOnUnreadable", fails),
        offsets_max=reader.maybe_number("maxOffsetsPerTrigger"),
        offsets_min=reader.maybe_number("minOffsetsPerTrigger"),
        trigger_delay_ms=parse_duration_ms(
            reader.text("maxTriggerDelay") or "15m", name="option maxTriggerDelay", unit="ms"
        ),
        min_partitions=reader.maybe_number("minPartitions"),
        records_per_task_max=reader.maybe_number("maxRecordsPerPartition"),
        include_headers=reader.flag("includeHeaders", False),
        group_id=reader.text("groupId") or reader.text("kafka.group.id") or None,
        isolation=READ_UNCOMMITTED if isolation == "read_uncommitted" else READ_COMMITTED,
        fetch_bytes=reader.number("kafka.max.partition.fetch.bytes", 8 * 1024 * 1024, minimum=1024),
        filter=reader.text("filter") or "",
        columns=None if (columns := _columns(reader.text("columns"))) is None else tuple(columns),
        text_columns=frozenset(name for name, is_text in (columns or {}).items() if is_text),
        value_format=_value_format(reader),
        subject=reader.text("schemaSubject"),
        message=reader.text("schemaMessage"),
        ranges=reader.choice("mode", ("rows", "ranges")) == "ranges",
        lake=reader.text("lake"),
    )
    is_shaped = options.ranges or options.filter or options.value_format == BY_SCHEMA
    if isinstance(options.starting, FromLake) and is_shaped:
        raise InvalidSetting(
            "startingOffsets=earliest-landed cannot be combined with mode=ranges, decode=schema or a filter"
        )
    for name in ("schemaSubject", "schemaMessage"):
        if reader.text(name) is not None and options.value_format != BY_SCHEMA:
            raise InvalidSetting(f"the option {name} needs decode=schema")
    return options


def _value_format(reader: _OptionReader) -> str:
    value_format = reader.choice("valueFormat", ("bytes", "string", "json"))
    if reader.choice("decode", ("none", BY_SCHEMA)) != BY_SCHEMA:
        return value_format or "bytes"
    if value_format is not None:
        raise InvalidSetting("set the option decode=schema or valueFormat, not both")
    return BY_SCHEMA


def refuse_ending(raw_options: Mapping[str, str]) -> None:
    """Raise `InvalidSetting` if the options of a stream name an end, which it does not have."""
    for name in raw_options:
        if name.lower() in ("endingoffsets", "endingtimestamp", "endingoffsetsbytimestamp"):
            raise InvalidSetting(
                f"option {name} is for batch queries; a stream has no end: use spark.read, or "
                ".trigger(availableNow=True) to stop at what is there now"
            )


def write_options(raw_options: Mapping[str, str]) -> WriteOptions:
    reader = _OptionReader(_with_defaults(raw_options), _WRITE, "write")
    application, version = reader.text("txnAppId"), reader.maybe_number("txnVersion", minimum=0)
    if (application is None) != (version is None):
        raise InvalidSetting("the options txnAppId and txnVersion go together: set both or neither")
    if (reader.text("kafka.acks") or "all") not in ("all", "-1"):
        warnings.warn("option kafka.acks is not used: rows are written with acks=all", stacklevel=2)
    codecs = ("none", "gzip", "snappy", "lz4", "zstd")
    return WriteOptions(
        brokers=reader.text(BROKERS) or DEFAULT_BROKERS,
        access=reader.access(),
        client_id=reader.text("kafka.client.id") or "millstream-spark",
        timeout_s=reader.number("kafka.request.timeout.ms", 120_000, minimum=100) / 1000,
        topic=reader.text("topic") or None,
        schema=reader.text("schema"),
        compression=reader.choice("compression", codecs, other="kafka.compression.type") or "none",
        application=application,
        version=version,
        source=_source(reader),
        checkpoint=next((text for name, text in raw_options.items() if name.lower() == "checkpointlocation"), None),
    )


def sample_size() -> int | None:
    """Return how many messages of a partition a dry run reads; None outside one."""
    text = os.environ.get(SAMPLE_VARIABLE, "")
    return int(text) if text else None


def _with_defaults(raw_options: Mapping[str, str]) -> Mapping[str, str]:
    """Add the options of the process, unless other brokers are named: its credentials are for its own."""
    text = os.environ.get(DEFAULTS_VARIABLE, "")
    if not text or any(name.lower() == BROKERS for name in raw_options):
        return raw_options
    named = {name.lower() for name in raw_options}
    return {**{name: value for name, value in json.loads(text).items() if name.lower() not in named}, **raw_options}


def _source(reader: _OptionReader) -> SourceOffsets | None:
    group, text = reader.text("sourceGroup"), reader.text("sourceOffsets")
    member, generation = reader.text("sourceMember"), reader.maybe_number("sourceGeneration", minimum=0)
    if (group is None) != (text is None) or (member is None) != (generation is None):
        raise InvalidSetting(
            "the options sourceGroup and sourceOffsets go together, and so do sourceMember and sourceGeneration"
        )
    if group is None or text is None:
        if member is not None:
            raise InvalidSetting("the option sourceMember needs sourceOffsets")
        return None
    offsets = parse_offsets("sourceOffsets", text, minimum=0)
    if not any(offsets.values()):
        raise InvalidSetting("option sourceOffsets names no partition")
    return SourceOffsets(group, offsets, GroupMember(member or "", -1 if generation is None else generation))


class _OptionReader:
    """The given options; names are case-insensitive."""

    def __init__(self, raw_options: Mapping[str, str], known: tuple[str, ...], doing: str) -> None:
        self._texts: dict[str, str] = {}
        by_lower = {name.lower(): name for name in known}
        ignored = {name.lower(): reason for name, reason in _WITHOUT_EFFECT.items()}
        for name, text in raw_options.items():
            lower = name.lower()
            if lower in by_lower:
                self._texts[by_lower[lower]] = str(text)
            elif lower in ignored:
                warnings.warn(f"option {name} has no effect: {ignored[lower]}", stacklevel=4)
            elif lower in _SPARKS_OWN:
                continue
            else:
                raise _refusal(name, known, doing)

    def text(self, name: str) -> str | None:
        """Return an option's text; None if it is missing or empty."""
        return self._texts.get(name, "").strip() or None

    def access(self) -> Access:
        return parse_access({name: self._texts[name] for name in ACCESS_OPTIONS if name in self._texts})

    def flag(self, name: str, default: bool) -> bool:
        text = (self.text(name) or str(default)).lower()
        if text not in ("true", "false"):
            raise InvalidSetting(f"option {name} must be true or false, not {text!r}")
        return text == "true"

    def number(self, name: str, default: int, *, minimum: int = 1) -> int:
        value = self.maybe_number(name, minimum=minimum)
        return default if value is None else value

    def maybe_number(self, name: str, *, minimum: int = 1) -> int | None:
        """Parse a whole number; None if it is missing."""
        text = self.text(name)
        if text is None:
            return None
        if not re.fullmatch(r"-?\d{1,18}", text) or int(text) < minimum:
            raise InvalidSetting(f"option {name} must be a whole number of at least {minimum}, not {text!r}")
        return int(text)

    def choice(self, name: str, choices: tuple[str, ...], *, other: str | None = None) -> str | None:
        """Parse one of some words, possibly under another option name; None if it is missing."""
        text = self.text(name) or (self.text(other) if other is not None else None)
        if text is not None and text.lower() not in choices:
            raise InvalidSetting(f"option {name} must be one of {', '.join(choices)}, not {text!r}")
        return None if text is None else text.lower()


def _refusal(name: str, known: tuple[str, ...], doing: str) -> InvalidSetting:
    """Explain why an option is not accepted, and what to do."""
    if name.lower().startswith(_SECURITY):
        return InvalidSetting(
            f"option {name} is not supported; TLS and authentication are configured with the options "
            f"{', '.join(ACCESS_OPTIONS)}"
        )
    names = sorted(set(known) - {"path"})
    hint = suggestion(name, names)
    if name.lower().startswith("kafka."):
        return InvalidSetting(
            f"option {name} is not supported to {doing} the format 'millstream': Kafka's Java client is not used."
            f" Remove it; docs/spark.md lists the options that are honoured{hint}"
        )
    return InvalidSetting(
        f"unknown option {name!r} to {doing} the format 'millstream'{hint or '; known options: ' + ', '.join(names)}"
    )


@dataclass(frozen=True, slots=True)
class _Topics:
    subscribe: tuple[str, ...] = ()
    pattern: str | None = None
    assign: Mapping[str, tuple[int, ...]] | None = None


def _topics(reader: _OptionReader) -> _Topics:
    names = ("subscribe", "subscribePattern", "assign")
    present = [name for name in names if reader.text(name) is not None]
    path = reader.text("path")
    if not present and path is not None:
        # `.load("orders")` and `SELECT * FROM millstream.orders` name the topic this way.
        return _Topics(subscribe=_names(path))
    if len(present) != 1:
        choice = f"{' and '.join(present)} were given" if present else "none was given"
        raise InvalidSetting(f"set exactly one of the options {', '.join(names)}: {choice}")
    text = reader.text(present[0]) or ""
    if present[0] == "subscribe":
        return _Topics(subscribe=_names(text))
    if present[0] == "subscribePattern":
        try:
            re.compile(text)
        except re.error as error:
            raise InvalidSetting(f"option subscribePattern is not a regular expression: {error}") from None
        return _Topics(pattern=text)
    return _Topics(assign=_assigned(text))


def _names(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise InvalidSetting("option subscribe names no topic")
    return names


def _assigned(text: str) -> Mapping[str, tuple[int, ...]]:
    example = '{"orders": [0, 1]}'
    try:
        document = json.loads(text)
        return {
            str(topic): tuple(sorted({_partition(number) for number in numbers}))
            for topic, numbers in dict(document).items()
        }
    except (ValueError, TypeError) as error:
        raise InvalidSetting(f"option assign must be a JSON document such as {example}: {error}") from None


def _partition(number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise ValueError(f"{number!r} is not a partition")
    return number


def _position(reader: _OptionReader, side: str) -> Position | None:
    """Return the start or end: the most general option wins, in Spark's order."""
    stamp = reader.maybe_number(f"{side}Timestamp", minimum=0)
    by_time = reader.text(f"{side}OffsetsByTimestamp")
    offsets = reader.text(f"{side}Offsets")
    strategy = reader.choice("startingOffsetsByTimestampStrategy", ("error", "latest")) or "error"
    if side == "ending":
        strategy = "latest"
    if stamp is not None:
        return StartingTimestamp(stamp, or_latest=strategy == "latest")
    if by_time is not None:
        return Timestamps(parse_times(f"{side}OffsetsByTimestamp", by_time), or_latest=strategy == "latest")
    if offsets is None:
        return None
    if offsets.lower() == "earliest":
        if side == "ending":
            raise InvalidSetting("option endingOffsets cannot be earliest: nothing would be read")
        return EARLIEST
    if offsets.lower() == "latest":
        return LATEST
    if offsets.lower() == "earliest-landed" and side == "starting":
        return EARLIEST_LANDED
    return NamedOffsets(parse_offsets(f"{side}Offsets", offsets))


def _columns(text: str | None) -> dict[str, bool] | None:
    """Parse `key string, value, offset`: the columns, and whether each is to be text."""
    if text is None:
        return None
    found: dict[str, bool] = {}
    for column in filter(None, map(str.strip, text.split(","))):
        name, _, kind = column.partition(" ")
        if name not in NAMES:
            hint = suggestion(name, NAMES) or f"; there are: {', '.join(NAMES)}"
            raise InvalidSetting(f"option columns names {name!r}, which rows do not have{hint}")
        if kind and (kind.strip().lower() != "string" or name not in ("key", "value")):
            raise InvalidSetting(f"option columns has {column!r}: only key and value take a type, and it is string")
        found[name] = bool(kind)
    return found
