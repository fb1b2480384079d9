"""The broker connection of a Spark process, whose code is not asynchronous: an event loop in a thread.

Spark creates readers and writers all the time and forks its workers, so clients are kept in the module, one per list of
brokers and credentials. A forked process starts with none.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from millstream.client.loop_thread import LoopThread
from millstream.core.errors import BrokerUnreachable, MillstreamError
from millstream.pipelines.source.access import NO_ACCESS, Access
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import NO_CREDENTIALS, Credentials

if TYPE_CHECKING:
    from millstream.pipelines.source.options import ReadOptions, WriteOptions

LINKS_MAX: Final = 64
"""How many clients one process keeps: one per cluster and credentials."""

_PAUSE_S: Final = 0.2

_links: dict[tuple[str, str, float, Access], Link] = {}
_lock = threading.Lock()


class Link(LoopThread):
    """A client of one cluster for threads without an event loop."""

    def __init__(
        self,
        brokers: str,
        client_id: str,
        timeout_s: float,
        *,
        patience_s: float = 0.0,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        super().__init__()
        self._brokers = brokers
        self._credentials = credentials
        try:
            self.client = self.call(self._connect(client_id, timeout_s, patience_s))
        except BaseException:
            super().close()
            raise

    def close(self) -> None:
        self.call(self.client.close())
        super().close()

    async def _connect(self, client_id: str, timeout_s: float, patience_s: float) -> Client:
        deadline = self._loop.time() + patience_s
        while True:
            client = Client.connect(
                self._brokers, client_id=client_id, timeout_s=timeout_s, credentials=self._credentials
            )
            try:
                return await client.__aenter__()
            except BrokerUnreachable:
                if self._loop.time() < deadline:
                    await asyncio.sleep(_PAUSE_S)
                    continue
                raise BrokerUnreachable(
                    f"no broker responds at {self._brokers}; check that it is running and that the option "
                    "kafka.bootstrap.servers is right"
                ) from None


def link_to(
    brokers: str, *, client_id: str, timeout_s: float, patience_s: float = 0.0, access: Access = NO_ACCESS
) -> Link:
    """Return this process's link to a cluster, creating it on first use.

    Planning a query fails at once if no broker responds; a task of a running query is patient, since a broker may be
    restarting.
    """
    key = (brokers, client_id, timeout_s, access)
    with _lock:
        link = _links.pop(key, None)
        if link is None:
            if len(_links) >= LINKS_MAX:
                _links.pop(next(iter(_links))).close()
            link = Link(brokers, client_id, timeout_s, patience_s=patience_s, credentials=access.credentials())
        # Most recently used last.
        _links[key] = link
        return link


def task_link(options: ReadOptions | WriteOptions) -> Link:
    """Return this process's link; tasks and commits wait for brokers that restart."""
    return link_to(
        options.brokers,
        client_id=options.client_id,
        timeout_s=options.timeout_s,
        patience_s=options.timeout_s,
        access=options.access,
    )


def _close_all() -> None:
    while _links:
        link = _links.popitem()[1]
        with suppress(MillstreamError, OSError, RuntimeError):
            link.close()


def _reset_after_fork() -> None:
    """Drop the links of the parent, whose threads do not exist in a forked process."""
    global _lock
    _lock = threading.Lock()
    _links.clear()


atexit.register(_close_all)
os.register_at_fork(after_in_child=_reset_after_fork)
