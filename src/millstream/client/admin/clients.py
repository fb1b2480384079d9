"""The clients of a cluster, by a private request since Kafka has none, and their quotas, over Kafka's requests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millstream.core.errors import BrokerUnreachable, ProtocolViolation, RequestRefused
from millstream.core.ids import NodeId
from millstream.core.quota import QuotaEntity
from millstream.protocol.messages.codec import build_request
from millstream.protocol.private.message import CLIENT_LIST_KEY, request_document
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import error_from_code


async def list_quotas(client: Client) -> Mapping[QuotaEntity, Mapping[str, float]]:
    response = await client.send(None, build_request("describe_client_quotas", 1))
    if response.error_code:
        raise error_from_code(response.error_code, response.error_message, about="list quotas")
    return {
        QuotaEntity.of((part.entity_type, part.entity_name) for part in entry.entity): {
            value.key: float(value.value) for value in entry.values
        }
        for entry in response.entries or ()
    }


async def alter_quota(client: Client, entity: QuotaEntity, changes: Mapping[str, float | None]) -> None:
    """Set the limits of an entity; None removes a limit."""
    entry = {
        "entity": [{"entity_type": kind, "entity_name": name} for kind, name in entity.parts],
        "ops": [{"key": key, "value": value or 0.0, "remove": value is None} for key, value in changes.items()],
    }
    (result,) = (await client.send(None, build_request("alter_client_quotas", 1, entries=[entry]))).entries
    if result.error_code:
        raise error_from_code(result.error_code, result.error_message, about=f"the quota of {entity}")


UNSUPPORTED_VERSION = 35

PRODUCER, CONSUMER = "producer", "consumer"


@dataclass(frozen=True, slots=True)
class ConnectedClient:
    """A connection of a client. A rate is null if the connection did not exist for the whole interval."""

    node: int
    address: str
    client_id: str
    software: str
    version: str
    roles: tuple[str, ...]
    produced_bytes: int
    fetched_bytes: int
    produced_bytes_per_s: float | None
    fetched_bytes_per_s: float | None
    idle_s: float


@dataclass(frozen=True, slots=True)
class Clients:
    """The clients of all nodes, and how many were omitted from their responses."""

    clients: tuple[ConnectedClient, ...]
    omitted: int


async def list_clients(client: Client, *, interval_s: float) -> Clients:
    """List every connection to every node, with rates measured over an interval."""
    nodes = sorted((await client.metadata([])).nodes)
    before = {node: await _request(client, node) for node in nodes}
    await asyncio.sleep(interval_s)
    clients: list[ConnectedClient] = []
    omitted = 0
    for node in nodes:
        after = await _request(client, node)
        earlier = {client["connection"]: client for client in before[node]["clients"]}
        elapsed_s = after["clock_s"] - before[node]["clock_s"]
        clients += [_client(node, client, earlier.get(client["connection"]), elapsed_s) for client in after["clients"]]
        omitted += after["omitted"]
    return Clients(tuple(sorted(clients, key=lambda client: (client.client_id, client.node, client.address))), omitted)


async def _request(client: Client, node: NodeId) -> dict[str, Any]:
    try:
        response = await request_document(client, node, CLIENT_LIST_KEY)
    except (BrokerUnreachable, ProtocolViolation) as error:
        raise RequestRefused(
            f"node {node} does not list its clients ({error}); only Millstream brokers do",
            code=UNSUPPORTED_VERSION,
        ) from error
    return response


def _client(node: int, now: Mapping[str, Any], before: Mapping[str, Any] | None, elapsed_s: float) -> ConnectedClient:
    done = {PRODUCER: now["produce_requests"], CONSUMER: now["fetch_requests"]}
    return ConnectedClient(
        node=node,
        address=now["address"],
        client_id=now["client_id"],
        software=now["software"],
        version=now["software_version"],
        roles=tuple(role for role, requests in done.items() if requests),
        produced_bytes=now["produced_bytes"],
        fetched_bytes=now["fetched_bytes"],
        produced_bytes_per_s=_rate("produced_bytes", now, before, elapsed_s),
        fetched_bytes_per_s=_rate("fetched_bytes", now, before, elapsed_s),
        idle_s=now["idle_s"],
    )


def _rate(key: str, now: Mapping[str, Any], before: Mapping[str, Any] | None, elapsed_s: float) -> float | None:
    if before is None or elapsed_s <= 0:
        return None
    return round(float(now[key] - before[key]) / elapsed_s, 1)
