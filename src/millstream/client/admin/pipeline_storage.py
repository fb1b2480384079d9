"""Where the pipelines of a node store tables and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from millstream.client.admin.pipelines import PipelineClient, pipeline_of
from millstream.core.errors import MillstreamError, NotFound
from millstream.core.ids import NodeId
from millstream.core.pipeline import LandSettings, Pipeline, PipelineKind
from millstream.protocol.private.message import Nothing, decode_document, encode
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import error_from_code

LAKE: Final = "lake"
FOLDER: Final = "pipelines"

_NODE_STATUS_KEY: Final = 32000
_NODE_RESOURCE: Final = 4
_LAKE_SETTING: Final = "pipelines-lake"
_FOLDER_SETTING: Final = "pipelines-folder"


class PipelineStorage(NamedTuple):
    """Folders or URLs, as seen by the node."""

    lake: str
    folder: str
    data: str
    """The node's data folder, possibly on another machine."""


def storage_in(data: str, *, lake: str = "", folder: str = "") -> PipelineStorage:
    """Return the locations for a data folder and settings."""
    return PipelineStorage(lake or os.path.join(data, LAKE), folder or os.path.join(data, FOLDER), data)


async def storage_of(client: Client, *, node: int | None = None) -> PipelineStorage:
    """Return a node's locations, by default the first node's; the settings are the same on all nodes, data folders need
    not be.
    """
    from kio.schema.describe_configs.v4 import request

    messages: Any = request
    nodes = (await client.metadata(())).nodes
    asked = NodeId(node) if node is not None and node in nodes else min(nodes)
    resource = messages.DescribeConfigsResource(
        resource_type=_NODE_RESOURCE,
        resource_name=str(asked),
        configuration_keys=(_LAKE_SETTING, _FOLDER_SETTING),
    )
    (result,) = (await client.send(asked, messages.DescribeConfigsRequest(resources=(resource,)))).results
    if result.error_code:
        raise error_from_code(result.error_code, result.error_message, about=f"settings of node {asked}")
    configs = {one.name: one.value or "" for one in result.configs}
    status = decode_document(await client.private(asked, _NODE_STATUS_KEY, encode(Nothing())))
    return storage_in(status["data"], lake=configs.get(_LAKE_SETTING, ""), folder=configs.get(_FOLDER_SETTING, ""))


async def ledger_pipeline(client: Client) -> Pipeline | None:
    """Return the pipeline that lands the ledger, if one is declared."""
    declared = [one for one in await PipelineClient(client).describe() if one["kind"] == PipelineKind.LEDGER]
    return pipeline_of(declared[0]) if declared else None


async def ledger_lake(client: Client) -> str:
    """Return where the ledger's table is stored; raise `NotFound` if no pipeline lands one."""
    pipeline = await ledger_pipeline(client)
    if pipeline is None:
        raise NotFound("no pipeline lands a ledger; create one with: millstream pipeline create ledger NAME")
    return pipeline.overrides.get("lake") or (await storage_of(client)).lake


_READERS: Final = {
    "delta": "deltalake.DeltaTable({place!r}).to_pandas()",
    "parquet": "pandas.read_parquet({place!r})",
}


class LandedTable(NamedTuple):
    """The table of a topic."""

    topic: str
    place: str
    """A folder on the node that runs the pipeline, or a URL."""
    read: str
    """A Python expression that reads the table."""


class LandedTables(NamedTuple):
    """The tables of a pipeline by topic, or notes that say why they are unknown."""

    tables: list[LandedTable]
    notes: list[str]


async def tables_of(client: Client, described: Mapping[str, Any]) -> LandedTables:
    """Return the tables of a pipeline; with a pattern, those of existing topics."""
    try:
        settings = pipeline_of(described).settings
        if not isinstance(settings, LandSettings):
            return LandedTables([], [])
        report = described["report"]
        lake = settings.lake or (await storage_of(client, node=report and report["node"])).lake
        names = settings.topic_names or await _found(client, settings)
    except MillstreamError as error:
        return LandedTables([], [f"The locations of its tables are not known now: {error}"])
    return LandedTables([_table(name, f"{lake.rstrip('/')}/{name}", settings.format) for name in names], [])


def _table(topic: str, place: str, format_name: str) -> LandedTable:
    return LandedTable(topic, place, _READERS[format_name].format(place=place))


async def _found(client: Client, settings: LandSettings) -> list[str]:
    topics = (await client.metadata()).topics.values()
    return sorted(one.name for one in topics if not one.is_internal and settings.takes(one.name))
