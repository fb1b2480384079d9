"""The metrics of the last hour, sampled by the gateway for the small charts.

Totals and the busiest topics are sampled every ten seconds, all topics and subscriptions every minute, or less often
where that would cost more than a hundredth of the gateway's processor time. Before the console is first opened,
everything is sampled every minute, or less often where that would cost more than a thousandth. Memory is bounded by the
number of series.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any, Final, Generic, NamedTuple, TypeVar

from millstream.client.admin.browse import list_if_reachable, node_summaries
from millstream.client.admin.groups import SHARE, lag_of_groups
from millstream.client.admin.subscriptions import summary_of
from millstream.core.errors import MillstreamError
from millstream.core.subscription import OWN_PREFIX
from millstream.core.tasks import gather_or_cancel, wait_up_to
from millstream.gateway.api.services import Services
from millstream.protocol.private.browse_messages import PAGE_MAX, ListedTopic, ListTopicsRequest
from millstream.protocol.wire.group_offsets import list_groups

T = TypeVar("T")

_logger = logging.getLogger(__name__)

SAMPLE_S: Final = 10.0
FIRST_S: Final = 2.0
FULL_S: Final = 60.0
HOUR_S: Final = 3600.0
HOUR_SAMPLES: Final = 360
TOP_TOPICS: Final = 20
SERIES_MAX: Final = 10_000
GROUPS_MAX: Final = 1000
"""Groups whose lag is summed."""
RECENT_MAX: Final = 200
RECENT_S: Final = 60.0
"""A page that was not refreshed for so long is closed, or hidden."""
RECENT_S_MIN: Final = 1.0
"""The shortest time for which a response is shared, also with requests that have waited for it."""
RECENT_S_MAX: Final = 300.0
"""The longest time for which a response is shared."""
COST_MAX: Final = 0.01
"""The share of processor time that sampling everything may take, and that refreshing all pages may take together."""
UNVISITED_COST_MAX: Final = 0.001
"""The share that sampling may take before the console is first opened."""


class Counters(NamedTuple):
    records_in: int
    bytes_in: int
    bytes_out: int


class Rates(NamedTuple):
    """Per second."""

    records_in: float
    bytes_in: float
    bytes_out: float


class Samples(Generic[T]):
    """Values of the last hour, each with its time span; equal neighbours are merged."""

    __slots__ = ("_samples",)

    def __init__(self) -> None:
        self._samples: deque[tuple[float, float, T | None]] = deque(maxlen=HOUR_SAMPLES)

    def add(self, value: T | None, begin: float, end: float) -> None:
        if self._samples and self._samples[-1][1:] == (begin, value):
            begin = self._samples.pop()[0]
        self._samples.append((begin, end, value))
        while self._samples[0][1] <= end - HOUR_S:
            self._samples.popleft()

    @property
    def now(self) -> T | None:
        """The last value, if it is known."""
        return self._samples[-1][2] if self._samples else None

    def shown(self) -> list[T | None]:
        """Return a value for every ten seconds of the hour up to the last sample, the oldest first."""
        slots: list[T | None] = [None] * HOUR_SAMPLES
        last = self._samples[-1][1] if self._samples else 0.0
        for begin, end, value in self._samples:
            after = HOUR_SAMPLES - round((last - end) / SAMPLE_S)
            first = max(0, min(after - 1, HOUR_SAMPLES - round((last - begin) / SAMPLE_S)))
            slots[first:after] = [value] * (after - first)
        return slots


class Series:
    """Rates over the last hour, from counters that restart at 0 with their node."""

    __slots__ = ("_at", "_last", "rates")

    def __init__(self) -> None:
        self.rates: Samples[Rates] = Samples()
        self._last: Counters | None = None
        self._at = 0.0

    def add(self, counted: Counters, at: float) -> None:
        last, since, elapsed = self._last, self._at, at - self._at
        self._last, self._at = counted, at
        if last is None:
            return
        pairs = list(zip(counted, last, strict=True))
        is_known = elapsed > 0 and all(now >= before for now, before in pairs)
        self.rates.add(Rates(*((now - before) / elapsed for now, before in pairs)) if is_known else None, since, at)

    @property
    def now(self) -> Rates | None:
        """The last rates that are known."""
        return self.rates.now

    def shown(self, name: str) -> list[float | None]:
        """Return the values of one rate for a chart of the whole hour, the oldest first."""
        return [None if rates is None else float(getattr(rates, name)) for rates in self.rates.shown()]


class ResponseCache:
    """Responses for pages that refresh automatically, shared by all tabs of a session.

    The more processor time a response takes and the more pages are open, the longer it is shared, so that all pages
    together take at most a hundredth of the gateway's time. Waiting for a node that does not respond does not count.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.monotonic, used: Callable[[], float] = time.thread_time
    ) -> None:
        self._clock = clock
        self._used = used
        self._kept: OrderedDict[tuple[str, str], _CachedResponse] = OrderedDict()

    async def get(self, key: tuple[str, str], ask: Callable[[], Awaitable[T]]) -> T:
        """Return the cached response for a session and a page, or ask; concurrent requests wait for one response."""
        now = self._clock()
        cached = self._kept.setdefault(key, _CachedResponse())
        cached.asked_at = now
        self._kept.move_to_end(key)
        for old in [name for name, known in self._kept.items() if known.asked_at < now - RECENT_S]:
            del self._kept[old]
        while len(self._kept) > RECENT_MAX:
            self._kept.popitem(last=False)
        async with cached.lock:
            if cached.until <= self._clock():
                used = self._used()
                cached.value = await ask()
                shared_s = (self._used() - used) / COST_MAX * len(self._kept)
                cached.until = self._clock() + min(RECENT_S_MAX, max(RECENT_S_MIN, shared_s))
            response: T = cached.value
            return response

    def clear(self) -> None:
        """Discard everything, because something was changed."""
        for cached in self._kept.values():
            cached.until = 0.0


