"""The names of record headers that Millstream reads or writes."""

from __future__ import annotations

from typing import Final

MESSAGE_ID: Final = "message-id"
CONTENT_TYPE: Final = "content-type"
CORRELATION_ID: Final = "correlation-id"
TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"
BAGGAGE: Final = "baggage"

DELIVER_AT: Final = "deliver-at"
"""Delays a message: milliseconds since 1970, as text."""

LETTER_PREFIX: Final = "dlq-"
"""Begins the headers of a dead letter that describe the failure."""
LETTER_REDRIVEN: Final = "dlq-redriven"
"""How often the message was published again from a dead letter."""
LETTER_PUBLISHED: Final = "dlq-timestamp"
"""When the message was first published."""
