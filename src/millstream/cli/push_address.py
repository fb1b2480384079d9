"""Whether nodes push to where a subscription has its endpoint, as far as that shows without looking up a name."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from millstream.cli.output import one_line
from millstream.core.errors import MillstreamError
from millstream.core.push import URL

if TYPE_CHECKING:
    from millstream.core.ids import NodeId
    from millstream.protocol.wire.client import Client

_NODE_RESOURCE = 4
_SETTING = "push-private-addresses"
_LOOPBACK = "localhost"


def private_host(url: str) -> str | None:
    """The host of a URL that is written as a private address; None for others, and for names, which nodes look up."""
    from millstream.gateway.push.address import is_public

    try:
        host = (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return None
    if host == _LOOPBACK or host.endswith(f".{_LOOPBACK}"):
        return host
    address = _address(host)
    return None if address is None or is_public(address) else host


async def push_note(client: Client, changes: Mapping[str, str | None]) -> str | None:
    """What to tell whoever has declared an endpoint at which some nodes will not push."""
    host = private_host(changes.get(URL) or "")
    if host is None:
        return None
    refusing = [str(node) for node in (await client.metadata([])).nodes if not await _may_push(client, node)]
    if not refusing:
        return None
    who = f"node {refusing[0]} does" if len(refusing) == 1 else f"nodes {', '.join(refusing)} do"
    return f"{one_line(host)} is a private address, to which {who} not push; nodes that may have --{_SETTING} true."


def _address(host: str) -> str | None:
    with suppress(ValueError):
        return str(ip_address(host.partition("%")[0]))
    # As the system reads them: 127.1, 0x7f.1 and 2130706433 are addresses too.
    with suppress(OSError):
        return socket.inet_ntoa(socket.inet_aton(host))
    return None


async def _may_push(client: Client, node: NodeId) -> bool:
    """Whether a node pushes to private addresses; one that does not tell is not complained about."""
    from kio.schema.describe_configs.v4 import request

    messages: Any = request
    resource = messages.DescribeConfigsResource(
        resource_type=_NODE_RESOURCE, resource_name=str(node), configuration_keys=(_SETTING,)
    )
    with suppress(MillstreamError):
        (result,) = (await client.send(node, messages.DescribeConfigsRequest(resources=(resource,)))).results
        return not any(one.name == _SETTING and one.value == "false" for one in result.configs)
    return True
