"""The cluster, and the clients that are connected to it."""

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
    """A partition that lacks a leader or a replica in sync."""

    topic: str
    partition: int
    leader: int | None
    replicas: list[int]
    in_sync: list[int]


class ReplicaBehind(msgspec.Struct, frozen=True):
    """A replica that lacks records."""

    topic: str
    partition: int
    replica: int
    records: int


class ClusterDescription(msgspec.Struct, frozen=True):
    """The cluster at one moment."""

    cluster: str
    controller: int | None
    nodes: list[ClusterNode]
    partitions: int
    without_leader: list[TroubledPartition]
    under_replicated: list[TroubledPartition]
    behind: list[ReplicaBehind]
    warnings: list[str]


class Measuring(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Which connections, and for how long their rates are measured."""

    interval_ms: Annotated[int, Meta(ge=0, le=10_000)] = 500
    all: Annotated[bool, Meta(description="Also those that neither produce nor consume.")] = False


class ConnectedClientDocument(msgspec.Struct, frozen=True):
    """One connection; rates are null when it was not there long enough to tell."""

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
    """Connections to all nodes, and how many more there are than nodes tell."""

    clients: list[ConnectedClientDocument]
    left_out: int


async def status(services: Services, request: Request[NoFields, NoFields]) -> ClusterDescription:
    """How the cluster is, as its nodes tell."""
    return msgspec.convert((await cluster_status(services.client)).described(), ClusterDescription)


async def clients(services: Services, request: Request[Measuring, NoFields]) -> ClientList:
    """Who is connected."""
    found = await list_clients(services.client, interval_s=request.query.interval_ms / 1000)
    shown = [asdict(one) for one in found.clients if request.query.all or one.roles]
    return ClientList(msgspec.convert(shown, list[ConnectedClientDocument]), found.left_out)


_SHARED: Final[dict[str, Any]] = {"tag": "cluster", "method": "GET", "body": NoFields}

ROUTES: Final = (
    Route(
        path="/cluster",
        summary="How the cluster is",
        handle=status,
        query=NoFields,
        answer=ClusterDescription,
        **_SHARED,
    ),
    Route(path="/clients", summary="Who is connected", handle=clients, query=Measuring, answer=ClientList, **_SHARED),
)
