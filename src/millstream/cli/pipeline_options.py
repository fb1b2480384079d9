"""The options that say what a pipeline does, for those that are declared and those that are run by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated

import typer

from millstream.cli.options import given_text, parse_assignments

Name = Annotated[str, typer.Argument(help="The name of the pipeline.", show_default=False)]
Topics = Annotated[
    list[str] | None,
    typer.Option("--topic", metavar="TOPIC", help="A topic to land; may be repeated.", show_default=False),
]
Pattern = Annotated[
    str | None,
    typer.Option(
        "--pattern",
        metavar="REGEX",
        help="Land every topic whose whole name fits, also those that come later.",
        show_default=False,
    ),
]
Lake = Annotated[
    str | None,
    typer.Option(
        "--lake",
        metavar="FOLDER|URL",
        help="Where the tables are, such as s3://bucket/path. Default: pipelines-lake of the node.",
        show_default=False,
    ),
]
Format = Annotated[
    str | None, typer.Option("--format", metavar="NAME", help="delta (the default) or parquet.", show_default=False)
]
EverySeconds = Annotated[
    float | None,
    typer.Option(
        "--every",
        metavar="SECONDS",
        help="How long messages gather before they are landed. Default: 60.",
        show_default=False,
    ),
]
Decode = Annotated[
    str | None,
    typer.Option(
        "--decode", metavar="FORMAT", help="json makes columns of payloads, none does not.", show_default=False
    ),
]
Schema = Annotated[
    str | None,
    typer.Option(
        "--schema",
        metavar="COLUMNS",
        help='Columns of payloads, as in "id long, total double"; @FILE reads them. Default: as they are found.',
        show_default=False,
    ),
]
DedupeSeconds = Annotated[
    float | None,
    typer.Option(
        "--dedupe",
        metavar="SECONDS",
        help="Leave out messages whose id was landed within so long before.",
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
    str | None, typer.Option("--into", metavar="TOPIC", help="The topic that takes the rows.", show_default=False)
]
TopicSchemas = Annotated[
    list[str] | None,
    typer.Option(
        "--schema",
        metavar="TOPIC=COLUMNS",
        help='Columns of a topic\'s payloads, as in "orders=id long, total double"; may be repeated. '
        "Default: as a sample has them.",
        show_default=False,
    ),
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
        help='How late rows of a topic may come for windows, as in "orders=placed_at 10 minutes"; may be repeated.',
        show_default=False,
    ),
]
Start = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="PLACE", help="Where to begin: earliest (the default) or latest.", show_default=False
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Any other setting; may be repeated.", show_default=False),
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


def land_settings(
    topics: Sequence[str] | None,
    pattern: str | None,
    lake: str | None,
    format_: str | None,
    every_s: float | None,
    decode: str | None,
    schema: str | None,
    dedupe_s: float | None,
) -> dict[str, str]:
    """The settings of a pipeline that lands, as far as they were given."""
    return _given(
        {
            "topics": ",".join(topics) if topics else None,
            "pattern": pattern,
            "lake": lake,
            "format": format_,
            "every.ms": _milliseconds(every_s),
            # A schema is of use for nothing else.
            "decode": decode or ("json" if schema else None),
            "schema": None if schema is None else given_text(schema, flag="--schema"),
            "dedupe.ms": _milliseconds(dedupe_s),
        }
    )


def transform_settings(
    sql: str | None,
    into: str | None,
    decode: str | None,
    *,
    schemas: list[str] | None = None,
    tables: list[str] | None = None,
    watermarks: list[str] | None = None,
) -> dict[str, str]:
    """The settings of a pipeline that transforms, as far as they were given."""
    return _given(
        {
            "sql": None if sql is None else given_text(sql, flag="--sql"),
            "into": into,
            "decode": decode,
            "schemas": _by_name(schemas, flag="--schema"),
            "tables": _by_name(tables, flag="--table"),
            "watermarks": _by_name(watermarks, flag="--watermark"),
        }
    )


def shared_settings(start: str | None, settings: list[str] | None) -> dict[str, str]:
    """What every kind of pipeline has; settings that are given by name win."""
    return {**_given({"from": start}), **parse_assignments(settings or [], flag="--set")}


def _by_name(given: list[str] | None, *, flag: str) -> str | None:
    return json.dumps(parse_assignments(given, flag=flag), ensure_ascii=False) if given else None


def _milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else str(round(seconds * 1000))


def _given(settings: dict[str, str | None]) -> dict[str, str]:
    return {name: text for name, text in settings.items() if text is not None}
