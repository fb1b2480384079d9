"""One topic on one running server: what a measurement is made against."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from millstream_testing.server import Server, ServerFailed

Numbers = dict[str, float]
"""What was measured, by name; the unit is part of the name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A topic that is there and empty."""

    server: Server
    topic: str
    partitions: int
    tls: Mapping[str, str] = field(default_factory=dict)
    """Where and how librdkafka connects instead, if the line is measured with TLS."""

    @property
    def client_settings(self) -> dict[str, str]:
        """How librdkafka connects."""
        return {"bootstrap.servers": self.address, "log_level": "0", **self.tls}

    @property
    def address(self) -> str:
        """Where clients connect."""
        return self.server.kafka

    @property
    def pid(self) -> int:
        """Whose CPU seconds and memory count."""
        return self.server.pid

    def check(self) -> None:
        """Raise if the server is gone, with the end of what it logged."""
        if not self.server.is_running():
            raise ServerFailed(f"the server ended; its log ends with:\n{self.server.log_tail()}")
