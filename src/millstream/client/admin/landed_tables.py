"""Where the tables of a pipeline that lands are, for whoever is to read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from millstream.client.admin.places import places_of
from millstream.client.admin.topic_pipelines import pipeline_of
from millstream.core.errors import MillstreamError
from millstream.core.pipeline import LandSettings
from millstream.protocol.wire.client import Client

_READERS: Final = {
    "delta": "deltalake.DeltaTable({place!r}).to_pandas()",
    "parquet": "pandas.read_parquet({place!r})",
}


class LandedTable(NamedTuple):
    """The table of a topic."""

    topic: str
    place: str
    """A folder of the node that runs the pipeline, or a URL."""
    read: str
    """An expression of Python that reads it."""


class LandedTables(NamedTuple):
    """The tables of a pipeline, by topic, and why they are not known if they are not."""

    tables: list[LandedTable]
    notes: list[str]


async def tables_of(client: Client, told: Mapping[str, Any]) -> LandedTables:
    """The tables of a pipeline; those that a pattern finds, as far as there are topics."""
    try:
        settings = pipeline_of(told).settings
        if not isinstance(settings, LandSettings):
            return LandedTables([], [])
        report = told["report"]
        lake = settings.lake or (await places_of(client, node=report and report["node"])).lake
        names = settings.topic_names or await _found(client, settings)
    except MillstreamError as error:
        return LandedTables([], [f"Where its tables are cannot be told now: {error}"])
    return LandedTables([_table(name, f"{lake.rstrip('/')}/{name}", settings.format) for name in names], [])


def _table(topic: str, place: str, format_name: str) -> LandedTable:
    return LandedTable(topic, place, _READERS[format_name].format(place=place))


async def _found(client: Client, settings: LandSettings) -> list[str]:
    topics = (await client.metadata()).topics.values()
    return sorted(one.name for one in topics if not one.is_internal and settings.takes(one.name))
