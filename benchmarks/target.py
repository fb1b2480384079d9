"""The target of a measurement: one topic on one running server."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from millstream_testing.server import Server, ServerFailed

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
        """The address for clients."""
        return self.server.kafka

    @property
    def pid(self) -> int:
        """The process whose CPU seconds and memory are measured."""
        return self.server.pid

    def check(self) -> None:
        """Raise an error with the end of the log if the server has ended."""
        if not self.server.is_running():
            raise ServerFailed(f"the server ended; its log ends with:\n{self.server.log_tail()}")
