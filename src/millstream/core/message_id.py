"""Message ids: the publisher's, otherwise derived from the message's position."""

from __future__ import annotations

from collections.abc import Iterable

HEADER = "message-id"


def message_id(topic_id: object, partition: int, offset: int, headers: Iterable[tuple[str, bytes | None]]) -> str:
    """Return the `message-id` header if the publisher set one, otherwise `topic-id/partition/offset`."""
    for name, value in headers:
        if name == HEADER and value:
            return value.decode(errors="replace")
    return f"{topic_id}/{partition}/{offset}"
