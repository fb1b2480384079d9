"""Private requests with which people look around: a page of topics, and what the client may do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from millstream.protocol.private.message import Response

TOPICS_KEY: Final = 32190
RIGHTS_KEY: Final = 32191
SUMS_KEY: Final = 32192
READING_KEY: Final = 32193

BY_NAME, BY_PARTITIONS, BY_RECORDS, BY_BYTES = "name", "partitions", "records", "bytes"
ORDERS: Final = (BY_NAME, BY_PARTITIONS, BY_RECORDS, BY_BYTES)
PAGE_MAX: Final = 10_000
RIGHTS_MAX: Final = 1000


class ListTopicsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Which topics to list, and in which order."""

    search: str = ""
    """Topics whose names contain this, in any case."""
    names: list[str] | None = None
    """Only these, regardless of `search`."""
    internal: bool = False
    order: str = BY_NAME
    descending: bool = False
    offset: int = 0
    limit: int = 100


class ListedTopic(msgspec.Struct, frozen=True, array_like=True):
    """A topic, and what the node that answers holds of the partitions it leads."""

    name: str
    topic_id: str
    partitions: int
    replication: int
    internal: bool
    records: int
    """Offsets between the start and the high watermark."""
    bytes: int
    records_in: int
    """Records appended since the node started."""
    bytes_in: int
    bytes_out: int


class ListTopicsResponse(Response, frozen=True, kw_only=True):
    """One page, and how many topics all pages have."""

    topics: Sequence[ListedTopic] = ()
    total: int = 0


class ListRightsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Operations on resources, each as `[operation, resource type, name]`, with Kafka's numbers."""

    asked: list[tuple[int, int, str]]


class ListRightsResponse(Response, frozen=True, kw_only=True):
    """Whether the client may do each of them, and who it is; empty where every client may do everything."""

    allowed: Sequence[bool] = ()
    principal: str = ""


class NoteReadingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Says that the client shows a person messages of a topic."""

    topic: str
    how: str
    """`browse`, `message`, `search`, `tail`, `download`, `letters`, `filter`, the trial of a filter, or `dry-run`."""
    partition: int = -1
    offset: int = -1
    """The message, if it is a single one."""
    filter: str = ""


class NoteReadingResponse(Response, frozen=True, kw_only=True):
    """It is recorded."""


class NodeSumsResponse(Response, frozen=True, kw_only=True):
    """The state of a node in a few numbers, however many partitions it has."""

    node_id: int = -1
    version: str = ""
    state: str = ""
    started_ms: int = 0
    reasons: Sequence[str] = ()
    """Why the node should get no traffic now."""
    warnings: Sequence[str] = ()
    records_in: int = 0
    """Records appended to the partitions that it leads, since it started."""
    bytes_in: int = 0
    bytes_out: int = 0
    stored_bytes: int = 0
    leads: int = 0
    replicas: int = 0
    partitions: int = 0
    """Partitions of the whole cluster, and how many of them lack a leader, or a replica that is in sync."""
    without_leader: int = 0
    under_replicated: int = 0
