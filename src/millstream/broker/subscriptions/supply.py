"""Find the messages to deliver next, oldest first.

Messages become available in two ways. New ones are found by advancing through the window; the position reached is
`fresh`, which never goes back. Returned ones (failed, expired, no longer delayed) lie before it and are found through
hints. An acquisition therefore never searches the same offsets twice, however long the window is. Hints are ranges in
which messages may be available; `take` checks the messages themselves.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from heapq import heappop, heappush
from typing import Final, NamedTuple

import numpy as np

from millstream.broker.subscriptions.columns import AVAILABLE, BLOCKED, Stragglers, Window
from millstream.broker.subscriptions.fold import Fold

NO_KEY: Final = 0
_CONSUMED_MAX: Final = 64
_GAP_MAX: Final = 64
_SPAN_MAX: Final = 2000


class KeyOrder:
    """The keys of the window's messages, and which of them are in use.

    A key is in use from the time that one of its messages is leased or next in line until that message is done or
    rejected. Later messages of the key are blocked in the order of their offsets; a delayed message queues up when it
    is due. Keys are known by a 64-bit hash. 0 means no key, and messages without a key are never blocked.

    After a restart the keys are read from the log again: first those of messages that hold their key, wherever they
    are, which determines what is blocked; then the others in the order of their offsets, as far as messages are
    demanded.
    """

    __slots__ = ("_base", "_heads", "_holder_keys", "_holders_end", "_keys", "_unread_holders", "_waiting", "is_ready")

    def __init__(self, start: int, holding: Iterable[tuple[int, int]] = ()) -> None:
        """Start with no keys known from an offset on; `holding` are the ranges of messages that hold their key."""
        self._keys = array("q")
        self._base = start
        # The keys of holders beyond the known ones, and the ranges of holders still to be read, the last first.
        self._holder_keys: dict[int, int] = {}
        self._unread_holders = sorted(holding, reverse=True)
        self._holders_end = self._unread_holders[0][1] + 1 if self._unread_holders else 0
        # By key: the message whose turn it is; and behind it, the index of the next in this array, and all that queued
        # up.
        self._heads: dict[int, int] = {}
        self._waiting: dict[int, array[int]] = {}
        self.is_ready = False
        """Whether all messages that hold their key have entered."""

    @property
    def next_offset(self) -> int:
        """The offset whose key is learned next."""
        return self._base + len(self._keys)

    @property
    def next_scan_offset(self) -> int:
        """Return the offset from which the log must be read."""
        return self._unread_holders[-1][0] if self._unread_holders else self.next_offset

    @property
    def has_unread_holders(self) -> bool:
        """Return whether holders must be read first."""
        return bool(self._unread_holders)

    @property
    def scan_offsets_max(self) -> int:
        """How many offsets to read at once: holders that lie close together."""
        first, end = self._unread_holders[-1]
        for begin, last in reversed(self._unread_holders):
            if begin - end > _GAP_MAX or end - first > _SPAN_MAX:
                break
            end = last
        return end - first + 1

    @property
    def in_use(self) -> int:
        return len(self._heads)

    def learn(self, keys: bytes) -> None:
        """Add the keys of the following messages, 8 bytes each."""
        self._keys.frombytes(keys)
        if self._holder_keys and not self._unread_holders and self._holders_end <= self.next_offset:
            self._holder_keys = {}

    def learn_holders(self, first: int, keys: Sequence[int]) -> None:
        """Add the keys of holders in a range of the log; holders before it have no key."""
        after = first + len(keys)
        while self._unread_holders and self._unread_holders[-1][0] < after:
            begin, last = self._unread_holders.pop()
            for offset in range(begin, min(last + 1, after)):
                self._holder_keys[offset] = keys[offset - first] if offset >= first else NO_KEY
            if last >= after:
                self._unread_holders.append((after, last))

    def trim(self, base: int) -> None:
        """Forget the keys of messages before an offset."""
        if base > self._base:
            del self._keys[: base - self._base]
            self._base = base

    def key_of(self, offset: int) -> int:
        """Return the key of a message in the window that holds its key or has been reached."""
        index = offset - self._base
        return self._keys[index] if index < len(self._keys) else self._holder_keys[offset]

    def keys(self, first: int, last: int) -> array[int]:
        return self._keys[first - self._base : last + 1 - self._base]

    def try_enter(self, key: int, offset: int) -> bool:
        """Make a message ready, or queue it behind its key; return whether it is ready."""
        if key == NO_KEY:
            return True
        head = self._heads.setdefault(key, offset)
        if head == offset:
            return True
        waiting = self._waiting.get(key)
        if waiting is None:
            self._waiting[key] = array("q", (1, offset))
        else:
            waiting.append(offset)
        return False

    def head_of(self, key: int) -> int | None:
        """Return the message whose turn it is for a key."""
        return self._heads.get(key)

    def insert_waiting(self, key: int, offset: int) -> None:
        """Queue a message behind its key, before all later ones."""
        waiting = self._waiting.get(key)
        if waiting is None:
            self._waiting[key] = array("q", (1, offset))
        else:
            insort(waiting, offset, waiting[0])

    def set_head(self, key: int, offset: int) -> None:
        """Make a waiting message the head of its key."""
        self._heads[key] = offset

    def leave(self, key: int, offset: int) -> bool:
        """Free the key of a message; return whether it had its turn, so that another may follow."""
        if key == NO_KEY or self._heads.get(key) != offset:
            return False
        del self._heads[key]
        return True

    def next_waiting(self, key: int) -> int | None:
        """Remove and return the message that has waited longest behind a key; the caller decides whether it enters."""
        waiting = self._waiting.get(key)
        if waiting is None:
            return None
        place = waiting[0]
        offset = waiting[place]
        if place + 1 == len(waiting):
            del self._waiting[key]
        elif place > _CONSUMED_MAX and place > len(waiting) >> 1:
            del waiting[1 : place + 1]
            waiting[0] = 1
        else:
            waiting[0] = place + 1
        return offset

    def keys_before(self, offset: int) -> list[tuple[int, int]]:
        """Return the keys whose current message is before an offset, with that message."""
        return [(key, head) for key, head in self._heads.items() if head < offset]


DueRuns = Callable[[int, int], Iterable[tuple[int, int, int]]]
"""Yields the messages of a range that wait for a time, as runs: first, last, due."""

NEVER_MS: Final = 2**63 - 1

_SHIFTS: Final = (0, 11, 17)
"""Buckets of 1 ms, 2 seconds and 2 minutes."""

_NEAR_MS: Final = 1 << _SHIFTS[1]

_FAR_MS: Final = 1 << _SHIFTS[2]


class DueIndex:
    """Hints by time, in three levels of buckets."""

    __slots__ = ("_heaps", "_hints", "_now_ms", "_runs", "next_ms")

    def __init__(self, runs: DueRuns) -> None:
        self._runs = runs
        self._hints: list[dict[int, array[int]]] = [{} for _ in _SHIFTS]
        self._heaps: list[list[int]] = [[] for _ in _SHIFTS]
        self._now_ms = 0
        self.next_ms = NEVER_MS
        """When to ask again: never too late, and too early only to split a coarse bucket."""

    def add(self, first: int, last: int, due_ms: int) -> None:
        """Add messages that are due at a time."""
        away_ms = due_ms - self._now_ms
        level = 0 if away_ms < _NEAR_MS else 1 if away_ms < _FAR_MS else 2
        bucket = due_ms >> _SHIFTS[level]
        hints = self._hints[level].get(bucket)
        if hints is not None and hints[-1] + 1 == first:
            hints[-1] = last
        else:
            self._add_hint(level, first, last, bucket)

    def pop(self, now_ms: int) -> list[tuple[int, int]]:
        """Remove and return the ranges in which messages may be due by now."""
        self._now_ms = max(self._now_ms, now_ms)
        due: list[tuple[int, int]] = []
        for level in (2, 1):
            heap = self._heaps[level]
            while heap and heap[0] << _SHIFTS[level] <= now_ms:
                self._split_bucket(level, heappop(heap))
        heap = self._heaps[0]
        while heap and heap[0] <= now_ms:
            hints = self._hints[0].pop(heappop(heap))
            due.extend(zip(hints[::2], hints[1::2], strict=True))
        times = [heap[0] << shift for heap, shift in zip(self._heaps, _SHIFTS, strict=True) if heap]
        self.next_ms = min(times, default=NEVER_MS)
        return due

    def _split_bucket(self, level: int, bucket: int) -> None:
        hints = self._hints[level].pop(bucket)
        for first, last in zip(hints[::2], hints[1::2], strict=True):
            for run_first, run_last, due_ms in self._runs(first, last):
                # All others have got another time since, and their own hint.
                if due_ms >> _SHIFTS[level] == bucket:
                    finer = level - 1 if due_ms >> _SHIFTS[level - 1] > self._now_ms >> _SHIFTS[level - 1] else 0
                    self._add_hint(finer, run_first, run_last, due_ms >> _SHIFTS[finer])

    def _add_hint(self, level: int, first: int, last: int, bucket: int) -> None:
        hints = self._hints[level].get(bucket)
        if hints is None:
            self._hints[level][bucket] = array("q", (first, last))
            heappush(self._heaps[level], bucket)
            self.next_ms = min(self.next_ms, bucket << _SHIFTS[level])
        elif hints[-1] + 1 == first:
            hints[-1] = last
        else:
            hints.append(first)
            hints.append(last)


class Run(NamedTuple):
    """Consecutive messages that can be leased, all with the same number of attempts so far."""

    first: int
    last: int
    attempts: int


class Supply:
    """The available messages in the order of delivery."""

    __slots__ = ("_fold", "_fresh", "_hints", "order")

    def __init__(self, fold: Fold, order: KeyOrder | None) -> None:
        self._fold = fold
        self._fresh = fold.window.start
        self._hints: list[tuple[int, int]] = []
        self.order = order

    @property
    def fresh(self) -> int:
        """The first offset that was not considered yet."""
        return max(self._fresh, self._fold.window.start)

    def add_returned(self, first: int, last: int) -> None:
        """Add messages that are available again; in an ordered queue it is their turn."""
        last = min(last, self.fresh - 1)
        if first <= last:
            heappush(self._hints, (first, last))

    def peek(self, until: int) -> int | None:
        """Return the oldest deliverable message before an offset."""
        hints = self._hints
        while hints and hints[0][0] < until:
            first, last = hints[0]
            run = self._find_run(first, min(last, until - 1), 1)
            if run is not None:
                return run.first
            heappop(hints)
            if last >= until:
                heappush(hints, (until, last))
        while True:
            run = self._fresh_run(1, until)
            if run is None or self._try_enter(run.first):
                return None if run is None else run.first
            self._fresh = run.first + 1

    def take(self, count: int, until: int) -> list[Run]:
        """Return up to `count` messages before an offset; the caller leases them at once."""
        runs: list[Run] = []
        if self._hints:
            count -= self._take_hinted(count, until, runs)
        while count > 0:
            run = self._fresh_run(count, until)
            if run is None:
                break
            self._fresh = run.last + 1
            if self.order is None:
                runs.append(run)
                count -= run.last - run.first + 1
            else:
                count -= self._take_in_order(self.order, run, runs)
        return runs

    def _take_hinted(self, count: int, until: int, runs: list[Run]) -> int:
        taken = 0
        hints = self._hints
        # Hints may overlap. Messages taken by this call are not leased yet, so they are recognized by their offset.
        floor = 0
        while hints and taken < count and hints[0][0] < until:
            first, last = heappop(hints)
            run = self._find_run(max(first, floor), min(last, until - 1), count - taken)
            if run is None:
                if last >= until:
                    heappush(hints, (until, last))
                continue
            runs.append(run)
            taken += run.last - run.first + 1
            floor = run.last + 1
            if floor <= last:
                heappush(hints, (floor, last))
        return taken

    def _find_run(self, first: int, last: int, count: int) -> Run | None:
        for columns, start, end in self._fold.parts(first, last):
            run = columns.find_run(start, end, AVAILABLE, count)
            if run is not None:
                return _to_run(columns, *run)
        return None

    def _fresh_run(self, count: int, until: int) -> Run | None:
        window = self._fold.window
        base = window.base
        fresh = self._fresh if self._fresh > window.start else window.start
        end = base + len(window.states)
        if until < end:
            end = until
        if self.order is not None and self.order.next_offset < end:
            # The keys of later messages are not known yet.
            end = self.order.next_offset
        if fresh >= end:
            return None
        run = window.find_run(fresh - base, end - base, AVAILABLE, count)
        if run is None:
            self._fresh = end
            return None
        start, stop = run
        self._fresh = base + start
        return Run(base + start, base + stop - 1, window.attempts[start])

    # -- ordered by key --------------------------------------------------------------------------------------

    def _try_enter(self, offset: int) -> bool:
        """Whether it is the turn of a new message; if so, it becomes the head of its key."""
        order = self.order
        if order is None:
            return True
        if order.try_enter(order.key_of(offset), offset):
            return True
        self.block(offset)
        return False

    def block(self, offset: int) -> None:
        """Mark a message as waiting behind its key."""
        place = self._fold.place(offset)
        if place is not None:
            place[0].states[place[1]] = BLOCKED
            self._fold.counts[AVAILABLE] -= 1
            self._fold.counts[BLOCKED] += 1

    def admit_key_holders(self, order: KeyOrder) -> None:
        """Determine whose turn it is once the keys of leased and retried messages are known; then admit stragglers."""
        fold = self._fold
        for run in fold.waiting_runs(0, fold.window.end):
            if run.attempt:
                for offset in range(run.first, run.last + 1):
                    order.try_enter(self.key_of(order, offset), offset)
        order.is_ready = True
        stragglers = fold.stragglers
        for index in np.flatnonzero(np.frombuffer(stragglers.states, np.uint8) == AVAILABLE).tolist():
            self.admit(order, stragglers.offsets[index], stragglers.keys[index])

    def admit(self, order: KeyOrder, offset: int, key: int) -> None:
        """Admit a message before `fresh` that is available for the first time."""
        if order.try_enter(key, offset):
            self.add_returned(offset, offset)
        else:
            self.block(offset)

    def revive(self, order: KeyOrder, offset: int, key: int) -> None:
        """Admit a revived message, ahead of all later undelivered ones of its key."""
        if offset >= self.fresh:
            # It is found with the new messages.
            return
        head = order.head_of(key)
        place = None if head is None else self._fold.place(head)
        if key == NO_KEY or head is None:
            order.try_enter(key, offset)
        elif head > offset and place is not None and place[0].states[place[1]] == AVAILABLE:
            self.block(head)
            order.insert_waiting(key, head)
            order.set_head(key, offset)
        else:
            self.block(offset)
            order.insert_waiting(key, offset)
            return
        self.add_returned(offset, offset)

    def key_of(self, order: KeyOrder, offset: int) -> int:
        """Return the hash of the key of an unfinished message."""
        return order.key_of(offset) if offset >= self._fold.window.start else self._fold.stragglers.key_of(offset)

    def _take_in_order(self, order: KeyOrder, run: Run, runs: list[Run]) -> int:
        taken = 0
        first = -1
        for offset, key in enumerate(order.keys(run.first, run.last), run.first):
            if order.try_enter(key, offset):
                taken += 1
                if first < 0:
                    first = offset
                continue
            self.block(offset)
            if first >= 0:
                runs.append(Run(first, offset - 1, run.attempts))
                first = -1
        if first >= 0:
            runs.append(Run(first, run.last, run.attempts))
        return taken


def _to_run(columns: Window | Stragglers, start: int, end: int) -> Run:
    first = columns.offset_at(start)
    return Run(first, first + end - start - 1, columns.attempts[start])
