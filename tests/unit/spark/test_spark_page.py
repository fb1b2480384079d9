"""The Spark documentation is accurate: every option is in a table, with its default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millstream.pipelines.source import options
from millstream.pipelines.source.access import ACCESS_OPTIONS
from millstream.pipelines.source.options import ReadOptions, WriteOptions, read_options, write_options
from millstream.pipelines.source.shape import TYPES

PAGE = Path(__file__).resolve().parents[3] / "docs" / "spark.md"
OWN_NAME = {"path"}
"""What stands in `.load("orders")`, which is no option that one writes."""


def table(title: str) -> dict[str, str]:
    """The names in the first column below a heading, and the text of the second."""
    text = PAGE.read_text(encoding="utf-8")
    section = text.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    outputs: dict[str, str] = {}
    for first, second, *_ in lines[2:]:
        names = re.split(r",\s*", first)
        output = re.split(r",\s*", second) if second.count(",") == len(names) - 1 else [second] * len(names)
        outputs |= dict(zip(names, output, strict=True))
    return outputs


def test_every_option_of_reading_is_on_the_page() -> None:
    assert set(table("Options for reading")) == set(options._READ) - OWN_NAME - set(ACCESS_OPTIONS)


def test_every_option_of_writing_is_on_the_page() -> None:
    assert set(table("Options for writing")) == set(options._WRITE) - OWN_NAME - set(ACCESS_OPTIONS)


def test_every_option_of_signing_in_is_on_the_page() -> None:
    assert set(table("Options for authentication")) == set(ACCESS_OPTIONS)


def test_options_without_effect_are_named_on_the_page() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name in options._WITHOUT_EFFECT:
        assert f"`{name}`" in text


def test_every_column_is_on_the_page() -> None:
    assert {name: kind.split(" ")[0] for name, kind in table("Rows").items()} == {
        name: {"array": "array"}.get(kind.typeName(), kind.simpleString()).replace("bigint", "long")
        for name, kind in TYPES.items()
    }


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ("kafka.bootstrap.servers", "brokers"),
        ("failOnDataLoss", "fail_on_data_loss"),
        ("maxTriggerDelay", "trigger_delay_ms"),
        ("includeHeaders", "include_headers"),
        ("isolation", "isolation"),
        ("valueFormat", "value_format"),
        ("mode", "ranges"),
        ("kafka.request.timeout.ms", "timeout_s"),
        ("kafka.client.id", "client_id"),
        ("maxOffsetsPerTrigger", "offsets_max"),
        ("minPartitions", "min_partitions"),
        ("maxRecordsPerPartition", "records_per_task_max"),
        ("groupId", "group_id"),
        ("columns", "columns"),
    ],
)
def test_the_defaults_of_reading_are_those_on_the_page(option: str, field: str) -> None:
    output = table("Options for reading")[option]
    given_options = {"subscribe": "a", **({option: output} if output else {})}
    assert getattr(read_options(given_options), field) == getattr(ReadOptions(subscribe=("a",)), field)
    assert getattr(read_options({"subscribe": "a"}), field) == getattr(ReadOptions(subscribe=("a",)), field)


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ("kafka.bootstrap.servers", "brokers"),
        ("compression", "compression"),
        ("kafka.request.timeout.ms", "timeout_s"),
        ("kafka.client.id", "client_id"),
    ],
)
def test_the_defaults_of_writing_are_those_on_the_page(option: str, field: str) -> None:
    output = table("Options for writing")[option]
    assert getattr(write_options({option: output}), field) == getattr(WriteOptions(), field)
    assert getattr(write_options({}), field) == getattr(WriteOptions(), field)


def test_the_fetch_size_is_stated_in_mebibytes() -> None:
    assert table("Options for reading")["kafka.max.partition.fetch.bytes"] == f"{ReadOptions().fetch_bytes >> 20} MiB"
