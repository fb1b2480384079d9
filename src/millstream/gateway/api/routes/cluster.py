"""The cluster and its connected clients."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from millstream.client.admin.clients import list_clients
from millstream.client.admin.cluster_status import cluster_status
from millstream.gateway.api.route import NoFields, Request, Route
from millstream.gateway.api.services import Services


class ClusterNode(msgspec.Struct, frozen=True):
    """One node; `reasons` say why it should get no traffic now."""

    id: int
    address: str | None
    rack: str | None
    state: str
    version: str | None
    leads: int
    replicas: int
    behind: int
    reasons: list[str]


class TroubledPartition(msgspec.Struct, frozen=True):
    """A partition without a leader or with replicas out of sync."""

    topic: str
    partition: int
    leader: int | None
    replicas: list[int]
    in_sync: list[int]


class ReplicaBehind(msgspec.Struct, frozen=True):
    """A replica that lags behind its leader."""

    topic: str
    partition: int
    replica: int
    records: int


class ClusterDescription(msgspec.Struct, frozen=True):
    """The state of the cluster."""

    cluster: str
    controller: int | None
    nodes: list[ClusterNode]
    partitions: int
    without_leader: list[TroubledPartition]
    under_replicated: list[TroubledPartition]
    behind: list[ReplicaBehind]
    warnings: list[str]


class Measuring(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which connections to list, and how long to measure their rates."""

    interval_ms: Annotated[int, Meta(ge=0, le=10_000)] = 500
    all: Annotated[bool, Meta(description="Include connections that neither produce nor consume.")] = False


class ConnectedClientDocument(msgspec.Struct, frozen=True):
    """One connection; rates are null if it was too short-lived to measure."""

    node: int
    address: str
    client_id: str
    software: str
    version: str
    roles: list[str]
    produced_bytes: int
    fetched_bytes: int
    produced_bytes_per_s: float | None
    fetched_bytes_per_s: float | None
    idle_s: float


class ClientList(msgspec.Struct, frozen=True):
    """Connections to all nodes, and how many were left out of the list."""

    clients: list[ConnectedClientDocument]
    left_out: int


async def status(services: Services, request: Request[NoFields, NoFields]) -> ClusterDescription:
    """Describe the cluster as its nodes report it."""
    return msgspec.convert((await cluster_status(services.client)).described(), ClusterDescription)


async def clients(services: Services, request: Request[Measuring, NoFields]) -> ClientList:
    """List the connected clients."""
    found = await list_clients(services.client, interval_s=request.query.interval_ms / 1000)
    shown = [asdict(one) for one in found.clients if request.query.all or one.roles]
    return ClientList(msgspec.convert(shown, list[ConnectedClientDocument]), found.left_out)


_SHARED: Final[dict[str, Any]] = {"tag": "cluster", "method": "GET", "body": NoFields}

ROUTES: Final = (
    Route(
        path="/cluster",
        summary="Describe the cluster",
        handle=status,
        query=NoFields,
        answer=ClusterDescription,
        **_SHARED,
    ),
    Route(
        path="/clients", summary="List connected clients", handle=clients, query=Measuring, answer=ClientList, **_SHARED
    ),
)
