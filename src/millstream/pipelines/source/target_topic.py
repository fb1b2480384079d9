"""Where rows are to go, looked at on the driver before there is a task: what cannot be written is said at once."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Final

from millstream.core.errors import UnknownTopic
from millstream.core.topic import check_topic_name
from millstream.pipelines.source.link import Link, link_to
from millstream.pipelines.source.options import WriteOptions
from millstream.protocol.private.transaction_messages import PREPARE_KEY
from millstream.protocol.wire.error_codes import error_from_code

_logger = logging.getLogger(__name__)

STREAM_PATIENCE_S: Final = 10.0
"""How long a stream waits for a broker to answer: Spark plans each of its batches anew, perhaps in a new process, and
brokers may be started again meanwhile."""


CREATE_S_MAX: Final = 5.0
"""How long a topic may not be there yet that Apache Kafka makes: it says so before it is done."""

_PAUSE_S: Final = 0.2


def count_partitions(link: Link, topic: str) -> int:
    """How many partitions a topic has; it is made if the broker does so, and else `UnknownTopic` says what to do."""
    check_topic_name(topic)
    deadline = time.monotonic() + CREATE_S_MAX
    while True:
        found = link.call(link.client.metadata([topic], create=True))
        if topic not in found.errors:
            return len(found.topics[topic].partitions)
        error = error_from_code(found.errors[topic], None, about=f"topic {topic!r}")
        if not isinstance(error, UnknownTopic) or supports_batch_commit(link) or time.monotonic() > deadline:
            break
        time.sleep(_PAUSE_S)
    if isinstance(error, UnknownTopic):
        hint = f"create it with: millstream topic create {topic}"
        raise UnknownTopic(f"topic {topic!r} does not exist and the broker does not create it; {hint}")
    raise error


def partition_counts(link: Link, topics: Sequence[str]) -> dict[str, int]:
    """How many partitions topics have that are there, asked for at once."""
    found = link.call(link.client.metadata(topics))
    return {name: len(topic.partitions) for name, topic in found.topics.items()}


def supports_batch_commit(link: Link) -> bool:
    """Whether the brokers have the batch commit, which is Millstream's own."""
    return link.call(link.client.serves(PREPARE_KEY))


def check_target(options: WriteOptions, patience_s: float = 0.0) -> None:
    """Raise unless brokers answer and have the topic; what was found right is not asked for again."""
    _check(options.brokers, options.client_id, options.timeout_s, options.topic, patience_s)


@lru_cache(maxsize=16)
def _check(brokers: str, client_id: str, timeout_s: float, topic: str | None, patience_s: float) -> None:
    link = link_to(brokers, client_id=client_id, timeout_s=timeout_s, patience_s=patience_s)
    if topic is not None:
        count_partitions(link, topic)
    if not supports_batch_commit(link):
        _logger.warning(
            "the broker at %s does not know Millstream's batch commit: rows are written at least once, "
            "and rows of a batch that fails stay visible",
            brokers,
        )
