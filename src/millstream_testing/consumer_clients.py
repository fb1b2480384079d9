"""Consumer group clients that random histories drive: the state and the pending request of each."""

from __future__ import annotations

from typing import Any

from millstream.broker.groups.consumer.member import NOTHING, Assignment
from millstream.broker.groups.requests import JoinResponse
from millstream_testing.consumer_harness import SimulatedConsumer


class ConsumerProtocolClient:
    """A consumer of the new protocol, with at most one heartbeat in flight."""

    def __init__(self, number: int, choice: dict[str, Any], *, rebalance_timeout_ms: int) -> None:
        self.instance_id = "static" if number == 0 else None
        self.choice = choice
        self._rebalance_timeout_ms = rebalance_timeout_ms
        self.requests = 0
        self.in_flight = False
        self.begin("")

    def begin(self, member_id: str) -> None:
        self.consumer = SimulatedConsumer(
            member_id, instance_id=self.instance_id, rebalance_timeout_ms=self._rebalance_timeout_ms
        )
        self.received: dict[str, Any] = {}
        self.joined = False
        self.requests += 1
        self.in_flight = False


class ClassicProtocolClient:
    """A consumer of the classic protocol that revokes everything before it joins."""

    def __init__(self) -> None:
        self.member_id = ""
        self.generation = -1
        self.owned: Assignment = NOTHING
        self.joined: JoinResponse | None = None
        self.requests = 0
