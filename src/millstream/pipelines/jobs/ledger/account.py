"""Account for the messages of one queue: fold its events into one outcome per offset. Pure: no I/O, no Spark.

The fold is independent of the broker's. It knows only which outcome each event means, and compares the result with the
windows that the broker recorded: every message that a window calls done must have ended in an event before it.

    eligible     messages from where the queue started up to the cut
    lost         eligible, without an event that ended it, and not in the window
    duplicated   accepted twice, or leased after it was accepted, without a seek or a redrive in between
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millstream.broker.subscriptions.frame import LEDGER_OFF, LEDGER_ON, LedgerWindow, read_window
from millstream.broker.subscriptions.lease import LOST_REASON
from millstream.core.ids import OffsetRange
from millstream.core.subscription import EXACTLY_ONCE
from millstream.protocol.records.kernels.compiled import compiled

UNSEEN, WAITING, ACCEPTED, DEAD_LETTERED, FILTERED, SKIPPED, EXPIRED, DROPPED, ABSENT, UNRECORDED, LOST = range(11)
"""The outcomes. `UNRECORDED` ended while the queue had no ledger; `UNSEEN` was not scanned."""

SCANNED: Final = 12
ACQUIRED: Final = 13
REVIVED: Final = 14
SOUGHT: Final = 15
WINDOW: Final = 16
STARTED: Final = 17
DELETED: Final = 18
NOTHING: Final = 19

CODES: Final = {
    "accepted": ACCEPTED,
    "dead_lettered": DEAD_LETTERED,
    "filtered": FILTERED,
    "retention_cut": EXPIRED,
    "dropped": DROPPED,
    "absent": ABSENT,
    "scanned": SCANNED,
    "acquired": ACQUIRED,
    "revived": REVIVED,
    "sought": SOUGHT,
    "window": WINDOW,
    "start": STARTED,
    "deleted": DELETED,
}
"""The events that change an outcome, or are compared with it. Those below 12 are outcomes themselves."""

COLUMNS: Final = (
    *("kind", "offset", "end_offset", "sequence", "row", "state_offset", "reason", "window", "timestamp"),
    *("letter_topic", "letter_partition", "letter_offset"),
)
FINDINGS_MAX: Final = 1000
"""How many ranges of a kind are named for one queue; all of them are counted."""

Outcomes = npt.NDArray[np.uint8]


@compiled
def apply_events(
    codes: npt.NDArray[np.uint8],
    starts: npt.NDArray[np.int64],
    ends: npt.NDArray[np.int64],
    outcomes: npt.NDArray[np.uint8],
    duplicated: npt.NDArray[np.uint8],
    base: int,
) -> None:
    """Apply events other than windows, in order, to the outcomes of the offsets from `base` on."""
    size = len(outcomes)
    for at in range(len(codes)):
        code = codes[at]
        start = min(max(starts[at] - base, 0), size)
        end = min(max(ends[at] - base, 0), size)
        if code == 2:
            for place in range(start, end):
                if outcomes[place] == 2:
                    duplicated[place] = 1
                outcomes[place] = 2
        elif code == 6:
            for place in range(start, end):
                if outcomes[place] <= 1:
                    outcomes[place] = 6
        elif code < 12:
            for place in range(start, end):
                outcomes[place] = code
        elif code == 12 or code == 14:
            for place in range(start, end):
                outcomes[place] = 1
        elif code == 13:
            for place in range(start, end):
                if outcomes[place] == 2:
                    duplicated[place] = 1
        elif code == 15:
            for place in range(start):
                if outcomes[place] <= 1:
                    outcomes[place] = 5
            for place in range(start, size):
                outcomes[place] = 0
        elif code == 18:
            for place in range(size):
                if outcomes[place] == 1:
                    outcomes[place] = 5


class Finding(NamedTuple):
    """A range of messages that does not add up, or events that are missing."""

    kind: str
    """lost, duplicated, expired, unfinished, unreadable or missing_events."""
    start: int
    end: int
    detail: str


class Unreadable(NamedTuple):
    """Offsets of which the log no longer shows whether they hold messages; the end is exclusive."""

    start: int
    end: int
    reason: str


@dataclass
class Account:
    """The outcome of every message of a queue, computed from its events."""

    base: int
    size: int
    sequence: int = -1
    """The number of the last frame; -1 if the next one may have any."""
    delivery: str = ""
    isolation: str = ""
    dead_letter_topic: str = ""
    start: int | None = None
    """The first offset of the queue; None if the queue is older than the ledger."""
    scanned: int = 0
    """The offset that the scan had reached in the last window."""
    is_deleted: bool = False
    letters: dict[int, tuple[str, int, int]] = field(default_factory=dict)
    """The position of the last letter of each dead-lettered message."""
    findings: list[Finding] = field(default_factory=list)
    counted: dict[str, int] = field(default_factory=dict)
    """How many messages the findings of each kind concern, including those not listed."""

    def __post_init__(self) -> None:
        self._outcomes: Outcomes = np.zeros(self.size, np.uint8)
        self._duplicated: Outcomes = np.zeros(self.size, np.uint8)
        self._low = self.base
        self._is_on = False
        # Missing frames since the last window: the row of the batch before which they are missing, and their numbers.
        self._gaps: list[tuple[int, str]] = []

    @property
    def outcomes(self) -> Outcomes:
        """The outcome of each offset from `base` on."""
        return self._outcomes

    def take(self, events: pa.Table | pa.RecordBatch) -> None:
        """Apply events of the queue, which are in the order in which they were appended."""
        if not events.num_rows:
            return
        codes = _codes(events)
        starts, ends, sequences = (_integers(events, name) for name in ("offset", "end_offset", "sequence"))
        self._check_sequences(codes, sequences)
        self._note_lost_letters(events, codes)
        self._note_letters(events, codes, starts)
        done = 0
        for at in np.flatnonzero((codes == WINDOW) | (codes == STARTED) | (codes == DELETED)).tolist():
            self._apply(codes[done:at], starts[done:at], ends[done:at])
            self._apply_one(events, at, int(codes[at]), int(starts[at]))
            done = at + 1
        self._apply(codes[done:], starts[done:], ends[done:])
        self._gaps = [(-1, text) for _at, text in self._gaps]

    def _apply(self, codes: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64], ends: npt.NDArray[np.int64]) -> None:
        relevant = codes != NOTHING
        codes, starts, ends = codes[relevant], starts[relevant], ends[relevant]
        if len(codes):
            self._low = min(self._low, int(starts.min()))
            apply_events(codes, starts, ends, self._outcomes, self._duplicated, self.base)

    def _apply_one(self, events: pa.Table, at: int, code: int, offset: int) -> None:
        if code == WINDOW:
            reason = events.column("reason")[at].as_py() or ""
            gaps = [text for before, text in self._gaps if before <= at]
            self._gaps = [(before, text) for before, text in self._gaps if before > at]
            self._check_window(read_window(events.column("window")[at].as_py()), offset, reason, gaps)
        elif code == STARTED:
            # A queue that was recreated continues elsewhere, like one that was moved.
            self._is_on, self.is_deleted = True, False
            if self.start is None and not self._outcomes.any():
                self.start = offset
                self._outcomes[: max(0, min(offset - self.base, self.size))] = UNRECORDED
            else:
                self._apply(np.array([SOUGHT], np.uint8), np.array([offset]), np.array([offset]))
        else:
            self.is_deleted = True
            self.sequence = -1
            self._apply(np.array([DELETED], np.uint8), np.array([0]), np.array([0]))

    # -- what must not be missing -------------------------------------------------------------------------------

    def _check_sequences(self, codes: npt.NDArray[np.uint8], sequences: npt.NDArray[np.int64]) -> None:
        """Find frames that are missing between two others."""
        numbered = codes != DELETED
        # A queue that was deleted restarts its numbering.
        resets = np.concatenate(([0], np.flatnonzero(~numbered) + 1))
        for first, after in zip(resets.tolist(), [*resets[1:].tolist(), len(codes)], strict=True):
            part = sequences[first:after][numbered[first:after]]
            if not len(part):
                continue
            before = -1 if first else self.sequence
            known = part if before < 0 else np.concatenate(([before], part))
            rows = np.flatnonzero(numbered[first:after]) + first
            for at in np.flatnonzero(np.diff(known) > 1).tolist():
                row = int(rows[at if before >= 0 else at + 1])
                self._gaps.append((row, f"frames {known[at] + 1} to {known[at + 1] - 1}"))
            if (np.diff(known) < 0).any():
                self._add_finding("missing_events", 0, 0, "the frames of the queue are not in order")
            self.sequence = int(part[-1])

    def _check_window(self, window: LedgerWindow, end: int, reason: str, gaps: list[str]) -> None:
        """Compare the outcomes with the messages that the queue itself recorded as unfinished."""
        self.delivery, self.isolation = window.delivery, window.isolation
        self.dead_letter_topic = window.dead_letter_topic
        self.scanned = end
        ranges = window.unfinished()
        was_on, self._is_on = self._is_on, reason != LEDGER_OFF
        low = min([self._low, end, *ranges[:1, 0].tolist()])
        first, last = max(0, low - self.base), max(0, min(end - self.base, self.size))
        if first < last:
            self._compare(first, last, ranges, gaps, is_known=was_on and reason != LEDGER_ON)
        self._low = int(ranges[0, 0]) if len(ranges) else end

    def _compare(
        self, first: int, last: int, ranges: npt.NDArray[np.int64], gaps: list[str], *, is_known: bool
    ) -> None:
        outcomes = self._outcomes[first:last]
        unfinished = _marked(ranges - (self.base + first), last - first)
        ended = ~unfinished & (outcomes <= WAITING)
        if ended.any():
            if is_known:
                missing = f": {', '.join(gaps)} of the queue are missing" if gaps else ""
                text = f"the queue has finished it, but no event records the outcome{missing}"
                self._add_findings("lost", ended, first, text)
                outcomes[ended] = LOST
            else:
                outcomes[ended] = UNRECORDED
        elif is_known:
            for gap in gaps:
                self._add_finding(
                    "missing_events", 0, 0, f"{gap} of the queue are missing; every message is accounted for"
                )
        undone = unfinished & (outcomes > WAITING)
        if undone.any():
            if is_known:
                self._add_findings("unfinished", undone, first, "an event ended it, but the queue still has it")
            outcomes[undone] = WAITING
        outcomes[unfinished & (outcomes == UNSEEN)] = WAITING

    def _note_lost_letters(self, events: pa.Table | pa.RecordBatch, codes: npt.NDArray[np.uint8]) -> None:
        """A message that the log no longer had when its letter was to be written has expired."""
        if (codes == DROPPED).any():
            lost = pc.fill_null(pc.equal(events.column("reason"), LOST_REASON), False).to_numpy(zero_copy_only=False)
            codes[(codes == DROPPED) & lost] = EXPIRED

    def _note_letters(
        self, events: pa.Table | pa.RecordBatch, codes: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64]
    ) -> None:
        for at in np.flatnonzero(codes == DEAD_LETTERED).tolist():
            topic, partition, offset = (
                events.column(name)[at].as_py() for name in ("letter_topic", "letter_partition", "letter_offset")
            )
            if topic and self.base <= starts[at] < self.base + self.size:
                self.letters[int(starts[at])] = (topic, partition, offset)

    # -- the end ------------------------------------------------------------------------------------------------

    def close(
        self,
        present: Iterable[OffsetRange] | None,
        *,
        first: int,
        cut: int,
        log_start: int,
        unreadable: Iterable[Unreadable] = (),
    ) -> None:
        """Compare with the messages that the log and the lake have; offsets outside [first, cut) do not count.

        `present` has the ranges of committed messages from `log_start` on; None if only the ledger has them.
        """
        for unreadable_range in unreadable:
            self._note_unreadable(
                max(unreadable_range.start, first, self.base),
                min(unreadable_range.end, cut, self.base + self.size),
                unreadable_range.reason,
            )
        if present is not None:
            self._compare_with_log(present, cut, log_start)
        outcomes = self._outcomes
        begin, after = (max(0, min(offset - self.base, self.size)) for offset in (first, cut))
        outcomes[:begin] = UNRECORDED
        outcomes[after:] = UNRECORDED
        if self.delivery == EXACTLY_ONCE:
            again = (self._duplicated == 1) & (outcomes != UNRECORDED)
            self._add_findings("duplicated", again, 0, "it was accepted or leased again after it had been accepted")
        self._add_findings("expired", outcomes == EXPIRED, 0, "retention deleted it before it was accepted")

    def _compare_with_log(self, present: Iterable[OffsetRange], cut: int, log_start: int) -> None:
        outcomes = self._outcomes
        begin = max(0, min(log_start - self.base, self.size))
        after = max(0, min(cut - self.base, self.size))
        if begin >= after:
            return
        ranges = np.array([(offset_range.start, offset_range.end) for offset_range in present], np.int64).reshape(-1, 2)
        is_present = _marked(ranges - self.base, self.size)[begin:after]
        part = outcomes[begin:after]
        wrong = is_present & (part == ABSENT)
        if wrong.any():
            self._add_findings("lost", wrong, begin, "the ledger records no message here, but the log has one")
            part[wrong] = LOST
        part[is_present & (part == UNSEEN)] = WAITING
        part[~is_present & (part == UNSEEN)] = ABSENT

    def _note_unreadable(self, start: int, end: int, reason: str) -> None:
        """Count messages as lost that the log no longer has, unless an event records their outcome.

        The queue records as absent what it could not read either.
        """
        if start >= end:
            return
        self._add_finding("unreadable", start, end, f"{reason}, so the ledger cannot be compared with the log here")
        part = self._outcomes[start - self.base : end - self.base]
        unknown = (part == UNSEEN) | (part == ABSENT)
        self._add_findings("lost", unknown, start - self.base, f"{reason}, and no event records its outcome")
        part[unknown] = LOST

    def count_lost_letters(self, missing: Sequence[int]) -> None:
        """Count messages as lost whose letters are not where they should be."""
        for offset in missing:
            place = offset - self.base
            if 0 <= place < self.size and self._outcomes[place] == DEAD_LETTERED:
                self._outcomes[place] = LOST
                topic, partition, at = self.letters[offset]
                detail = f"its dead letter is not at {topic}/{partition}@{at}"
                self._add_finding("lost", offset, offset + 1, detail)

    def totals(self) -> dict[str, int]:
        counts = np.bincount(self._outcomes, minlength=LOST + 1).tolist()
        by_name = {
            "accepted": counts[ACCEPTED],
            "dead_lettered": counts[DEAD_LETTERED],
            "filtered": counts[FILTERED],
            "skipped": counts[SKIPPED] + counts[DROPPED],
            "waiting": counts[WAITING],
            "expired": counts[EXPIRED],
            "lost": counts[LOST],
        }
        return {"published": sum(by_name.values()), **by_name, "dropped": counts[DROPPED]} | {
            "duplicated": self.counted.get("duplicated", 0)
        }

    def _add_findings(self, kind: str, places: npt.NDArray[np.bool_], first: int, detail: str) -> None:
        edges = np.flatnonzero(np.diff(np.concatenate(([False], places, [False])).astype(np.int8)))
        for start, end in (edges.reshape(-1, 2) + (self.base + first)).tolist():
            self._add_finding(kind, start, end, detail)

    def _add_finding(self, kind: str, start: int, end: int, detail: str) -> None:
        self.counted[kind] = self.counted.get(kind, 0) + max(end - start, 0)
        if sum(finding.kind == kind for finding in self.findings[-FINDINGS_MAX:]) < FINDINGS_MAX:
            self.findings.append(Finding(kind, start, end, detail))


def _codes(events: Any) -> npt.NDArray[np.uint8]:
    kinds = events.column("kind")
    encoded = (kinds.combine_chunks() if isinstance(kinds, pa.ChunkedArray) else kinds).dictionary_encode()
    codes = np.array([CODES.get(kind, NOTHING) for kind in encoded.dictionary.to_pylist()], np.uint8)
    return np.asarray(codes[encoded.indices.to_numpy(zero_copy_only=False)], np.uint8)


def _integers(events: Any, name: str) -> npt.NDArray[np.int64]:
    column = pc.fill_null(events.column(name), 0)
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return np.asarray(column.to_numpy(zero_copy_only=False), np.int64)


def _marked(ranges: npt.NDArray[np.int64], size: int) -> npt.NDArray[np.bool_]:
    """Return which positions below a size are in the ranges, which do not overlap."""
    edges = np.zeros(size + 1, np.int32)
    bounds = np.clip(ranges, 0, size)
    np.add.at(edges, bounds[:, 0], 1)
    np.add.at(edges, bounds[:, 1], -1)
    return np.cumsum(edges[:size]) > 0
