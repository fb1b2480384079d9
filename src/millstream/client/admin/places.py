"""Where the pipelines of a node keep their tables and checkpoints, for whoever runs one by hand."""

from __future__ import annotations

import json
import os
from typing import Any, Final, NamedTuple

from millstream.core.ids import NodeId
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.refusal import refusal

LAKE: Final = "lake"
FOLDER: Final = "pipelines"

_NODE_STATUS_KEY: Final = 32000
_NODE_RESOURCE: Final = 4
_LAKE_SETTING: Final = "pipelines-lake"
_FOLDER_SETTING: Final = "pipelines-folder"


class Places(NamedTuple):
    """Folders or URLs, as the node has them."""

    lake: str
    folder: str
    data: str
    """The data folder of the node, which may be on another machine."""


def places_in(data: str, *, lake: str = "", folder: str = "") -> Places:
    """Where things are for a node with this data folder and these settings."""
    return Places(lake or os.path.join(data, LAKE), folder or os.path.join(data, FOLDER), data)


async def places_of(client: Client, *, node: int | None = None) -> Places:
    """Where a node has them, or the first; settings of this kind are the same on all, data folders need not be."""
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
        raise refusal(result.error_code, result.error_message, about=f"settings of node {asked}")
    told = {one.name: one.value or "" for one in result.configs}
    status = json.loads(bytes(await client.private(asked, _NODE_STATUS_KEY, b"")))
    return places_in(status["data"], lake=told.get(_LAKE_SETTING, ""), folder=told.get(_FOLDER_SETTING, ""))
