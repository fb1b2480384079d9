"""The topics that rows are written to: checked on the driver before a task starts, and created for pipelines."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Final

from millstream.core.errors import TopicExists, UnknownTopic
from millstream.core.topic import check_topic_name
from millstream.pipelines.source.access import Access
from millstream.pipelines.source.link import Link, link_to
from millstream.pipelines.source.options import WriteOptions
from millstream.protocol.messages.codec import build_request
from millstream.protocol.private.transactions import BatchMember
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import error_from_code

_logger = logging.getLogger(__name__)

STREAM_PATIENCE_S: Final = 10.0
"""How long a stream waits for a broker: Spark plans each batch again, possibly in a new process, and brokers may be
restarting."""

CREATE_S_MAX: Final = 5.0
"""How long Apache Kafka may take to create a topic: it responds before it is done."""

_PAUSE_S: Final = 0.2


def count_partitions(link: Link, topic: str) -> int:
    """Return a topic's number of partitions, creating it if the broker does so; otherwise raise `UnknownTopic` with
    advice.
    """
    check_topic_name(topic)
    deadline = time.monotonic() + CREATE_S_MAX
    while True:
        metadata = link.call(link.client.metadata([topic], create=True))
        if topic not in metadata.errors:
            return len(metadata.topics[topic].partitions)
        error = error_from_code(metadata.errors[topic], None, about=f"topic {topic!r}")
        if not isinstance(error, UnknownTopic) or supports_batch_commit(link) or time.monotonic() > deadline:
            break
        time.sleep(_PAUSE_S)
    if isinstance(error, UnknownTopic):
        hint = f"create it with: millstream topic create {topic}"
        raise UnknownTopic(f"topic {topic!r} does not exist and the broker does not create it; {hint}")
    raise error


def partition_counts(link: Link, topics: Sequence[str]) -> dict[str, int]:
    metadata = link.call(link.client.metadata(topics))
    return {name: len(topic.partitions) for name, topic in metadata.topics.items()}


def supports_batch_commit(link: Link) -> bool:
    return link.call(link.client.serves(BatchMember.KEY))


def check_target(options: WriteOptions, patience_s: float = 0.0) -> None:
    """Raise unless the brokers respond and have the topic; successful checks are cached."""
    _check(options.brokers, options.access, options.client_id, options.timeout_s, options.topic, patience_s)


@lru_cache(maxsize=16)
def _check(
    brokers: str, access: Access, client_id: str, timeout_s: float, topic: str | None, patience_s: float
) -> None:
    link = link_to(brokers, client_id=client_id, timeout_s=timeout_s, patience_s=patience_s, access=access)
    if topic is not None:
        count_partitions(link, topic)
    if not supports_batch_commit(link):
        _logger.warning(
            "the broker at %s does not support Millstream's batch commit: rows are written at least once, "
            "and rows of a batch that fails stay visible",
            brokers,
        )


AT_ONCE_MAX: Final = 100
BY_BROKER: Final = -1
"""Lets the broker choose a number."""

_TIMEOUT: Final = timedelta(seconds=60)


def make_topics(link: Link, names: Iterable[str], partitions: int = BY_BROKER) -> None:
    """Create missing topics with the broker's defaults; to use other settings, create or alter them yourself."""
    sorted_names = sorted(names)
    existing = link.call(link.client.metadata(sorted_names)).topics
    missing = [name for name in sorted_names if name not in existing]
    for start in range(0, len(missing), AT_ONCE_MAX):
        link.call(_create(link.client, missing[start : start + AT_ONCE_MAX], partitions))


async def _create(client: Client, names: list[str], partitions: int) -> None:
    topics = [{"name": name, "num_partitions": partitions, "replication_factor": BY_BROKER} for name in names]
    response = await client.send(None, build_request("create_topics", 7, topics=topics, timeout=_TIMEOUT))
    for made in response.topics:
        if made.error_code:
            error = error_from_code(made.error_code, made.error_message, about=f"create topic {made.name!r}")
            # Another run may have created it at the same time.
            if not isinstance(error, TopicExists):
                raise error
