"""The verbs with which a worker settles messages that it holds."""

from __future__ import annotations

from enum import IntEnum


class Verb(IntEnum):
    """What a worker says of messages that it holds; the first four numbers are those of Kafka's acknowledgements."""

    ACCEPT = 1
    RELEASE = 2
    REJECT = 3
    EXTEND = 4
    RETURN = 5
    """Nobody has looked at it, so it goes to another worker as if it had never been given."""
