"""Private requests with which people look around: a page of topics, and what the client may do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from millstream.protocol.private.message import Response

TOPICS_KEY: Final = 32190
RIGHTS_KEY: Final = 32191

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
    with_sums: bool = False
    """Also sum up all topics, for a client that may describe the cluster."""


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
    sums: tuple[int, int, int, int] | None = None
    """Records and bytes appended, and bytes read, since the node started; and bytes stored."""


class ListRightsRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Operations on resources, each as `[operation, resource type, name]`, with Kafka's numbers."""

    asked: list[tuple[int, int, str]]


class ListRightsResponse(Response, frozen=True, kw_only=True):
    """Whether the client may do each of them, and who it is; empty where every client may do everything."""

    allowed: Sequence[bool] = ()
    principal: str = ""
