"""The servers under measurement: their names and their order in all tables, their interface, and a topic on one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Self

from benchmarks.cases import Case

from millstream_testing.server import Server, ServerFailed

LIMIT, MILLSTREAM, KAFKA = "limit", "millstream", "kafka"
BARE, DISCARD = "millstream-bare", "client-alone"
_FIRST = (LIMIT, MILLSTREAM, KAFKA, BARE)


def in_order(names: Iterable[str]) -> list[str]:
    """Return each name once: first the servers of every line, then other peers, last the client alone."""
    known = {name: place for place, name in enumerate(_FIRST)}
    return sorted(set(names), key=lambda name: (name == DISCARD, known.get(name, len(known)), name))


class PeerUnavailable(Exception):
    """A dependency of the peer is not installed and could not be fetched; the message names it."""


Numbers = dict[str, float]
"""Results by name; the unit is part of the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """An existing empty topic."""

    server: Server
    topic: str
    partitions: int
    tls: Mapping[str, str] = field(default_factory=dict)
    """librdkafka's connection settings, if the line is measured with TLS."""

    @property
    def client_settings(self) -> dict[str, str]:
        """Return librdkafka's connection settings."""
        return {"bootstrap.servers": self.address, "log_level": "0", **self.tls}

    @property
    def address(self) -> str:
        return self.server.kafka

    @property
    def pid(self) -> int:
        """The process whose CPU seconds and memory are measured."""
        return self.server.pid

    def check(self) -> None:
        """Raise an error with the end of the log if the server has ended."""
        if not self.server.is_running():
            raise ServerFailed(f"the server ended; its log ends with:\n{self.server.log_tail()}")


Measured = dict[str, Numbers]
"""The results of one measurement by direction, such as "produce" and "consume"."""

PRODUCED, CONSUMED = "produce", "consume"


class Subject(ABC):
    """A server that is started once and measured in many lines."""

    name: str
    version: str = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop what was started."""
        return

    @abstractmethod
    def offers(self, case: Case) -> bool:
        """Whether this server can be measured in this line with the same durability."""

    @abstractmethod
    def measure(self, case: Case, seconds: float) -> Measured:
        """Measure one line once, for about this many seconds in each direction."""

    def durability(self, case: Case) -> str:
        """Describe the durability of an acknowledgement."""
        return case.durability
