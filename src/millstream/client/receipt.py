"""Receipts of stored messages."""

from __future__ import annotations

from typing import NamedTuple


class Receipt(NamedTuple):
    """Where a message is stored. Without acknowledgements (`acks=0`) the offset is unknown: -1."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    topic_id: str
    given_id: str | None = None
    """The `message-id` header, if the publisher set one."""

    @property
    def id(self) -> str:
        """Return the publisher's id of the message, otherwise `topic-id/partition/offset`."""
        if self.given_id is not None:
            return self.given_id
        return f"{self.topic_id}/{self.partition}/{self.offset}"
