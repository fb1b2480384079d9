"""What is told of one endpoint: counts, rates over the last seconds, the last answer."""

from __future__ import annotations

from collections import deque
from typing import Final

from millstream.broker.push_board import PushReport
from millstream.core.metric import Histogram
from millstream.gateway.push.endpoint import Endpoint
from millstream.gateway.push.verdict import Answer, Verdict

RATE_S: Final = 10.0
"""Rates are those of the last so many seconds."""


class Statistics:
    """The numbers of one subscription."""

    def __init__(self, subscription: str) -> None:
        self._subscription = subscription
        self._counts = dict.fromkeys(Verdict, 0)
        self._seconds = Histogram()
        self._last_status = 0
        self._last_error = ""
        self._last_error_ms = 0
        # Counts of some moments: when, how many were accepted, how many were not.
        self._moments: deque[tuple[float, int, int]] = deque([(float("-inf"), 0, 0)], maxlen=64)

    def note(self, answer: Answer, seconds: float, now_ms: int) -> None:
        """A request has ended."""
        self._counts[answer.verdict] += 1
        self._seconds.observe(seconds)
        self._last_status = answer.status
        if answer.verdict is not Verdict.ACCEPTED:
            self._last_error, self._last_error_ms = answer.reason, now_ms

    def report(self, endpoint: Endpoint, in_flight: int, now: float) -> PushReport:
        """How it stands now."""
        counts, distribution = self._counts, self._seconds.distribution()
        accepted = counts[Verdict.ACCEPTED]
        failed = sum(counts.values()) - accepted
        while len(self._moments) > 1 and self._moments[1][0] <= now - RATE_S:
            self._moments.popleft()
        _, accepted_before, failed_before = self._moments[0]
        if now - self._moments[-1][0] >= RATE_S / 50:
            self._moments.append((now, accepted, failed))
        return PushReport(
            subscription=self._subscription,
            state=endpoint.state,
            concurrency=endpoint.limit,
            in_flight=in_flight,
            accepted=accepted,
            refused=counts[Verdict.REFUSED],
            failed=counts[Verdict.FAILED],
            unreachable=counts[Verdict.UNREACHABLE],
            accepted_per_s=round((accepted - accepted_before) / RATE_S, 1),
            failed_per_s=round((failed - failed_before) / RATE_S, 1),
            last_status=self._last_status,
            last_error=self._last_error,
            last_error_ms=self._last_error_ms,
            bounds=list(distribution.bounds),
            cumulative=list(distribution.cumulative),
            requests=distribution.observations,
            seconds=distribution.total,
        )
