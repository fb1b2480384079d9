"""Percentiles of measured times, and the schedule that keeps a slow server from hiding its slow responses.

A client that waits for one response before it asks again asks a stalled server less often, and so counts the stall
once. Here every message has a time at which it is meant to be sent, whether or not the ones before it get a response,
and its latency counts from that time: a stall of a second at 1,000 messages/s is a thousand slow messages.
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
    """Evenly spaced intended times, in nanoseconds of the monotonic clock."""

    start_ns: int
    rate_per_s: int
    count: int

    def due_ns(self) -> Times:
        """When each message is meant to be sent."""
        return self.start_ns + np.arange(self.count, dtype=np.int64) * NS_PER_S // self.rate_per_s

    def due_by(self, now_ns: int) -> int:
        """How many messages are meant to be sent by now."""
        if now_ns < self.start_ns:
            return 0
        return min((now_ns - self.start_ns) * self.rate_per_s // NS_PER_S + 1, self.count)

    def due_at(self, index: int) -> int:
        """When one message is meant to be sent."""
        return self.start_ns + index * NS_PER_S // self.rate_per_s

    def latencies_ms(self, done_ns: Times) -> npt.NDArray[np.float64]:
        """From the intended time to `done_ns`; a message that was never done (0) took for ever."""
        late: npt.NDArray[np.float64] = (done_ns - self.due_ns()) / 1e6
        late[done_ns == 0] = np.inf
        return late


def percentile(values: Sequence[float] | npt.NDArray[np.float64], percent: float) -> float:
    """The least of the values that at least this percentage of them do not exceed."""
    if not len(values):
        raise ValueError("no values")
    ordered = np.sort(np.asarray(values, dtype=np.float64))
    rank = int(np.ceil(round(len(ordered) * percent / 100, 9)))
    return float(ordered[max(rank, 1) - 1])
