"""Options that define a pipeline, whether declared or run by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Final

import typer

from millstream.cli.connection import complete_topics
from millstream.cli.options import given_text, parse_assignments, parse_settings
from millstream.core.event_time import MESSAGE_TIME, EventTime
from millstream.core.pipeline import DEBEZIUM, SECRET_SETTINGS, UPSERT, PipelineKind
from millstream.core.schedule import parse_duration_ms

Name = Annotated[str, typer.Argument(help="The name of the pipeline.", show_default=False)]
Topics = Annotated[
    list[str] | None,
    typer.Option(
        "--topic",
        autocompletion=complete_topics,
        metavar="TOPIC",
        help="A topic to land; may be repeated.",
        show_default=False,
    ),
]
Pattern = Annotated[
    str | None,
    typer.Option(
        "--pattern",
        metavar="REGEX",
        help="Land every topic whose whole name matches, including topics created later.",
        show_default=False,
    ),
]
Lake = Annotated[
    str | None,
    typer.Option(
        "--lake",
        metavar="FOLDER|URL",
        help="Where the tables are stored, such as s3://bucket/path. Default: the node's pipelines-lake.",
        show_default=False,
    ),
]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="NAME",
        help="The format of the table, delta (the default) or parquet; or debezium, for change events: "
        "--mode upsert --decode debezium.",
        show_default=False,
    ),
]
Mode = Annotated[
    str | None,
    typer.Option(
        "--mode",
        metavar="MODE",
        help="append (the default) has a row for every message, upsert one row for every key.",
        show_default=False,
    ),
]
Keys = Annotated[
    list[str] | None,
    typer.Option(
        "--key",
        metavar="FIELD",
        help="With --mode upsert: the payload field that identifies a row; may be repeated. Default: the message key.",
        show_default=False,
    ),
]
OrderBy = Annotated[
    str | None,
    typer.Option(
        "--order-by",
        metavar="FIELD",
        help="With --mode upsert: the payload field that says which change of a key is newer. Default: the offset.",
        show_default=False,
    ),
]
DeleteWhen = Annotated[
    str | None,
    typer.Option(
        "--delete-when",
        metavar="CONDITION",
        help="With --mode upsert: when a message deletes its key, as in \"op = 'd'\".",
        show_default=False,
    ),
]
PartitionBy = Annotated[
    str | None,
    typer.Option(
        "--partition-by",
        metavar="TIME",
        help="Partition the table by an event time: day(COLUMN) or hour(COLUMN), also of timestamp, the message's own. "
        "Default: by the hour of landing.",
        show_default=False,
    ),
]
EverySeconds = Annotated[
    float | None,
    typer.Option(
        "--every",
        metavar="SECONDS",
        help="How long messages are collected before they are landed. Default: 60.",
        show_default=False,
    ),
]
Decode = Annotated[
    str | None,
    typer.Option(
        "--decode",
        metavar="FORMAT",
        help="json decodes payloads into columns, schema does so by their registered schemas, none does not.",
        show_default=False,
    ),
]
Schemas = Annotated[
    list[str] | None,
    typer.Option(
        "--schema",
        metavar="[TOPIC=]COLUMNS",
        help='Columns of payloads, as in "id long, total double"; @FILE reads them. A transform has the topic before '
        'them, as in "orders=id long", and may have one for each topic. Default: as they are found.',
        show_default=False,
    ),
]
DedupeSeconds = Annotated[
    float | None,
    typer.Option(
        "--dedupe",
        metavar="SECONDS",
        help="Skip messages whose id was landed within this time.",
        show_default=False,
    ),
]
Maps = Annotated[
    list[str] | None,
    typer.Option(
        "--map",
        metavar="FIELD",
        help="A payload field whose objects become a map of text, not a column per field; may be repeated.",
        show_default=False,
    ),
]
Expects = Annotated[
    list[str] | None,
    typer.Option(
        "--expect",
        metavar="CONDITION",
        help='What messages should meet, as in "total >= 0"; may be repeated.',
        show_default=False,
    ),
]
OnViolation = Annotated[
    str | None,
    typer.Option(
        "--on-violation",
        metavar="ACTION",
        help="What happens to messages that do not: quarantine (the default), fail or count.",
        show_default=False,
    ),
]
Sql = Annotated[
    str | None,
    typer.Option(
        "--sql",
        metavar="STATEMENT",
        help='A SELECT with topics as tables, as in "SELECT * FROM orders WHERE total > 100"; @FILE reads it.',
        show_default=False,
    ),
]
Into = Annotated[
    str | None, typer.Option("--into", metavar="TOPIC", help="The topic to write the rows to.", show_default=False)
]
Tables = Annotated[
    list[str] | None,
    typer.Option(
        "--table",
        metavar="NAME=FOLDER|URL",
        help="A lake table that the statement joins with under this name; may be repeated.",
        show_default=False,
    ),
]
Watermarks = Annotated[
    list[str] | None,
    typer.Option(
        "--watermark",
        metavar="TOPIC=COLUMN DELAY",
        help='For windows: how late rows of a topic may arrive, as in "orders=placed_at 10 minutes"; may be repeated.',
        show_default=False,
    ),
]
Start = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="PLACE", help="Where to start: earliest (the default) or latest.", show_default=False
    ),
]
Rules = Annotated[
    str | None,
    typer.Option(
        "--rules",
        metavar="FILE",
        help="Rules as a JSON list, or - for standard input; see millstream pipeline rule.",
        show_default=False,
    ),
]

File = Annotated[
    str | None,
    typer.Option(
        "--file",
        metavar="FILE",
        help="The program of a job: Python that defines run(spark, millstream).",
        show_default=False,
    ),
]
Requirements = Annotated[
    str | None,
    typer.Option(
        "--requirements",
        metavar="FILE",
        help="The packages that the program needs, as in a requirements.txt; wheels only.",
        show_default=False,
    ),
]
Pace = Annotated[
    str | None,
    typer.Option(
        "--every",
        metavar="TIME",
        help="Run at once and then at this interval, as in 90s, 15m or 1h.",
        show_default=False,
    ),
]
CronTimes = Annotated[
    str | None,
    typer.Option(
        "--cron",
        metavar="TIMES",
        help='Run at these times: minute hour day month weekday, as in "0 3 * * *"; in UTC unless --timezone is given.',
        show_default=False,
    ),
]
Timezone = Annotated[
    str | None,
    typer.Option(
        "--timezone", metavar="NAME", help="The time zone of --cron, as in Europe/Berlin.", show_default=False
    ),
]
Continuous = Annotated[
    bool, typer.Option("--continuous", help="Run continuously: the program returns streaming queries.")
]
Parameters = Annotated[
    list[str] | None,
    typer.Option(
        "--param",
        metavar="NAME=TEXT",
        help="A text for the program, which finds it in millstream.parameters; may be repeated.",
        show_default=False,
    ),
]
Timeout = Annotated[
    str | None,
    typer.Option(
        "--run-timeout",
        metavar="TIME",
        help="How long an attempt may take, as in 30m. Default: 1d.",
        show_default=False,
    ),
]

Functions = Annotated[
    list[str] | None,
    typer.Option(
        "--udf",
        metavar="MODULE:FUNCTION",
        help="A Python function that the statement calls: of MODULE.py in this folder, whose code is stored with the "
        "pipeline, or of a package in --requirements; may be repeated.",
        show_default=False,
    ),
]

_EVERY_KIND: Final = frozenset({"start", "settings"})
_OF_KIND: Final[Mapping[PipelineKind, frozenset[str]]] = {
    PipelineKind.LAND: frozenset(
        {
            *("topic", "pattern", "lake", "format", "every", "decode", "schema", "dedupe"),
            *("mode", "key", "order_by", "delete_when", "map", "expect", "on_violation", "partition_by"),
        }
    ),
    PipelineKind.TRANSFORM: frozenset({"sql", "into", "schema", "table", "watermark", "decode", "udf", "requirements"}),
    PipelineKind.ROUTE: frozenset({"rules", "decode"}),
    PipelineKind.JOB: frozenset({"file", "requirements", "pace", "cron", "timezone", "continuous", "param", "timeout"}),
    PipelineKind.LEDGER: frozenset({"lake", "every"}),
}
"""The flags that apply to each kind."""
_SPELLED: Final = {"start": "--from", "settings": "--set", "pace": "--every", "timeout": "--run-timeout"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The flags of a pipeline; None for those not given."""

    topic: Sequence[str] | None = None
    pattern: str | None = None
    lake: str | None = None
    format: str | None = None
    every: float | None = None
    decode: str | None = None
    schema: Sequence[str] | None = None
    dedupe: float | None = None
    mode: str | None = None
    key: Sequence[str] | None = None
    order_by: str | None = None
    delete_when: str | None = None
    map: Sequence[str] | None = None
    expect: Sequence[str] | None = None
    on_violation: str | None = None
    partition_by: str | None = None
    sql: str | None = None
    into: str | None = None
    table: list[str] | None = None
    watermark: list[str] | None = None
    udf: list[str] | None = None
    rules: str | None = None
    file: str | None = None
    requirements: str | None = None
    pace: str | None = None
    cron: str | None = None
    timezone: str | None = None
    continuous: bool | None = None
    param: list[str] | None = None
    timeout: str | None = None
    start: str | None = None
    settings: list[str] | None = None

    def given(self) -> list[str]:
        """Return the given flags as they are spelled."""
        return [_spelled(one.name) for one in fields(self) if getattr(self, one.name) not in (None, [], ())]

    def settings_of(self, kind: PipelineKind) -> dict[str, str]:
        """Convert to settings; a flag of another kind of pipeline is rejected."""
        known = {_spelled(name) for name in _EVERY_KIND | _OF_KIND[kind]}
        for flag in self.given():
            if flag not in known:
                raise typer.BadParameter(f"{flag} is not for {kind}; it takes {', '.join(sorted(known))}")
        of_kind = {
            PipelineKind.LAND: self._land,
            PipelineKind.TRANSFORM: self._transform,
            PipelineKind.ROUTE: dict,
            PipelineKind.JOB: self._job,
            PipelineKind.LEDGER: self._ledger,
        }[kind]()
        flags = {**of_kind, "from": self.start, **({} if self.decode is None else {"decode": self.decode})}
        named = parse_settings(self.settings or [], secret=SECRET_SETTINGS)
        # Settings given by name take precedence.
        return {**{name: text for name, text in flags.items() if text is not None}, **named}

    def _land(self) -> dict[str, str | None]:
        schemas = self.schema or ()
        if len(schemas) > 1:
            raise typer.BadParameter("--schema is given once for land: all topics share the same columns")
        is_debezium = self.format == DEBEZIUM
        is_upsert = is_debezium or self.mode == UPSERT
        is_by_field = bool(self.partition_by) and EventTime.parse(self.partition_by or "").column != MESSAGE_TIME
        fields_of = (schemas, self.key, self.order_by, self.delete_when, self.map, self.expect, is_by_field)
        reads_payload = any(map(bool, fields_of))
        return {
            "topics": ",".join(self.topic) if self.topic else None,
            "pattern": self.pattern,
            "lake": self.lake,
            "format": None if is_debezium else self.format,
            "mode": self.mode or (UPSERT if is_upsert else None),
            "key": ",".join(self.key) if self.key else None,
            "order.by": self.order_by,
            "delete.when": self.delete_when,
            "maps": ",".join(self.map) if self.map else None,
            "expect": json.dumps(list(self.expect), ensure_ascii=False) if self.expect else None,
            "on.violation": self.on_violation,
            "partition.by": self.partition_by,
            "every.ms": _milliseconds(self.every),
            # Payload fields are named for nothing else.
            "decode": DEBEZIUM if is_debezium else "json" if reads_payload else None,
            "schema": given_text(schemas[0], flag="--schema") if schemas else None,
            "dedupe.ms": _milliseconds(self.dedupe),
        }

    def _ledger(self) -> dict[str, str | None]:
        return {"lake": self.lake, "every.ms": _milliseconds(self.every)}

    def _transform(self) -> dict[str, str | None]:
        return {
            "sql": None if self.sql is None else given_text(self.sql, flag="--sql"),
            "into": self.into,
            "schemas": _by_name(self.schema, flag="--schema"),
            "tables": _by_name(self.table, flag="--table"),
            "watermarks": _by_name(self.watermark, flag="--watermark"),
            **self._functions(),
            "requirements": self._requirements(),
        }

    def _functions(self) -> dict[str, str | None]:
        """Return the functions of a statement, with the code of those that are in files."""
        named: list[str] = []
        code: dict[str, str] = {}
        for given in self.udf or ():
            place, colon, function = given.rpartition(":")
            path = Path(place if place.endswith(".py") else f"{place.replace('.', '/')}.py")
            if not colon or not place:
                raise typer.BadParameter(f"--udf names a function as MODULE:FUNCTION, not {given!r}")
            if path.is_file():
                code[path.stem] = given_text(f"@{path}", flag="--udf")
                place = path.stem
            elif place.endswith(".py") or self.requirements is None:
                raise typer.BadParameter(f"--udf {given}: no file {path} exists, and no --requirements are given")
            named.append(f"{place}:{function}")
        return {
            "functions": ",".join(named) or None,
            "functions.code": json.dumps(code, ensure_ascii=False) if code else None,
        }

    def _requirements(self) -> str | None:
        return None if self.requirements is None else given_text(f"@{self.requirements}", flag="--requirements")

    def _job(self) -> dict[str, str | None]:
        times = {"--every": self.pace, "--cron": self.cron, "--continuous": self.continuous}
        given = [flag for flag, value in times.items() if value]
        if len(given) > 1:
            raise typer.BadParameter(f"{' and '.join(given)} are given; a job has one of them, or none")
        return {
            "code": None if self.file is None else given_text(f"@{self.file}", flag="--file"),
            "requirements": self._requirements(),
            "every.ms": None if self.pace is None else str(parse_duration_ms(self.pace, name="--every")),
            "cron": self.cron,
            "timezone": self.timezone,
            "continuous": "true" if self.continuous else None,
            "parameters": _by_name(self.param, flag="--param"),
            "timeout.ms": None if self.timeout is None else str(parse_duration_ms(self.timeout, name="--run-timeout")),
        }


def _spelled(name: str) -> str:
    return _SPELLED.get(name, f"--{name.replace('_', '-')}")


def _by_name(given: Sequence[str] | None, *, flag: str) -> str | None:
    if not given:
        return None
    named = parse_assignments(list(given), flag=flag)
    return json.dumps({name: given_text(text, flag=flag) for name, text in named.items()}, ensure_ascii=False)


def _milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else str(round(seconds * 1000))
