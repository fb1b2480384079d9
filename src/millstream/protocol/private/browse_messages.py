"""Private requests of the console: pages of topics, the rights of a client, reads to audit, and summaries of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Final

import msgspec

from millstream.protocol.private.message import Request, Response

BY_NAME, BY_PARTITIONS, BY_RECORDS, BY_BYTES = "name", "partitions", "records", "bytes"
ORDERS: Final = (BY_NAME, BY_PARTITIONS, BY_RECORDS, BY_BYTES)
PAGE_MAX: Final = 10_000
RIGHTS_MAX: Final = 1000


class ListTopicsResponse(Response, frozen=True, kw_only=True):
    """A page, and how many topics all pages have."""

    topics: Sequence[ListedTopic] = ()
    total: int = 0


class ListTopicsRequest(Request[ListTopicsResponse], frozen=True, kw_only=True):
    """The topics to list, and their order."""

    KEY: ClassVar = 32190
    search: str = ""
    """Topics whose names contain this, in any case."""
    names: list[str] | None = None
    """Only these, regardless of `search`."""
    internal: bool = False
    order: str = BY_NAME
    descending: bool = False
    offset: int = 0
    limit: int = 100
    partitions: bool = False
    """Whether to report the size of each partition."""


class ListedTopic(msgspec.Struct, frozen=True, array_like=True):
    """A topic, with totals over the partitions that the responding node leads."""

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
    partition_bytes: dict[int, int] = {}
    """The sizes of the partitions that the responding node leads, if asked for."""


class ListRightsResponse(Response, frozen=True, kw_only=True):
    """Whether the client may perform each operation, and its principal; both empty on a node without authentication."""

    allowed: Sequence[bool] = ()
    principal: str = ""


class ListRightsRequest(Request[ListRightsResponse], frozen=True, kw_only=True):
    """Operations on resources, each as `[operation, resource type, name]`, with Kafka's numbers."""

    KEY: ClassVar = 32191
    rights: list[tuple[int, int, str]]


class AuditReadingRequest(Request[Response], frozen=True, kw_only=True):
    """Records in the audit log that the client shows messages of a topic to a user."""

    KEY: ClassVar = 32193
    topic: str
    how: str
    """`browse`, `message`, `search`, `tail`, `download`, `letters`, `filter` (trying one) or `dry-run`."""
    partition: int = -1
    offset: int = -1
    """The offset of a single message; -1 for several."""
    filter: str = ""


class NodeSummaryResponse(Response, frozen=True, kw_only=True):
    """The totals of a node; the response does not grow with its partitions."""

    node_id: int = -1
    version: str = ""
    state: str = ""
    started_ms: int = 0
    reasons: Sequence[str] = ()
    """The reasons why the node should get no traffic now."""
    warnings: Sequence[str] = ()
    records_in: int = 0
    """Records appended to the partitions that it leads, since it started."""
    bytes_in: int = 0
    bytes_out: int = 0
    stored_bytes: int = 0
    disk_bytes: int = 0
    """The size of the disk of its data folder, and its free space; 0 if unknown."""
    disk_free_bytes: int = 0
    leads: int = 0
    replicas: int = 0
    partitions: int = 0
    """Partitions of the whole cluster; below, those without a leader and those with replicas out of sync."""
    without_leader: int = 0
    under_replicated: int = 0


class NodeSummaryRequest(Request[NodeSummaryResponse], frozen=True):
    KEY: ClassVar = 32192
