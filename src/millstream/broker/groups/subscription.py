"""What a consumer's protocol metadata says of the topics it wants, read as far as every version agrees."""

from __future__ import annotations

from millstream.core.errors import ProtocolViolation
from millstream.protocol.messages.primitives import Reader

CONSUMER_PROTOCOL_TYPE = "consumer"


def subscribed_topics(metadata: bytes) -> frozenset[str] | None:
    """The topics in a consumer's subscription; None when the bytes are something else."""
    reader = Reader(metadata, flexible=False)
    try:
        # Every later version begins with the fields of version 0, so its number does not matter.
        reader.int16()
        count = reader.array_length(item_bytes_min=2)
        return frozenset(reader.string() for _ in range(max(0, count)))
    except ProtocolViolation:
        return None
