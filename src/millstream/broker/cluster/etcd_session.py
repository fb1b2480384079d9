"""A lease in etcd, kept alive by a thread of its own for as long as the event loop is alive.

A loop that is busy for a second does not lose its lease, because the thread continues. A loop that hangs for as long as
the lease holds does: the thread then revokes the lease, so that others take over.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
from aetcd import rpc

from millstream.broker.cluster.etcd_members import OPTIONS, EtcdMembers, is_final, wants_login
from millstream.core.clock import Clock
from millstream.core.errors import StoreUnavailable

RENEWALS = 3
"""How often a lease is renewed within its time to live."""

_BEATS = 6
_JOIN_S_MAX = 5.0


class EtcdSession:
    """One lease."""

    def __init__(
        self, members: EtcdMembers, lease: int, ttl_s: float, clock: Clock, on_lost: Callable[[], None]
    ) -> None:
        self._members = members
        self._ttl_s = ttl_s
        self._clock = clock
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._ended = threading.Event()
        self._channels: dict[str, Any] = {}
        self._last_beat = clock.monotonic()
        self._renewed_at = self._last_beat
        self._beating = self._loop.call_later(ttl_s / _BEATS, self._beat)
        self._thread = threading.Thread(target=self._keep_alive, name="etcd-lease", daemon=True)
        self.lease = lease
        self.live = True
        self._thread.start()

    @property
    def confirmed(self) -> bool:
        """Whether etcd has confirmed the lease within its time to live."""
        return self.live and self._clock.monotonic() - self._renewed_at < self._ttl_s

    async def close(self) -> None:
        """End the lease, and with it its keys."""
        if self.live:
            self._end()
            with suppress(StoreUnavailable):
                request = rpc.LeaseRevokeRequest(ID=self.lease)
                await self._members.ask(lambda member: member.leases.LeaseRevoke, request, repeatable=True)
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
        """Renew the lease until the session ends; runs in the thread."""
        try:
            # A loop that was closed raises RuntimeError: the process ends, and the lease ends by its time.
            with suppress(RuntimeError):
                while not self._ended.wait(self._ttl_s / RENEWALS):
                    if not self._renew():
                        self._loop.call_soon_threadsafe(self._lost)
                        return
        finally:
            for channel in self._channels.values():
                channel.close()

    def _renew(self) -> bool:
        """Renew the lease; return False if it is lost."""
        if self._clock.monotonic() - self._last_beat >= self._ttl_s:
            self._ask("LeaseRevoke", rpc.LeaseRevokeRequest(ID=self.lease), rpc.LeaseRevokeResponse)
            return False
        asked_at = self._clock.monotonic()
        answer = self._ask("LeaseKeepAlive", rpc.LeaseKeepAliveRequest(ID=self.lease), rpc.LeaseKeepAliveResponse)
        if answer is None:
            return True
        self._renewed_at = asked_at
        return bool(answer.TTL > 0)

    def _ask(self, method: str, request: Any, kind: Any) -> Any:
        """Send a request about the lease to any member; return None if it was not carried out."""
        reason = ""
        for _ in self._members.address.endpoints:
            endpoint = self._members.endpoint
            try:
                answer = self._call(endpoint, f"Lease/{method}", request, kind)
            except grpc.RpcError as error:
                if is_final(error):
                    # Still an answer, for example that the lease no longer exists.
                    self._loop.call_soon_threadsafe(self._members.health.answered)
                    return None
                reason = str(error.details())
                self._loop.call_soon_threadsafe(self._members.move_on, endpoint)
                continue
            self._loop.call_soon_threadsafe(self._members.health.answered)
            return answer
        self._loop.call_soon_threadsafe(self._members.health.silent, reason)
        return None

    def _call(self, endpoint: str, method: str, request: Any, kind: Any) -> Any:
        try:
            return self._post(endpoint, method, request, kind)
        except grpc.RpcError as error:
            if self._members.address.user is None or not wants_login(error):
                raise
        self._members.use_token("")
        answer = self._post(endpoint, "Auth/Authenticate", self._members.login(), rpc.AuthenticateResponse)
        self._members.use_token(answer.token)
        return self._post(endpoint, method, request, kind)

    def _post(self, endpoint: str, method: str, request: Any, kind: Any) -> Any:
        # A stream of requests that holds just one is the same on the wire as a single request.
        call = self._channel(endpoint).unary_unary(
            f"/etcdserverpb.{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=kind.FromString,
        )
        return call(request, timeout=self._ttl_s / RENEWALS, metadata=self._members.metadata)

    def _channel(self, endpoint: str) -> Any:
        channel = self._channels.get(endpoint)
        if channel is None:
            credentials = self._members.address.credentials()
            channel = (
                grpc.insecure_channel(endpoint, options=OPTIONS)
                if credentials is None
                else grpc.secure_channel(endpoint, credentials, options=OPTIONS)
            )
            self._channels[endpoint] = channel
        return channel
