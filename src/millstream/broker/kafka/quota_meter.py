"""Enforce client quotas as Kafka does: a client over its quota gets a throttle time, and its connection is muted for
that time.

A quota is a token bucket that fills with `rate` bytes per second and holds ten seconds' worth, the window over which
Kafka measures rates too. A request takes its bytes even if the bucket does not have them. If the bucket is then in
debt, the client waits until the debt is refilled: the response says so (`throttle_time_ms`, which clients heed by
themselves) and the connection is muted for that time.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final
from weakref import WeakValueDictionary

from millstream.broker.cluster.declared_state import ClientQuotas
from millstream.broker.kafka.api import ClientInfo
from millstream.core.metric import Metric, Sample, gauge
from millstream.core.quota import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE, Scope

WINDOW_S: Final = 10.0
"""How many seconds' worth of bytes a client may take at once after it was silent."""

THROTTLE_MS_MAX: Final = 300_000
"""No client is muted for longer, however large its debt, or it would consider the broker dead."""

CLIENTS_MAX: Final = 10_000
"""The number of users' client ids that are remembered; beyond it, the oldest one starts over."""


class Bucket:
    """The bytes that the clients of a quota may still use."""

    __slots__ = ("__weakref__", "_at", "_level", "_rate")

    def __init__(self, rate: float, now: float) -> None:
        self._rate = rate
        self._level = rate * WINDOW_S
        self._at = now

    @property
    def size(self) -> int:
        """The most that fits in."""
        return int(self._rate * WINDOW_S)

    def take(self, size: int, now: float) -> float:
        """Use bytes; return the number of seconds until the debt is refilled."""
        filled = self._level + (now - self._at) * self._rate
        self._level = min(filled, self._rate * WINDOW_S) - size
        self._at = now
        return max(0.0, -self._level / self._rate)


class QuotaMeter:
    """Meters one kind of quota for all clients."""

    def __init__(self, quotas: ClientQuotas, key: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._quotas = quotas
        self._clock = clock
        self._by_scope: WeakValueDictionary[Scope, Bucket] = WeakValueDictionary()
        self._by_client: OrderedDict[tuple[str, str], Bucket | None] = OrderedDict()
        self.key = key
        self.is_limiting = False
        """Whether any quota of this kind exists. If not, nothing else is computed."""
        self.throttled = 0
        self.throttled_ms = 0
        quotas.on_change(self._reset)
        self._reset()

    def charge(self, client: ClientInfo, size: int) -> int:
        """Account for bytes of a client; if it exceeds its quota, mute it, and return for how many milliseconds."""
        throttle_ms = self.take(client, size)
        if throttle_ms:
            client.mute(throttle_ms / 1000)
        return throttle_ms

    def take(self, client: ClientInfo, size: int) -> int:
        """Charge a request that shares its connection with others, which is not muted: `owed_ms` holds it back."""
        bucket = self._find_bucket(client)
        debt_s = 0.0 if bucket is None else bucket.take(size, self._clock())
        if not debt_s:
            return 0
        throttle_ms = min(math.ceil(debt_s * 1000), THROTTLE_MS_MAX)
        self.throttled += 1
        self.throttled_ms += throttle_ms
        return throttle_ms

    def owed_ms(self, client: ClientInfo) -> int:
        """Return the milliseconds that a client has to wait for its debt."""
        bucket = self._find_bucket(client) if self.is_limiting else None
        debt_s = 0.0 if bucket is None else bucket.take(0, self._clock())
        return min(math.ceil(debt_s * 1000), THROTTLE_MS_MAX)

    def allowance(self, client: ClientInfo, size: int) -> int:
        """Return the part of `size` to grant at once: at most the bucket's content, so that waits stay short."""
        bucket = self._find_bucket(client) if self.is_limiting else None
        return size if bucket is None else min(size, bucket.size)

    def _find_bucket(self, client: ClientInfo) -> Bucket | None:
        key = (client.user, client.client_id)
        try:
            return self._by_client[key]
        except KeyError:
            bucket = self._by_client[key] = self._look_up(*key)
            if len(self._by_client) > CLIENTS_MAX:
                self._by_client.popitem(last=False)
            return bucket

    def _look_up(self, user: str, client_id: str) -> Bucket | None:
        quota = self._quotas.find(self.key, user, client_id)
        if quota is None:
            return None
        bucket = self._by_scope.get(quota.scope)
        if bucket is None:
            bucket = self._by_scope[quota.scope] = Bucket(quota.rate, self._clock())
        return bucket

    def _reset(self) -> None:
        self.is_limiting = self._quotas.has(self.key)
        self._by_client.clear()
        self._by_scope.clear()


class QuotaMeters:
    def __init__(self, quotas: ClientQuotas) -> None:
        self._quotas = quotas
        self.produce = QuotaMeter(quotas, PRODUCER_BYTE_RATE)
        self.fetch = QuotaMeter(quotas, CONSUMER_BYTE_RATE)

    def metrics(self) -> Iterable[Metric]:
        meters = (self.produce, self.fetch)
        yield gauge("millstream_quotas", "Entities with a quota.", len(self._quotas.all()))
        yield Metric(
            "millstream_throttled_requests_total",
            "counter",
            "Requests beyond a quota.",
            tuple(Sample(meter.throttled, (("quota", meter.key),)) for meter in meters),
        )
        yield Metric(
            "millstream_throttled_seconds_total",
            "counter",
            "Total time that clients were throttled.",
            tuple(Sample(meter.throttled_ms / 1000, (("quota", meter.key),)) for meter in meters),
        )
