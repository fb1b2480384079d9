"""A filter on one leased message at a time, for those who work on few of them by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from millstream.wire.subscriptions import LeasedMessage

Wanted = Callable[[LeasedMessage], bool]


def matcher(text: str | None) -> Wanted:
    """Whether a letter is meant; a condition in the language of subscriptions' filters."""
    if text is None:
        return lambda _letter: True
    from millstream.subscriptions.filter.batch import RecordBatch
    from millstream.subscriptions.filter.filter import compile_filter

    condition = compile_filter(text)

    def matches(letter: LeasedMessage) -> bool:
        batch: Any = RecordBatch([letter.record], topic=letter.topic, partition=letter.partition, uses=condition.uses)
        return bool(condition.matches(batch)[0])

    return matches
