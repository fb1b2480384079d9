"""What a message is called: the id its publisher gave it, else where it lies."""

from __future__ import annotations

from collections.abc import Iterable

HEADER = "message-id"


def message_id(topic_id: object, partition: int, offset: int, headers: Iterable[tuple[str, bytes | None]]) -> str:
    """The `message-id` header if the publisher set one, else `topic-id/partition/offset`."""
    for name, value in headers:
        if name == HEADER and value:
            return value.decode(errors="replace")
    return f"{topic_id}/{partition}/{offset}"