class _CachedResponse:
    """A response; `until` says for how long it is shown."""

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
    """Samples the cluster with the node's own credentials."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.totals = Series()
        self.topics: dict[str, Series] = {}
        """The rates of each topic: the busiest every ten seconds, the others every minute."""
        self.backlog: Samples[float] = Samples()
        self.queues: QueueSums | None = None
        self.group_lag: Samples[float] = Samples()
        self._top: list[str] = []
        self._full_at = 0.0
        self._samples = 0
        self._full_cost_s = 0.0
        self._sampled = asyncio.Event()
        self._visited = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start sampling, seldom until the first visit."""
        self._task = asyncio.create_task(self._run())

    def record_visit(self) -> None:
        """Start sampling often, after the first visit."""
        self._visited.set()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def sampled(self) -> None:
        await self._sampled.wait()

    def top(self, number: int) -> list[tuple[str, Rates]]:
        """Return the topics with the most traffic now."""
        now = ((name, topic.now) for name in self._top if (topic := self.topics.get(name)) is not None)
        busy = [(name, rates) for name, rates in now if rates is not None and any(rates)]
        return sorted(busy, key=lambda entry: -(entry[1].bytes_in + entry[1].bytes_out))[:number]

    async def _run(self) -> None:
        await wait_up_to(FULL_S, self._visited)
        while True:
            started = time.monotonic()
            try:
                await self._sample(started)
            except MillstreamError as error:
                # The charts have a gap.
                _logger.debug("the console's numbers could not be sampled", extra={"error": str(error)})
            self._samples += 1
            self._sampled.set()
            self._sampled = asyncio.Event()
            if self._visited.is_set():
                # Rates need two samples; the second follows at once, for the first visitor.
                pause_s = SAMPLE_S if self._samples > 1 else FIRST_S
                await asyncio.sleep(max(1.0, pause_s - (time.monotonic() - started)))
            else:
                await wait_up_to(max(FULL_S, self._full_cost_s / UNVISITED_COST_MAX), self._visited)

    async def _sample(self, now: float) -> None:
        used = time.thread_time()
        pause_s = max(FULL_S, self._full_cost_s / COST_MAX)
        is_full = not self._visited.is_set() or self._samples < 2 or now - self._full_at >= pause_s
        client = self._services.client
        nodes = sorted((await client.metadata([])).nodes)
        request = ListTopicsRequest(names=None if is_full else self._top, limit=PAGE_MAX)
        responses = await gather_or_cancel(list_if_reachable(client, node, request) for node in nodes)
        summaries = await node_summaries(client)
        self.totals.add(
            Counters(*(sum(getattr(summary, name) for summary in summaries) for name in Counters._fields)), now
        )
        self._add(([topic for response in responses for topic in response.topics]), now, is_full=is_full)
        if is_full:
            await self._sample_queues(now)
            self._full_at = now
            self._full_cost_s = time.thread_time() - used

    def _add(self, listed: Iterable[ListedTopic], now: float, *, is_full: bool) -> None:
        counters: dict[str, Counters] = {}
        for topic in listed:
            known = counters.get(topic.name, Counters(0, 0, 0))
            counters[topic.name] = Counters(
                known.records_in + topic.records_in, known.bytes_in + topic.bytes_in, known.bytes_out + topic.bytes_out
            )
        if is_full:
            self.topics = {name: topic for name, topic in self.topics.items() if name in counters}
        for name, counted in counters.items():
            series = self.topics.get(name)
            if series is None:
                if len(self.topics) >= SERIES_MAX:
                    continue
                series = self.topics[name] = Series()
            series.add(counted, now)
        if is_full:
            busy = sorted(
                ((topic.now, name) for name, topic in self.topics.items() if topic.now is not None and any(topic.now)),
                key=lambda row: -(row[0].bytes_in + row[0].bytes_out if row[0] else 0),
            )
            self._top = [name for _, name in busy[:TOP_TOPICS]]

    async def _sample_queues(self, now: float) -> None:
        described = await self._services.subscriptions.describe(without_silent=True)
        rows = [
            summary_of(subscription) for subscription in described if not subscription["name"].startswith(OWN_PREFIX)
        ]
        self.queues = QueueSums(*(sum(row[name] for row in rows) for name in QueueSums._fields))
        since = self._full_at or now - SAMPLE_S
        self.backlog.add(float(self.queues.backlog), since, now)
        groups = [name for name, _state, kind in await list_groups(self._services.client) if kind != SHARE]
        lag = await lag_of_groups(self._services.client, groups[:GROUPS_MAX]) if groups else 0
        self.group_lag.add(float(lag), since, now)
