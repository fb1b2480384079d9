"""Options that define a pipeline, whether declared or run by hand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Annotated, Final, get_args, get_type_hints

import typer

from millstream.cli.connection import complete_topics
from millstream.cli.options import Settings, duration, flag, parse_assignments, parse_settings, read_text
from millstream.core.job import check_code
from millstream.core.payload_columns import MESSAGE_TIME, EventTime
from millstream.core.pipeline import DEBEZIUM, SECRET_SETTINGS, SETTINGS, UPSERT, PipelineKind
from millstream.core.setting import milliseconds_text

Name = Annotated[str, typer.Argument(help="The name of the pipeline.", show_default=False)]


Lake = Annotated[
    str | None,
    flag(
        "--lake",
        "FOLDER|URL",
        "Where the tables are stored, such as s3://bucket/path. Default: the node's pipelines-lake.",
    ),
]

Program = Annotated[
    str | None, flag("--file", "FILE", "The program of a job: Python that defines run(spark, millstream).")
]
Requirements = Annotated[
    str | None,
    flag("--requirements", "FILE", "The packages that the program needs, as in a requirements.txt; wheels only."),
]

_OF_KIND: Final[Mapping[PipelineKind, frozenset[str]]] = {
    PipelineKind.LAND: frozenset(
        {
            *("topic", "pattern", "lake", "format", "every", "decode", "schema", "dedupe"),
            *("mode", "key", "order_by", "delete_when", "map", "expect", "on_violation", "partition_by"),
            *("start", "settings"),
        }
    ),
    PipelineKind.TRANSFORM: frozenset(
        {"sql", "into", "schema", "table", "watermark", "decode", "udf", "requirements", "start", "settings"}
    ),
    PipelineKind.ROUTE: frozenset({"rules", "decode", "start", "settings"}),
    PipelineKind.JOB: frozenset(
        {"file", "requirements", "pace", "cron", "timezone", "continuous", "param", "run_timeout", "start", "settings"}
    ),
    PipelineKind.LEDGER: frozenset({"lake", "every", "settings"}),
}
"""The flags that apply to each kind."""
_OF_NODES: Final = frozenset({"requirements", "pace", "cron", "timezone", "continuous", "run_timeout"})
"""Flags of pipelines that a node runs; `pipeline run` has none of them."""
_SPELLED_OTHERWISE: Final = {
    "every.ms": "--every",
    "dedupe.ms": "--dedupe",
    # Only in quotation marks: it is also a word of its own.
    "`key`": "`--key`",
    "order.by": "--order-by",
    "delete.when": "--delete-when",
    "on.violation": "--on-violation",
    "partition.by": "--partition-by",
    "timeout.ms": "--run-timeout",
}
"""Settings whose names are not those of their flags."""
_FROM_FILES: Final = frozenset(
    {
        *("code", "functions.code", "requirements", "sql", "schema", "schemas"),
        *("tables", "watermarks", "expect", "parameters", "spark"),
    }
)
"""Texts that people keep in files: `--set NAME=@FILE` reads them, as it reads secrets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """The flags of a pipeline; None for those not given."""

    topic: Annotated[
        list[str] | None, flag("--topic", "TOPIC", "A topic to land; may be repeated.", autocompletion=complete_topics)
    ] = None
    pattern: Annotated[
        str | None,
        flag("--pattern", "REGEX", "Land every topic whose whole name matches, including topics created later."),
    ] = None
    lake: Lake = None
    format: Annotated[
        str | None,
        flag(
            "--format",
            "NAME",
            "The format of the table, delta (the default) or parquet; or debezium, for change events: "
            "--mode upsert --decode debezium.",
        ),
    ] = None
    every: Annotated[
        float | None,
        duration("--every", "How long messages are collected before they are landed. Default: 60s."),
    ] = None
    sql: Annotated[
        str | None,
        flag(
            "--sql",
            "STATEMENT",
            'A SELECT with topics as tables, as in "SELECT * FROM orders WHERE total > 100"; @FILE reads it.',
        ),
    ] = None
    into: Annotated[str | None, flag("--into", "TOPIC", "The topic to write the rows to.")] = None
    rules: Annotated[
        str | None,
        flag("--rules", "FILE", "Rules as a JSON list, or - for standard input; see millstream pipeline rule."),
    ] = None
    decode: Annotated[
        str | None,
        flag(
            "--decode",
            "FORMAT",
            "How payloads are decoded into columns: json, schema (by the registered schemas that they name) or none.",
        ),
    ] = None
    schema: Annotated[
        list[str] | None,
        flag(
            "--schema",
            "[TOPIC=]COLUMNS",
            'Columns of payloads, as in "id long, total double"; @FILE reads them. A transform needs the topic before '
            'them, as in "orders=id long", and may have one for each topic. Default: inferred from the payloads.',
        ),
    ] = None
    dedupe: Annotated[float | None, duration("--dedupe", "Skip messages whose id was landed within this time.")] = None
    mode: Annotated[
        str | None,
        flag("--mode", "MODE", "append (the default): one row per message; upsert: one row per key."),
    ] = None
    key: Annotated[
        list[str] | None,
        flag(
            "--key",
            "FIELD",
            "With --mode upsert: the payload field that identifies a row; may be repeated. Default: the message key.",
        ),
    ] = None
    order_by: Annotated[
        str | None,
        flag(
            "--order-by",
            "FIELD",
            "With --mode upsert: the payload field that says which change of a key is newer. Default: the offset.",
        ),
    ] = None
    delete_when: Annotated[
        str | None,
        flag("--delete-when", "CONDITION", "With --mode upsert: when a message deletes its key, as in \"op = 'd'\"."),
    ] = None
    map: Annotated[
        list[str] | None,
        flag(
            "--map",
            "FIELD",
            "A payload field whose objects become a map of text, not a column per field; may be repeated.",
        ),
    ] = None
    expect: Annotated[
        list[str] | None,
        flag("--expect", "CONDITION", 'A condition that messages should meet, as in "total >= 0"; may be repeated.'),
    ] = None
    on_violation: Annotated[
        str | None,
        flag(
            "--on-violation",
            "ACTION",
            "What to do with messages that do not meet --expect: quarantine (the default), fail or count.",
        ),
    ] = None
    partition_by: Annotated[
        str | None,
        flag(
            "--partition-by",
            "TIME",
            "Partition the table by an event time: day(COLUMN) or hour(COLUMN); the column "
            "timestamp is the message's own time. Default: by the hour of landing.",
        ),
    ] = None
    table: Annotated[
        list[str] | None,
        flag(
            "--table", "NAME=FOLDER|URL", "A lake table that the statement joins with under this name; may be repeated."
        ),
    ] = None
    watermark: Annotated[
        list[str] | None,
        flag(
            "--watermark",
            "TOPIC=COLUMN DELAY",
            'For windows: how late rows of a topic may arrive, as in "orders=placed_at 10 minutes"; may be repeated.',
        ),
    ] = None
    udf: Annotated[
        list[str] | None,
        flag(
            "--udf",
            "MODULE:FUNCTION",
            "A Python function that the statement calls: of MODULE.py in this folder, whose code is stored with the "
            "pipeline, or of a package in --requirements; may be repeated.",
        ),
    ] = None
    file: Program = None
    requirements: Requirements = None
    pace: Annotated[
        float | None,
        duration("--every", "Run at once and then at this interval, as in 90s, 15m or 1h."),
    ] = None
    cron: Annotated[
        str | None,
        flag(
            "--cron",
            "TIMES",
            'Run at these times: minute hour day month weekday, as in "0 3 * * *"; in UTC unless --timezone is given.',
        ),
    ] = None
    timezone: Annotated[str | None, flag("--timezone", "NAME", "The time zone of --cron, as in Europe/Berlin.")] = None
    continuous: Annotated[
        bool, typer.Option("--continuous", help="Run continuously: the program returns streaming queries.")
    ] = False
    param: Annotated[
        list[str] | None,
        flag("--param", "NAME=TEXT", "A parameter of the program, which is in millstream.parameters; may be repeated."),
    ] = None
    run_timeout: Annotated[
        float | None,
        duration("--run-timeout", "How long an attempt may take, as in 30m. Default: 1d."),
    ] = None
    start: Annotated[str | None, flag("--from", "PLACE", "Where to start: earliest (the default) or latest.")] = None
    settings: Settings = None

    def given(self) -> list[str]:
        return [
            _spelled(field.name) for field in fields(self) if getattr(self, field.name) not in (None, [], (), False)
        ]

    def flags_of_settings(self) -> dict[str, str]:
        """Return the given flags by setting, but for settings that were also given by name."""
        given, named = self.given(), parse_assignments(self.settings or [], flag="--set")
        return {
            name: flag
            for name, flag in _SPELLED_OTHERWISE.items()
            if flag.strip("`") in given and name.strip("`") not in named
        }

    def settings_of(self, kind: PipelineKind) -> dict[str, str]:
        """Convert to settings; a flag of another kind of pipeline is rejected."""
        known = {_spelled(name) for name in _OF_KIND[kind]}
        for name in self.given():
            if name not in known:
                raise typer.BadParameter(f"{name} is not for {kind}; it takes {', '.join(sorted(known))}")
        of_kind = {
            PipelineKind.LAND: self._land,
            PipelineKind.TRANSFORM: self._transform,
            PipelineKind.ROUTE: dict,
            PipelineKind.JOB: self._job,
            PipelineKind.LEDGER: self._ledger,
        }[kind]()
        flags = {**of_kind, "from": self.start, **({} if self.decode is None else {"decode": self.decode})}
        named = parse_settings(self.settings or [], secret=SECRET_SETTINGS, files=_FROM_FILES)
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
            "every.ms": _milliseconds(self.every, PipelineKind.LAND, "every.ms"),
            # Payload fields are named for nothing else.
            "decode": DEBEZIUM if is_debezium else "json" if reads_payload else None,
            "schema": read_text(schemas[0], flag="--schema") if schemas else None,
            "dedupe.ms": _milliseconds(self.dedupe, PipelineKind.LAND, "dedupe.ms"),
        }

    def _ledger(self) -> dict[str, str | None]:
        return {"lake": self.lake, "every.ms": _milliseconds(self.every, PipelineKind.LEDGER, "every.ms")}

    def _transform(self) -> dict[str, str | None]:
        return {
            "sql": None if self.sql is None else read_text(self.sql, flag="--sql"),
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
                code[path.stem] = read_text(f"@{path}", flag="--udf")
                place = path.stem
            elif place.endswith(".py") or self.requirements is None:
                raise typer.BadParameter(f"--udf {given}: no file {path} exists, and no --requirements are given")
            named.append(f"{place}:{function}")
        return {
            "functions": ",".join(named) or None,
            "functions.code": json.dumps(code, ensure_ascii=False) if code else None,
        }

    def _requirements(self) -> str | None:
        return None if self.requirements is None else read_text(f"@{self.requirements}", flag="--requirements")

    def _code(self) -> str | None:
        if self.file is None:
            return None
        code = read_text(f"@{self.file}", flag="--file")
        # Here, so that an error names the file.
        check_code(code, file_name=str(self.file))
        return code

    def _job(self) -> dict[str, str | None]:
        times = {"--every": self.pace, "--cron": self.cron, "--continuous": self.continuous}
        given_flags = [flag for flag, value in times.items() if value]
        if len(given_flags) > 1:
            raise typer.BadParameter(f"{' and '.join(given_flags)} are given; a job has one of them, or none")
        if (every_ms := _milliseconds(self.pace, PipelineKind.JOB, "every.ms")) == "0":
            raise typer.BadParameter(
                "--every must be longer than 0s; leave it out for a job that runs when it is started"
            )
        if (timeout_ms := _milliseconds(self.run_timeout, PipelineKind.JOB, "timeout.ms")) == "0":
            raise typer.BadParameter("--run-timeout must be longer than 0s; --set timeout.ms=0 runs without a limit")
        if self.timezone and not self.cron and "cron" not in parse_assignments(self.settings or [], flag="--set"):
            raise typer.BadParameter("--timezone is for --cron, which is not given")
        return {
            "code": self._code(),
            "requirements": self._requirements(),
            "every.ms": every_ms,
            "cron": self.cron,
            "timezone": self.timezone,
            "continuous": "true" if self.continuous else None,
            "parameters": _by_name(self.param, flag="--param"),
            "timeout.ms": timeout_ms,
        }


@cache
def _spelled(name: str) -> str:
    _, option = get_args(get_type_hints(Flags, include_extras=True)[name])
    return str(option.default)


def flags_not_for(kind: PipelineKind | None) -> frozenset[str]:
    """Return the fields of `Flags` that a kind does not take; with None, those that `pipeline run` does not take."""
    if kind is None:
        return _OF_NODES
    return frozenset(field.name for field in fields(Flags)) - _OF_KIND[kind]


def _by_name(assignments: Sequence[str] | None, *, flag: str) -> str | None:
    if not assignments:
        return None
    named = parse_assignments(list(assignments), flag=flag)
    return json.dumps({name: read_text(text, flag=flag) for name, text in named.items()}, ensure_ascii=False)


def _milliseconds(seconds: float | None, kind: PipelineKind, name: str) -> str | None:
    if seconds is None:
        return None
    return milliseconds_text(seconds, SETTINGS[kind].declared()[name], name=_SPELLED_OTHERWISE[name])
