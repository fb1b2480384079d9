"""How the gateway learns the state of its broker: health over a private socket, metrics over the Kafka port.

Health must be known while the Kafka port is flooded, out of connections or behind a busy loop. So it uses the socket
between the gateway and its broker, which nothing else can load, and the last response is used while the next is late.
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from typing import Any, NamedTuple

from millstream.core.errors import MillstreamError, RequestTimedOut
from millstream.core.ids import NodeId
from millstream.core.tasks import wait_up_to
from millstream.protocol.private.message import NODE_STATUS_KEY, request_document
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import Credentials

RESPONSE_S = 3.0
"""A broker that takes longer to report its status is not healthy."""

FRESH_S = 1.0
"""A more recent response is used again."""
HEALTH_S = 0.5
"""How long a health check waits for a busy broker before it responds with what is known; probes wait for one second."""
UNREADY_S = 10.0
"""A broker whose event loop has not responded for this long should get no new traffic."""
STUCK_S = 30.0
"""A broker whose event loop has not responded for this long is stuck and should be restarted."""

QUESTION = b"?\n"
"""The request for the broker's state, which the gateway writes to the private socket."""


class BrokerStarting(MillstreamError):
    """The broker has not started far enough to respond."""


class Health(NamedTuple):
    """The broker's last report, and for how long a request has been without a response."""

    status: dict[str, Any]
    silent_s: float


class BrokerStatusPipe:
    """The gateway's end of the private socket: sends one request at a time, on demand, and keeps the last response."""

    def __init__(self, line: socket.socket, *, reveals_details: bool = True) -> None:
        self.starting: str | None = None
        """The reason why the broker does not respond yet; None once it does."""
        self._reveals_details = reveals_details
        """Whether the reason is public; it may name other servers."""
        self._line = line
        self._rest = b""
        self._status: dict[str, Any] = {}
        self._responded_at = 0.0
        self._asked_at: float | None = None
        self._on_response = asyncio.Event()

    def feed(self, piece: bytes) -> None:
        *lines, self._rest = (self._rest + piece).split(b"\n")
        for line in lines:
            document = json.loads(line)
            starting: str | None = document["starting"]
            self.starting = starting if self._reveals_details or starting is None else "its log says how far it is"
            if document["status"] is not None:
                self._status = document["status"]
                if self._asked_at is not None:
                    # Without a request it may be old: it may have waited in the socket while this process started.
                    self._responded_at = asyncio.get_running_loop().time()
                self._asked_at = None
                self._on_response.set()

    async def health(self) -> Health:
        """Send a request, unless the last response is recent or one is pending, and wait a moment for the response."""
        if self.starting is not None:
            raise BrokerStarting(self.starting)
        now = asyncio.get_running_loop().time
        if self._status and now() - self._responded_at < FRESH_S:
            return Health(self._status, 0.0)
        if self._asked_at is None:
            self._asked_at = now()
            self._on_response.clear()
            # The socket accepts a request at any time; if the broker is gone, this process ends.
            with suppress(OSError):
                self._line.send(QUESTION)
        await wait_up_to(HEALTH_S, self._on_response)
        return Health(self._status, 0.0 if self._asked_at is None else now() - self._asked_at)


def of_all_nodes(statuses: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the metrics of several nodes as one list; each sample has the label `node`."""
    by_node: dict[str, dict[str, Any]] = {}
    for status in statuses:
        label = {"node": str(status["node_id"])}
        for metric in status["metrics"]:
            merged = by_node.setdefault(metric["name"], {**metric, "samples": []})
            merged["samples"] += [(value, {**label, **labels}) for value, labels in metric["samples"]]
            merged["is_truncated"] = merged["is_truncated"] or metric["is_truncated"]
    return list(by_node.values())


class BrokerStatus:
    """The gateway's wire client for status. Concurrent callers share one request."""

    def __init__(
        self, kafka_address: str, *, response_s: float = RESPONSE_S, credentials: Credentials | None = None
    ) -> None:
        self._kafka_address = kafka_address
        self._credentials = credentials
        self._response_s = response_s
        self._connection = AsyncExitStack()
        self._client: Client | None = None
        self._fetching: asyncio.Task[dict[str, Any]] | None = None

    async def fetch(self) -> dict[str, Any]:
        """Return the broker's status, as `broker/kafka/apis/node_status.py` describes it."""
        if self._fetching is None:
            self._fetching = asyncio.create_task(self._request_status())
            self._fetching.add_done_callback(self._on_response)
        # Shielded, since other callers may wait for the same response.
        return await asyncio.shield(self._fetching)

    async def close(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait([self._fetching])
        await self._connection.aclose()

    def _on_response(self, done: asyncio.Task[dict[str, Any]]) -> None:
        self._fetching = None
        if not done.cancelled():
            # Retrieved, so that asyncio does not log an error whose callers have all gone.
            done.exception()

    async def _request_status(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._response_s):
                client = await self._connect()
                status = await request_document(client, None, NODE_STATUS_KEY)
        except TimeoutError:
            raise RequestTimedOut(f"no response from {self._kafka_address} within {self._response_s:g} s") from None
        others = [NodeId(node) for node in status["machine"] if node != status["node_id"]]
        if others:
            responses = await asyncio.gather(*(self._fetch_other(client, node) for node in others))
            status["metrics"] = of_all_nodes([status, *(response for response in responses if response is not None)])
        return status

    async def _fetch_other(self, client: Client, node: NodeId) -> dict[str, Any] | None:
        """Return the status of another node of the machine; None if it does not respond, as while it restarts."""
        try:
            async with asyncio.timeout(self._response_s):
                return await request_document(client, node, NODE_STATUS_KEY)
        except (MillstreamError, TimeoutError):
            return None

    async def _connect(self) -> Client:
        if self._client is None:
            connecting = Client.connect(
                self._kafka_address,
                client_id="millstream-gateway",
                timeout_s=self._response_s,
                credentials=self._credentials,
            )
            self._client = await self._connection.enter_async_context(connecting)
        return self._client
