"""Push for one subscription on one node: leases messages from this node, sends them, and settles them by the responses.

The endpoint's limit (`endpoint.py`) bounds the requests in flight. Leases are extended while messages are being sent.
When the endpoint is down, one message is kept and sent again after each rest, so that waiting costs no attempts. After
several failed probes another message gets its turn, in case the message is the cause; not while the endpoint refuses
connections, or when many different messages have failed: those are returned, which is not an attempt.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic, time
from typing import Final

from millstream.client import settling
from millstream.client.message import Lease
from millstream.core.backoff import Backoff
from millstream.core.errors import MillstreamError
from millstream.core.ids import NodeId
from millstream.core.metric import Histogram
from millstream.core.subscription import AT_MOST_ONCE, Verb
from millstream.core.tasks import wait_up_to
from millstream.gateway.api.record_reader import ReadRecords
from millstream.gateway.push.endpoint import Endpoint, EndpointResponse, Verdict
from millstream.gateway.push.event import content_of
from millstream.gateway.push.push_messages import PushSubscription
from millstream.gateway.push.sender import Sender
from millstream.protocol.private.subscription_messages import PushReport, ReceiveRequest
from millstream.protocol.private.subscriptions import LeasedMessage
from millstream.protocol.wire.client import Client

_logger = logging.getLogger(__name__)

SETTLE_RETRY_S: Final = 5.0
SETTLE_S: Final = 10.0
"""How long settling is retried at new leaders, and how long it may take in all; after that, the lease expires."""

SendRequest = Callable[[int, bytes], Awaitable[memoryview]]
"""Sends a private request to this node."""


class Settler:
    """Settles the messages that one worker holds."""

    def __init__(self, subscription: str, worker: str, send_request: SendRequest, client: Client) -> None:
        self._send_request = send_request
        self._client = client
        self._settler = settling.Settler(client, subscription, worker, send=self._send)

    async def settle(self, message: LeasedMessage, verb: int, *, delay_ms: int | None = None, reason: str = "") -> bool:
        """Settle a message; return whether that is durable."""
        lease = Lease(
            message.topic,
            message.topic_id.bytes,
            message.partition,
            node=message.node,
            received=monotonic(),
            lease_s=SETTLE_RETRY_S,
            attempt=message.attempt,
        )
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._settler.settle(lease, message.record.offset, verb, delay_ms=delay_ms, reason=reason)
        except (MillstreamError, TimeoutError) as error:
            extra = {
                "topic": message.topic,
                "partition": message.partition,
                "error": str(error) or "no response in time",
            }
            _logger.debug("a lease could not be settled", extra=extra)
            return False
        return True

    async def _send(self, node: NodeId | None, key: int, body: bytes) -> memoryview:
        return await (self._send_request(key, body) if node is None else self._client.private(node, key, body))


RATE_S: Final = 10.0
"""The window of the rates."""


class Statistics:
    def __init__(self, subscription: str) -> None:
        self._subscription = subscription
        self._counts = dict.fromkeys(Verdict, 0)
        self._seconds = Histogram()
        self._last_status = 0
        self._last_error = ""
        self._last_error_ms = 0
        # Samples: time, accepted, not accepted.
        self._moments: deque[tuple[float, int, int]] = deque([(float("-inf"), 0, 0)], maxlen=64)

    def note(self, response: EndpointResponse, seconds: float, now_ms: int) -> None:
        self._counts[response.verdict] += 1
        self._seconds.observe(seconds)
        self._last_status = response.status
        if response.verdict is not Verdict.ACCEPTED:
            self._last_error, self._last_error_ms = response.reason, now_ms

    def report(self, endpoint: Endpoint, in_flight: int, now: float) -> PushReport:
        counts, distribution = self._counts, self._seconds.distribution()
        accepted = counts[Verdict.ACCEPTED]
        failed = sum(counts.values()) - accepted
        while len(self._moments) > 1 and self._moments[1][0] <= now - RATE_S:
            self._moments.popleft()
        _, accepted_before, failed_before = self._moments[0]
        if now - self._moments[-1][0] >= RATE_S / 50:
            self._moments.append((now, accepted, failed))
        return PushReport(
            subscription=self._subscription,
            state=endpoint.state,
            concurrency=endpoint.limit,
            in_flight=in_flight,
            accepted=accepted,
            refused=counts[Verdict.REFUSED],
            failed=counts[Verdict.FAILED],
            unreachable=counts[Verdict.UNREACHABLE],
            accepted_per_s=round((accepted - accepted_before) / RATE_S, 1),
            failed_per_s=round((failed - failed_before) / RATE_S, 1),
            last_status=self._last_status,
            last_error=self._last_error,
            last_error_ms=self._last_error_ms,
            bounds=list(distribution.bounds),
            cumulative=list(distribution.cumulative),
            requests=distribution.observations,
            seconds=distribution.total,
        )


WAIT_MS: Final = 30_000

RECEIVE_BYTES: Final = 4 * 1024 * 1024

IN_FLIGHT_BYTES_MAX: Final = 16 * 1024 * 1024
"""The most bytes of one subscription in memory; one message is always taken."""

RETRY_S_MIN, RETRY_S_MAX = 0.1, 5.0

PROBES_MAX: Final = 5
"""How often a message probes an endpoint that is down before another is tried."""

RETURN_MS_MIN: Final = 1000

REASON_LENGTH_MAX: Final = 500

_OF_ENDPOINT: Final = (Verdict.FAILED, Verdict.UNREACHABLE)
"""Outcomes that the endpoint causes, independent of the message."""

ReceiveFrom = Callable[[ReceiveRequest], Awaitable[ReadRecords]]
"""Leases messages from this node on its own connection."""


class Pusher:
    def __init__(
        self,
        declared: PushSubscription,
        worker: str,
        receive: ReceiveFrom,
        settler: Settler,
        sender: Sender,
        *,
        on_change: Callable[[], None],
    ) -> None:
        self.declared = declared
        self._worker = worker
        self._receive = receive
        self._settler = settler
        self._sender = sender
        self._on_change = on_change
        self._endpoint = Endpoint(declared.in_flight_max)
        self._statistics = Statistics(declared.name)
        self._in_flight: dict[asyncio.Task[None], LeasedMessage] = {}
        self._bytes = 0
        self._probe: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._busy = asyncio.Event()
        self._redeclared = asyncio.Event()
        self._stopping = asyncio.Event()

    async def change(self, declared: PushSubscription, sender: Sender) -> None:
        """Continue with other settings, forgetting the endpoint's history; messages in flight finish as they started.

        Messages that were requested before go to the new endpoint.
        """
        before, self._sender = self._sender, sender
        self.declared = declared
        self._endpoint = Endpoint(declared.in_flight_max)
        self._changed.set()
        self._redeclared.set()
        await before.close()

    def report(self) -> PushReport:
        now = asyncio.get_running_loop().time()
        return self._statistics.report(self._endpoint, len(self._in_flight), now)

    async def run(self) -> None:
        """Push until `stop`; then settle or return what is in flight."""
        loop = asyncio.get_running_loop()
        extending = loop.create_task(self._extend_leases(), name=f"leases of {self.declared.name}")
        pushing = loop.create_task(self._push(), name=f"messages of {self.declared.name}")
        try:
            await asyncio.wait((extending, pushing), return_when=asyncio.FIRST_COMPLETED)
            # Nothing is sent without leases that are extended, so an error of either task ends both.
            (pushing if pushing.done() else extending).result()
            if self._in_flight:
                # Messages that were sent keep their leases until they get a response.
                await asyncio.wait(self._in_flight)
        finally:
            extending.cancel()
            pushing.cancel()
            await asyncio.gather(extending, pushing, *self._in_flight, return_exceptions=True)
            await self._sender.close()

    def stop(self) -> None:
        """Receive no more messages, and wait for those in flight."""
        self._stopping.set()
        self._changed.set()

    def return_unfinished(self) -> None:
        for task in self._in_flight:
            task.cancel()

    # -- taking messages -------------------------------------------------------------------------------------

    async def _push(self) -> None:
        backoff = Backoff(first_s=RETRY_S_MIN, max_s=RETRY_S_MAX)
        while not self._stopping.is_set():
            now = self._now
            room = self._room(now)
            if not room:
                # By the same time: if the pause has just ended, nothing else would end this wait.
                await self._wait(self._endpoint.remaining_pause_s(now) or None)
                continue
            try:
                messages = await self._confirm_leases(await self._select_readable(await self._lease(room)))
            except MillstreamError as error:
                # The partition moves to another node, or the broker is stopping; a new declaration wakes this loop.
                _logger.debug(
                    "cannot receive messages to push", extra={"subscription": self.declared.name, "error": str(error)}
                )
                await self._wait(backoff.take_s())
                continue
            backoff.reset()
            for message in messages:
                self._start_delivery(message)

    def _room(self, now: float) -> int:
        if self._bytes >= IN_FLIGHT_BYTES_MAX:
            return 0
        room = self._endpoint.room(len(self._in_flight), now)
        # While most of the limit is in use, requesting one message at a time would cost more than it brings.
        return 0 if self._in_flight and 4 * room < self._endpoint.limit else room

    async def _lease(self, room: int) -> ReadRecords:
        """Lease some messages, unless `stop` comes first."""
        request = ReceiveRequest(self.declared.name, self._worker, room, RECEIVE_BYTES, WAIT_MS)
        taking = asyncio.ensure_future(self._receive(request))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([taking, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not taking.done():
                # The broker notices that the request was cancelled and delivers the messages to other workers.
                taking.cancel()
        with suppress(asyncio.CancelledError):
            return await taking
        return ReadRecords([], [], [])

    async def _select_readable(self, taken: ReadRecords) -> list[LeasedMessage]:
        """Return messages leased beyond the requested bytes, release those that cannot be read, and keep the rest."""
        name = self.declared.name
        for message, reason in taken.unreadable:
            place = {"partition": f"{message.topic}-{message.partition}", "offset": message.record.offset}
            _logger.warning("message cannot be pushed: %s", reason, extra={"subscription": name, **place})
        await asyncio.gather(
            *(self._settler.settle(message, Verb.RETURN, delay_ms=0) for message in taken.surplus),
            *(
                self._settler.settle(message, Verb.RELEASE, reason=reason[:REASON_LENGTH_MAX])
                for message, reason in taken.unreadable
            ),
        )
        return taken.messages

    async def _confirm_leases(self, messages: list[LeasedMessage]) -> list[LeasedMessage]:
        """Keep the messages whose leases are still valid, regardless of the duration of the response."""
        if all(message.is_fresh for message in messages):
            return messages
        extended = await asyncio.gather(*map(self._extend_lease, messages))
        return [message for message in extended if message is not None]

    async def _extend_lease(self, message: LeasedMessage) -> LeasedMessage | None:
        """Extend a message's lease; return None if it is lost."""
        sent_at = monotonic()
        is_held = await self._settler.settle(message, Verb.EXTEND, delay_ms=message.lease_ms)
        extended = message.extended(sent_at)
        return extended if is_held and extended.is_fresh else None

    async def _wait(self, seconds: float | None) -> None:
        self._changed.clear()
        await wait_up_to(seconds, self._changed)

    # -- sending them ----------------------------------------------------------------------------------------

    def _start_delivery(self, message: LeasedMessage) -> None:
        task = asyncio.get_running_loop().create_task(self._deliver(message))
        self._in_flight[task] = message
        self._bytes += _size(message)
        self._busy.set()
        task.add_done_callback(self._on_delivery_done)

    def _on_delivery_done(self, task: asyncio.Task[None]) -> None:
        self._bytes -= _size(self._in_flight.pop(task))
        if not self._in_flight:
            self._busy.clear()
        if self._probe is task:
            self._probe = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("push of a message failed", extra={"subscription": self.declared.name}, exc_info=error)
        self._changed.set()
        self._on_change()

    async def _deliver(self, message: LeasedMessage) -> None:
        """Send a message until it is settled, or return it when time is up."""
        endpoint, sender = self._endpoint, self._sender
        sent = 0
        """How often the endpoint may have received it."""
        try:
            content = content_of(message, self.declared.layout)
            while True:
                began = self._now
                sent += 1
                response = await sender.post(content)
                sent -= response.is_unsent
                self._record_response(endpoint, message, response, began)
                if sent >= PROBES_MAX or not self._is_kept(endpoint, response):
                    break
                await wait_up_to(endpoint.remaining_pause_s(self._now), self._stopping)
                if self._stopping.is_set() and not sent:
                    await self._return_message(message, sent)
                    return
                if not await self._is_held():
                    # Another worker has it.
                    return
            await self._settle(endpoint, message, response)
        except asyncio.CancelledError:
            await self._return_message(message, sent)

    async def _return_message(self, message: LeasedMessage, sent: int) -> None:
        """Return a message; one that was never sent does not count as delivered."""
        verb = Verb.RELEASE if sent else Verb.RETURN
        await self._settler.settle(message, verb, delay_ms=0, reason="the node stops")

    def _record_response(
        self, endpoint: Endpoint, message: LeasedMessage, response: EndpointResponse, began: float
    ) -> None:
        now = self._now
        self._statistics.note(response, now - began, int(time() * 1000))
        was = endpoint.state
        if response.verdict is Verdict.ACCEPTED:
            endpoint.succeeded(len(self._in_flight))
        elif response.verdict is Verdict.REFUSED:
            endpoint.refused()
        else:
            place = message.partition, message.record.offset
            endpoint.failed(began, now, len(self._in_flight), message=place, is_unsent=response.is_unsent)
            if response.retry_after_s is not None:
                endpoint.pause(response.retry_after_s, now)
        if (endpoint.state == "down") != (was == "down"):
            extra = {"subscription": self.declared.name, "host": self.declared.host, "reason": response.reason}
            _logger.warning("an endpoint is %s", "down" if endpoint.is_down else "up again", extra=extra)
        self._on_change()

    def _is_kept(self, endpoint: Endpoint, response: EndpointResponse) -> bool:
        """Whether this is the one message that stays leased until the endpoint recovers."""
        if response.verdict not in _OF_ENDPOINT or not endpoint.is_down:
            return False
        if self.declared.delivery == AT_MOST_ONCE:
            # The endpoint may have received it without responding.
            return False
        if endpoint is not self._endpoint or self._stopping.is_set():
            return False
        if self._probe is None:
            self._probe = asyncio.current_task()
        return self._probe is asyncio.current_task()

    async def _settle(self, endpoint: Endpoint, message: LeasedMessage, response: EndpointResponse) -> None:
        if response.verdict is Verdict.ACCEPTED:
            await self._settler.settle(message, Verb.ACCEPT)
            return
        declared = self.declared
        if declared.delivery == AT_MOST_ONCE:
            # The message was finished when it was delivered.
            return
        if response.verdict in _OF_ENDPOINT and endpoint.is_at_fault:
            # Delayed, so that another message is tried first.
            rest_ms = int(2000 * endpoint.remaining_pause_s(self._now))
            await self._settler.settle(
                message, Verb.RETURN, delay_ms=max(rest_ms, RETURN_MS_MIN), reason=response.reason
            )
            return
        delay_ms = response.delay_ms(
            message.attempt, backoff_min_ms=declared.backoff_min_ms, backoff_max_ms=declared.backoff_max_ms
        )
        await self._settler.settle(message, Verb.RELEASE, delay_ms=delay_ms, reason=response.reason[:REASON_LENGTH_MAX])

    # -- holding them ----------------------------------------------------------------------------------------

    async def _extend_leases(self) -> None:
        """Extend the leases of messages that take long to send."""
        while True:
            await self._busy.wait()
            self._redeclared.clear()
            # A changed lease duration takes effect at once.
            await wait_up_to(self.declared.lease_ms / 3000, self._redeclared)
            if self.declared.delivery == AT_MOST_ONCE:
                continue
            soon = monotonic() + self.declared.lease_ms / 2000
            # The lease duration may have changed.
            due = {
                task: self._extend_lease(message._replace(lease_ms=self.declared.lease_ms))
                for task, message in self._in_flight.items()
                if message.fresh_until < soon
            }
            for task, extended in zip(due, await asyncio.gather(*due.values()), strict=True):
                if extended is not None and task in self._in_flight:
                    self._in_flight[task] = extended

    async def _is_held(self) -> bool:
        """Whether the message of this task may be sent again."""
        task = asyncio.current_task()
        if task is None or self._in_flight[task].is_fresh:
            return True
        extended = await self._extend_lease(self._in_flight[task])
        if extended is not None:
            self._in_flight[task] = extended
        return extended is not None

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _size(message: LeasedMessage) -> int:
    return len(message.record.value or b"") + len(message.record.key or b"") + 1024
