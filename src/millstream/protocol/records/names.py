"""What a record has, by the names of the columns of Spark's Kafka source."""

from __future__ import annotations

from typing import Final

NAMES: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")
"""In their order; kept apart from what turns records into columns, since planning a query needs no more than this."""
