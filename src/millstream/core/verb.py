"""How a worker settles the messages that it holds."""

from __future__ import annotations

from enum import IntEnum


class Verb(IntEnum):
    """An acknowledgement; the first four numbers are those of Kafka's acknowledge types."""

    ACCEPT = 1
    RELEASE = 2
    REJECT = 3
    EXTEND = 4
    RETURN = 5
    """The worker has not looked at the message: it goes to another one, and this delivery does not count."""
