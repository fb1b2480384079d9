"""A watch on etcd that outlives its connections: it goes on with the revision after the last one it has told of."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import grpc

from millstream.broker.cluster import etcd_requests
from millstream.broker.cluster.etcd_members import EtcdMembers, NotConnected, wants_login
from millstream.broker.cluster.store import Event
from millstream.core.errors import WatchLost

_logger = logging.getLogger(__name__)

SILENCE_S_MAX = 900.0
"""etcd says every ten minutes that nothing happened; a connection that is silent for longer is not trusted."""

_PAUSE_S_MIN = 0.05
_PAUSE_S_MAX = 1.0


class _Interrupted(Exception):
    """The connection has to be made anew."""


class EtcdWatch:
    """The changes below a prefix, from one revision on."""

    def __init__(self, members: EtcdMembers, namespace: bytes, prefix: str, after: int) -> None:
        self._members = members
        self._namespace = namespace
        self._prefix = namespace + prefix.encode()
        self._after = after
        self._pause_s = 0.0

    async def batches(self) -> AsyncGenerator[Sequence[Event], None]:
        """Batches of changes, for ever."""
        while True:
            endpoint = self._members.endpoint
            try:
                async with aclosing(self._connection()) as answers:
                    async for answer in answers:
                        events = self._take(answer)
                        if events:
                            yield events
            except NotConnected as error:
                self._members.health.silent(str(error))
                self._members.move_on(endpoint)
            except grpc.aio.AioRpcError as error:
                if wants_login(error):
                    self._members.use_token("")
                self._members.move_on(endpoint)
            except _Interrupted as error:
                _logger.info("a watch on etcd was interrupted and goes on", extra={"reason": str(error) or "moved"})
            await self._rest()

    async def _connection(self) -> AsyncGenerator[Any, None]:
        """What one connection tells until it breaks."""
        moved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        member = await self._members.connected()
        stop = self._members.when_moved(lambda: None if moved.done() else moved.set_result(None))
        call = member.watches.Watch(metadata=self._members.metadata)
        try:
            await call.write(etcd_requests.watch(self._prefix, after=self._after))
            while True:
                yield await _next_unless(moved, call)
        finally:
            stop()
            call.cancel()

    def _take(self, answer: Any) -> list[Event]:
        if answer.compact_revision:
            raise WatchLost(f"etcd has forgotten the changes before revision {answer.compact_revision}")
        if answer.canceled:
            # Some versions of etcd say no more than that it is not permitted when a token is too old.
            self._members.use_token("")
            raise _Interrupted(answer.cancel_reason)
        self._members.health.answered()
        self._pause_s = 0.0
        told = (etcd_requests.event(self._namespace, event) for event in answer.events)
        events = [event for event in told if event.revision > self._after]
        if events:
            self._after = events[-1].revision
        elif not answer.created and not answer.events:
            # A sign of life: everything up to the revision in its header has been told.
            self._after = max(self._after, answer.header.revision)
        return events

    async def _rest(self) -> None:
        """Wait a little before the next connection, longer each time, and not in step with other nodes."""
        self._pause_s = min(max(self._pause_s * 2, _PAUSE_S_MIN), _PAUSE_S_MAX)
        await asyncio.sleep(self._pause_s * random.uniform(0.5, 1.0))


async def _next_unless(moved: asyncio.Future[None], call: Any) -> Any:
    """The next answer, unless the member that sends them is given up."""
    reading = asyncio.create_task(call.read())
    waiting: set[asyncio.Future[Any]] = {reading, moved}
    try:
        await asyncio.wait(waiting, timeout=SILENCE_S_MAX, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not reading.done():
            reading.cancel()
            await asyncio.wait({reading})
    if reading.cancelled():
        raise _Interrupted
    answer = reading.result()
    if answer is grpc.aio.EOF:
        raise _Interrupted
    return answer
