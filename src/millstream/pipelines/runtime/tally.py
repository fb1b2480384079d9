"""What a pipeline did, in numbers: everything that its steps took, and how fast that was lately."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from millstream.pipelines.jobs.job import Step

WINDOW_S: Final = 60.0
"""How far back the rate looks."""
_SPAN_S_MIN: Final = 1.0
_STEPS_MAX: Final = 1000


class Tally:
    """Sums up the steps of one pipeline."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._lately: deque[tuple[float, int]] = deque(maxlen=_STEPS_MAX)
        self._counts: Counter[str] = Counter()
        self.rows = 0
        self.lag = 0
        self.is_begun = False
        """Whether a step was done, so that the lag is known."""
        self.batches = 0

    def add(self, step: Step) -> None:
        """One more step; one that took nothing is no batch."""
        self.lag = step.lag
        self.is_begun = True
        self._counts.update(step.counts)
        if step.rows:
            self.rows += step.rows
            self.batches += 1
            self._lately.append((self._clock(), step.rows))

    @property
    def counts(self) -> dict[str, int]:
        """The other numbers of all steps together."""
        return dict(self._counts)

    @property
    def rows_per_s(self) -> float:
        """Messages each second, over the last minute or since the beginning."""
        now = self._clock()
        # A copy, since the thread that reports is not the one that adds.
        lately = [one for one in list(self._lately) if one[0] >= now - WINDOW_S]
        since = max(self._began, now - WINDOW_S)
        if len(lately) == _STEPS_MAX:
            since = max(since, lately[0][0])
        return round(sum(rows for _, rows in lately) / max(_SPAN_S_MIN, now - since), 1)
