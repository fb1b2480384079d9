"""A filter on one leased message at a time, for those who work on few of them by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millstream.protocol.private.subscriptions import LeasedMessage


def matcher(text: str) -> Callable[[LeasedMessage], bool]:
    """Whether a message is meant; a condition in the language of subscriptions' filters."""
    from millstream.protocol.filter.batch import RecordBatch
    from millstream.protocol.filter.filter import compile_filter

    condition = compile_filter(text)

    def matches(message: LeasedMessage) -> bool:
        batch: Any = RecordBatch(
            [message.record], topic=message.topic, partition=message.partition, uses=condition.uses
        )
        return bool(condition.matches(batch)[0])

    return matches
