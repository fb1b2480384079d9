"""Percentiles of latencies, and a schedule that avoids coordinated omission.

A client that waits for a response before it sends the next request sends fewer requests to a stalled server, and so
measures the stall only once. Here every message has a scheduled time, independent of earlier responses, and its latency
is measured from that time: a stall of a second at 1,000 messages/s results in a thousand slow messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Times = npt.NDArray[np.int64]
NS_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Schedule:
    """Evenly spaced scheduled times, in nanoseconds of the monotonic clock."""

    start_ns: int
    rate_per_s: int
    count: int

    def due_ns(self) -> Times:
        """Return the scheduled times of all messages."""
        return self.start_ns + np.arange(self.count, dtype=np.int64) * NS_PER_S // self.rate_per_s

    def due_by(self, now_ns: int) -> int:
        """Return how many messages are due by now."""
        if now_ns < self.start_ns:
            return 0
        return min((now_ns - self.start_ns) * self.rate_per_s // NS_PER_S + 1, self.count)

    def due_at(self, index: int) -> int:
        """Return the scheduled time of one message."""
        return self.start_ns + index * NS_PER_S // self.rate_per_s

    def latencies_ms(self, done_ns: Times) -> npt.NDArray[np.float64]:
        """Return the latencies from the scheduled times to `done_ns`; infinite for messages that were not done (0)."""
        late: npt.NDArray[np.float64] = (done_ns - self.due_ns()) / 1e6
        late[done_ns == 0] = np.inf
        return late


def percentile(values: Sequence[float] | npt.NDArray[np.float64], percent: float) -> float:
    """Return the smallest value that at least this percentage of the values do not exceed."""
    if not len(values):
        raise ValueError("no values")
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    rank = int(np.ceil(round(len(ordered) * percent / 100, 9)))
    return float(ordered[max(rank, 1) - 1])
