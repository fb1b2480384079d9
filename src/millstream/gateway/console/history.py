"""The last hour in numbers, sampled by the gateway: what the small charts show.

Totals and the busiest topics are sampled every ten seconds, all topics and subscriptions every minute, or less often
where that would cost more than a hundredth of the gateway's processor time. Memory is bounded by the number of series.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, Final, NamedTuple, TypeVar

from millstream.client.admin.browse import list_or_nothing, node_sums
from millstream.client.admin.subscriptions import summary_of
from millstream.core.errors import MillstreamError
from millstream.core.subscription import OWN_PREFIX
from millstream.core.tasks import gather_or_cancel
from millstream.gateway.api.services import Services
from millstream.protocol.private.browse_messages import PAGE_MAX, ListedTopic, ListTopicsRequest

T = TypeVar("T")

_logger = logging.getLogger(__name__)

SAMPLE_S: Final = 10.0
FIRST_S: Final = 2.0
FULL_S: Final = 60.0
HOUR_SAMPLES: Final = 360
MINUTE_SAMPLES: Final = 60
TOP_TOPICS: Final = 20
SERIES_MAX: Final = 10_000
RECENT_MAX: Final = 200
RECENT_S: Final = 60.0
"""A page that was not refreshed for so long is closed, or hidden."""
RECENT_S_MIN: Final = 1.0
"""The shortest time for which an answer is shared, also with those who have waited for it."""
RECENT_S_MAX: Final = 300.0
"""The longest time for which an answer is shared."""
COST_MAX: Final = 0.01
"""The share of processor time that sampling everything may take, and that refreshing all pages may take together."""


class Counters(NamedTuple):
    """What a node has counted since it started."""

    records_in: int
    bytes_in: int
    bytes_out: int


class Rates(NamedTuple):
    """Per second."""

    records_in: float
    bytes_in: float
    bytes_out: float


class Series:
    """Rates over the last hour, from counters that restart at 0 with their node."""

    __slots__ = ("_at", "_last", "rates")

    def __init__(self, samples: int) -> None:
        self.rates: deque[Rates | None] = deque(maxlen=samples)
        self._last: Counters | None = None
        self._at = 0.0

    def add(self, counted: Counters, at: float) -> None:
        """Add a sample."""
        last, elapsed = self._last, at - self._at
        self._last, self._at = counted, at
        if last is None or elapsed <= 0 or any(now < before for now, before in zip(counted, last, strict=True)):
            self.rates.append(None)
            return
        self.rates.append(Rates(*((now - before) / elapsed for now, before in zip(counted, last, strict=True))))

    @property
    def now(self) -> Rates | None:
        """The last rates that are known."""
        return self.rates[-1] if self.rates else None

    def shown(self, name: str) -> list[float | None]:
        """Return the values of one rate, oldest first, for a chart of the whole hour."""
        known = [None if one is None else float(getattr(one, name)) for one in self.rates]
        return [None] * ((self.rates.maxlen or 0) - len(known)) + known


class Recent:
    """Answers for pages that refresh automatically, shared by all tabs of a session.

    The more processor time an answer takes and the more pages are open, the longer it is shared, so that all pages
    together take at most a hundredth of the gateway's time. Waiting for a node that does not answer does not count.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, used: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        self._used = used
        self._kept: OrderedDict[tuple[str, str], _Kept] = OrderedDict()

    async def get(self, key: tuple[str, str], ask: Callable[[], Awaitable[T]]) -> T:
        """Return what is known for a session and a page, or ask; those who come meanwhile wait for the answer."""
        now = self._clock()
        kept = self._kept.setdefault(key, _Kept())
        kept.asked_at = now
        self._kept.move_to_end(key)
        for old in [one for one, known in self._kept.items() if known.asked_at < now - RECENT_S]:
            del self._kept[old]
        while len(self._kept) > RECENT_MAX:
            self._kept.popitem(last=False)
        async with kept.lock:
            if kept.until <= self._clock():
                used = self._used()
                kept.value = await ask()
                shared_s = (self._used() - used) / COST_MAX * len(self._kept)
                kept.until = self._clock() + min(RECENT_S_MAX, max(RECENT_S_MIN, shared_s))
            found: T = kept.value
            return found

    def clear(self) -> None:
        """Discard everything, because something was changed."""
        for kept in self._kept.values():
            kept.until = 0.0


