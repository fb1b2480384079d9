"""What is said about recovering many logs: how far it is, what is damaged, and one line at the end for all the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable

from millstream.broker.log.contents import RecoveryReport

_logger = logging.getLogger(__name__)

PROGRESS_S = 2.0
"""So often a recovery that takes long says how far it is."""

LISTENER_S = 0.1
"""So often a listener is told."""

NAMED_MAX = 5
"""So many logs are named of each kind; a start after a crash may have cut thousands."""


class RecoveryTold:
    """Counts what was recovered, and says no more than a person wants to read."""

    def __init__(self, listener: Callable[[int, int], None] | None = None) -> None:
        """`listener` is told, a few times a second, how many logs are recovered and how many are left."""
        self._listener = listener
        self._listened: float | None = None
        self._logs = 0
        self._scanned_bytes = 0
        self._replayed_bytes = 0
        self._cut: list[RecoveryReport] = []
        self._lost: list[RecoveryReport] = []
        self._last_told: float | None = None

    def note(self, report: RecoveryReport, *, left: int, now: float) -> None:
        """A log was recovered, and so many are left."""
        self._logs += 1
        self._scanned_bytes += report.scanned_bytes
        self._replayed_bytes += report.replayed_bytes
        if report.lost:
            self._lost.append(report)
            if len(self._lost) <= NAMED_MAX:
                place = {"topic": report.topic, "partition": report.partition}
                _logger.error("a log is damaged", extra={**place, "what": str(report)})
        elif report.cut_bytes:
            self._cut.append(report)
        if self._listener is not None and (self._listened is None or now - self._listened >= LISTENER_S):
            self._listened = now
            self._listener(self._logs, left)
        if self._last_told is None:
            self._last_told = now
        elif now - self._last_told >= PROGRESS_S:
            self._last_told = now
            _logger.warning("recovering logs", extra={"done": self._logs, "left": left})

    def sum_up(self) -> None:
        """Say what there is to say of all of them, in one line."""
        if not self._logs:
            return
        extra: dict[str, object] = {
            "logs": self._logs,
            "scanned_bytes": self._scanned_bytes,
            "replayed_bytes": self._replayed_bytes,
        }
        for word, reports in (("cut", self._cut), ("damaged", self._lost)):
            if reports:
                extra |= {word: len(reports), f"{word}_logs": _named(reports)}
        level = logging.ERROR if self._lost else logging.WARNING if self._cut else logging.INFO
        _logger.log(level, "recovered logs", extra=extra)


def _named(reports: list[RecoveryReport]) -> str:
    """The first few, each with what happened to it."""
    more = len(reports) - NAMED_MAX
    return " | ".join(map(str, reports[:NAMED_MAX])) + (f" | and {more} more" if more > 0 else "")
