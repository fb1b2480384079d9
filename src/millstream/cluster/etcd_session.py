"""A lease in etcd, kept alive by a thread of its own for as long as the event loop is alive.

A loop that is busy for a second does not lose its lease, since the thread goes on. A loop that stands still for as long
as the lease holds does: the thread then gives the lease back, so that others take over.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress

import httpx

from millstream.cluster.etcd_gateway import CONNECT_S_MAX, EtcdGateway
from millstream.cluster.etcd_messages import KeepAliveLine, decode, encode
from millstream.model.clock import Clock
from millstream.model.errors import StoreUnavailable

RENEWALS = 3
"""How many signs of life are given in the time of a lease."""

_BEATS = 6
_JOIN_S_MAX = 5.0


class EtcdSession:
    """One lease."""

    def __init__(
        self, gateway: EtcdGateway, lease: int, ttl_s: float, clock: Clock, on_lost: Callable[[], None]
    ) -> None:
        self._gateway = gateway
        self._ttl_s = ttl_s
        self._clock = clock
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._ended = threading.Event()
        self._last_beat = clock.monotonic()
        self._beating = self._loop.call_later(ttl_s / _BEATS, self._beat)
        self._thread = threading.Thread(target=self._keep_alive, name="etcd-lease", daemon=True)
        self.lease = lease
        self.live = True
        self._thread.start()

    async def close(self) -> None:
        """End the lease, and with it its keys."""
        if self.live:
            self._end()
            with suppress(StoreUnavailable):
                await self._gateway.ask("/v3/lease/revoke", {"ID": self.lease}, repeatable=True)
        await asyncio.to_thread(self._thread.join, _JOIN_S_MAX)

    def _beat(self) -> None:
        self._last_beat = self._clock.monotonic()
        self._beating = self._loop.call_later(self._ttl_s / _BEATS, self._beat)

    def _end(self) -> None:
        self.live = False
        self._beating.cancel()
        self._ended.set()

    def _lost(self) -> None:
        if self.live:
            self._end()
            self._on_lost()

    def _keep_alive(self) -> None:
        """What the thread does."""
        address = self._gateway.address
        timeout = httpx.Timeout(self._ttl_s / RENEWALS, connect=min(CONNECT_S_MAX, self._ttl_s / RENEWALS))
        with httpx.Client(verify=address.verify(), trust_env=False, timeout=timeout) as client, suppress(RuntimeError):
            # A loop that was closed raises RuntimeError: the process ends, and the lease ends by its time.
            while not self._ended.wait(self._ttl_s / RENEWALS):
                if not self._renew(client):
                    self._loop.call_soon_threadsafe(self._lost)
                    return

    def _renew(self, client: httpx.Client) -> bool:
        """Give a sign of life; False when the lease is lost."""
        if self._clock.monotonic() - self._last_beat >= self._ttl_s:
            self._post(client, "/v3/lease/revoke")
            return False
        content = self._post(client, "/v3/lease/keepalive")
        if content is None:
            return True
        answer = decode(content, KeepAliveLine)
        return answer.result is None or answer.result.ttl_s > 0

    def _post(self, client: httpx.Client, path: str) -> bytes | None:
        """The answer to a request about the lease, which every member may be asked; None when there is none."""
        reason = ""
        for _ in self._gateway.address.endpoints:
            endpoint = self._gateway.endpoint
            try:
                answer = client.post(endpoint + path, content=encode({"ID": self.lease}), headers=self._gateway.headers)
            except httpx.TransportError as error:
                reason = str(error) or type(error).__name__
                self._loop.call_soon_threadsafe(self._gateway.move_on, endpoint)
                continue
            if answer.status_code == httpx.codes.OK:
                self._loop.call_soon_threadsafe(self._gateway.health.answered)
                return answer.content
            reason = f"HTTP status {answer.status_code}"
        self._loop.call_soon_threadsafe(self._gateway.health.silent, reason)
        return None