class _Kept:
    """One answer; `until` says for how long it is shown."""

    __slots__ = ("asked_at", "lock", "until", "value")

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.asked_at = 0.0
        self.until = 0.0
        self.value: Any = None


class QueueSums(NamedTuple):
    """Over all subscriptions."""

    backlog: int
    leased: int
    dead_lettered: int
    dropped: int


class History:
    """Samples the cluster with the node's own credentials, once the console has been opened."""

    def __init__(self, services: Services, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._services = services
        self._clock = clock
        self.totals = Series(HOUR_SAMPLES)
        self.topics: dict[str, Series] = {}
        """By name: the busiest every ten seconds, the others every minute."""
        self.backlog: deque[float | None] = deque([None] * MINUTE_SAMPLES, maxlen=MINUTE_SAMPLES)
        self.queues: QueueSums | None = None
        self.stored_bytes = 0
        self._top: list[str] = []
        self._full_at = 0.0
        self._samples = 0
        self._pause_s = FULL_S
        self._sampled = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start sampling, if that has not happened yet."""
        if self._task is None:
            self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop sampling."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def sampled(self) -> None:
        """Wait for the next sample."""
        await self._sampled.wait()

    def top(self, number: int) -> list[tuple[str, Rates]]:
        """Return the topics with the most traffic now."""
        busy = ((name, one.now) for name in self._top if (one := self.topics.get(name)) is not None)
        return [(name, rates) for name, rates in busy if rates is not None and any(rates)][:number]

    async def _run(self) -> None:
        while True:
            started = self._clock()
            try:
                await self._sample(started)
            except MillstreamError as error:
                # The charts have a gap.
                _logger.debug("the console's numbers could not be sampled", extra={"error": str(error)})
            self._samples += 1
            self._sampled.set()
            self._sampled = asyncio.Event()
            # Rates need two samples; the second follows at once, for the person who has just come.
            pause_s = SAMPLE_S if self._samples > 1 else FIRST_S
            await asyncio.sleep(max(1.0, pause_s - (self._clock() - started)))

    async def _sample(self, now: float) -> None:
        used = time.thread_time()
        is_full = now - self._full_at >= self._pause_s or self._samples < 2
        client = self._services.client
        nodes = sorted((await client.metadata([])).nodes)
        request = ListTopicsRequest(names=None if is_full else self._top, limit=PAGE_MAX)
        answers = await gather_or_cancel(list_or_nothing(client, node, request) for node in nodes)
        sums = await node_sums(client)
        self.totals.add(Counters(*(sum(getattr(one, name) for one in sums) for name in Counters._fields)), now)
        self.stored_bytes = sum(one.stored_bytes for one in sums)
        self._add(([one for answer in answers for one in answer.topics]), now, is_full=is_full)
        if is_full:
            await self._sample_queues()
            self._full_at = now
            self._pause_s = max(FULL_S, (time.thread_time() - used) / COST_MAX)

    def _add(self, listed: Iterable[ListedTopic], now: float, *, is_full: bool) -> None:
        found: dict[str, Counters] = {}
        for one in listed:
            known = found.get(one.name, Counters(0, 0, 0))
            found[one.name] = Counters(
                known.records_in + one.records_in, known.bytes_in + one.bytes_in, known.bytes_out + one.bytes_out
            )
        if is_full:
            self.topics = {name: one for name, one in self.topics.items() if name in found}
        for name, counted in found.items():
            series = self.topics.get(name)
            if series is None:
                if len(self.topics) >= SERIES_MAX:
                    continue
                series = self.topics[name] = Series(MINUTE_SAMPLES)
            series.add(counted, now)
        if is_full:
            busy = sorted(
                ((one.now, name) for name, one in self.topics.items() if one.now is not None and any(one.now)),
                key=lambda each: -(each[0].bytes_in + each[0].bytes_out if each[0] else 0),
            )
            self._top = [name for _, name in busy[:TOP_TOPICS]]
            for name in self._top:
                if self.topics[name].rates.maxlen != HOUR_SAMPLES:
                    fine = Series(HOUR_SAMPLES)
                    fine.add(found[name], now)
                    self.topics[name] = fine

    async def _sample_queues(self) -> None:
        described = await self._services.subscriptions.describe(without_silent=True)
        rows = [summary_of(one) for one in described if not one["name"].startswith(OWN_PREFIX)]
        self.queues = QueueSums(*(sum(row[name] for row in rows) for name in QueueSums._fields))
        self.backlog.append(float(self.queues.backlog))
