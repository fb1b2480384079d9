"""Push for one subscription on one node: messages are leased from this node alone, sent, and settled by the answers.

What is under way follows the endpoint (`endpoint`). A lease is extended while its message is being sent. When the
endpoint counts as down, one message is kept and sent again after each rest, so that waiting for the endpoint costs no
attempts. When it has got the message some times, and never took it, another message gets its turn, in case it is the
message; while it takes no connection it cannot be, and when many different messages have failed neither: these are
returned, which is no attempt.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from time import monotonic, time
from typing import Final

from millstream.broker.push_board import PushReport
from millstream.core.backoff import Backoff
from millstream.core.errors import MillstreamError
from millstream.core.metric import Histogram
from millstream.core.subscription import AT_MOST_ONCE
from millstream.core.verb import Verb
from millstream.gateway.api.record_reader import ReadRecords
from millstream.gateway.push.endpoint import Answer, Endpoint, Verdict
from millstream.gateway.push.event import content_of
from millstream.gateway.push.push_subscription import PushSubscription
from millstream.gateway.push.sender import Sender
from millstream.gateway.push.settler import Settler
from millstream.protocol.private.subscription_messages import Receive
from millstream.protocol.private.subscriptions import LeasedMessage

RATE_S: Final = 10.0

"""Rates are those of the last so many seconds."""


class Statistics:
    """The numbers of one subscription."""

    def __init__(self, subscription: str) -> None:
        self._subscription = subscription
        self._counts = dict.fromkeys(Verdict, 0)
        self._seconds = Histogram()
        self._last_status = 0
        self._last_error = ""
        self._last_error_ms = 0
        # Counts of some moments: when, how many were accepted, how many were not.
        self._moments: deque[tuple[float, int, int]] = deque([(float("-inf"), 0, 0)], maxlen=64)

    def note(self, answer: Answer, seconds: float, now_ms: int) -> None:
        """A request has ended."""
        self._counts[answer.verdict] += 1
        self._seconds.observe(seconds)
        self._last_status = answer.status
        if answer.verdict is not Verdict.ACCEPTED:
            self._last_error, self._last_error_ms = answer.reason, now_ms

    def report(self, endpoint: Endpoint, in_flight: int, now: float) -> PushReport:
        """How it stands now."""
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


_logger = logging.getLogger(__name__)


WAIT_MS: Final = 30_000

RECEIVE_BYTES: Final = 4 * 1024 * 1024

IN_FLIGHT_BYTES_MAX: Final = 16 * 1024 * 1024

"""How much is held of one subscription; one message is always taken."""

RETRY_S_MIN, RETRY_S_MAX = 0.1, 5.0

PROBES_MAX: Final = 5

"""How often an endpoint that is down gets one message before another is tried."""

RETURN_MS_MIN: Final = 1000

REASON_LENGTH_MAX: Final = 500

_OF_ENDPOINT: Final = (Verdict.FAILED, Verdict.UNREACHABLE)

"""What is the endpoint's doing, and would be the same for any message."""


ReceiveFrom = Callable[[Receive], Awaitable[ReadRecords]]

"""Leases messages from this node, on a connection of its own."""


class Pusher:
    """Pushes the messages of one subscription."""

    def __init__(
        self,
        declared: PushSubscription,
        worker: str,
        receive: ReceiveFrom,
        settler: Settler,
        sender: Sender,
        *,
        when_changed: Callable[[], None],
    ) -> None:
        self.declared = declared
        self._worker = worker
        self._receive = receive
        self._settler = settler
        self._sender = sender
        self._when_changed = when_changed
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
        """Go on with other settings, and what is known of the endpoint forgotten; what is under way ends as it began.

        Messages that were asked for already come to the new endpoint.
        """
        before, self._sender = self._sender, sender
        self.declared = declared
        self._endpoint = Endpoint(declared.in_flight_max)
        self._changed.set()
        self._redeclared.set()
        await before.close()

    def report(self) -> PushReport:
        """How it goes."""
        now = asyncio.get_running_loop().time()
        return self._statistics.report(self._endpoint, len(self._in_flight), now)

    async def run(self) -> None:
        """Push until `stop`; then what is under way ends, is settled, or given back."""
        loop = asyncio.get_running_loop()
        extending = loop.create_task(self._keep_leases(), name=f"leases of {self.declared.name}")
        pushing = loop.create_task(self._push(), name=f"messages of {self.declared.name}")
        try:
            await asyncio.wait((extending, pushing), return_when=asyncio.FIRST_COMPLETED)
            # Without leases that are kept nothing is sent: what has gone wrong there ends all of it.
            (pushing if pushing.done() else extending).result()
            if self._in_flight:
                # Those that were sent already keep their leases until they have their answers.
                await asyncio.wait(self._in_flight)
        finally:
            extending.cancel()
            pushing.cancel()
            await asyncio.gather(extending, pushing, *self._in_flight, return_exceptions=True)
            await self._sender.close()

    def stop(self) -> None:
        """Take no more messages, and let those under way end."""
        self._stopping.set()
        self._changed.set()

    def hurry(self) -> None:
        """Give back what has not ended."""
        for task in self._in_flight:
            task.cancel()

    # -- taking messages -------------------------------------------------------------------------------------

    async def _push(self) -> None:
        backoff = Backoff(first_s=RETRY_S_MIN, max_s=RETRY_S_MAX)
        while not self._stopping.is_set():
            room = self._room()
            if not room:
                await self._wait(self._endpoint.rest_left(self._now) or None)
                continue
            try:
                messages = await self._confirmed(await self._readable(await self._take(room)))
            except MillstreamError as error:
                # It moves to another node, or the broker is about to end; whoever declares it anew is heard of.
                _logger.debug("no messages to push", extra={"subscription": self.declared.name, "error": str(error)})
                await self._wait(backoff.take_s())
                continue
            backoff.reset()
            for message in messages:
                self._begin(message)

    def _room(self) -> int:
        if self._bytes >= IN_FLIGHT_BYTES_MAX:
            return 0
        room = self._endpoint.room(len(self._in_flight), self._now)
        # While most of what may be under way is, asking for one message at a time would cost more than it brings.
        return 0 if self._in_flight and 4 * room < self._endpoint.limit else room

    async def _take(self, room: int) -> ReadRecords:
        """Lease some messages, unless `stop` comes first."""
        wanted = Receive(self.declared.name, self._worker, room, RECEIVE_BYTES, WAIT_MS)
        taking = asyncio.ensure_future(self._receive(wanted))
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([taking, stopping], return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopping.cancel()
            if not taking.done():
                # The broker notices that nobody waits for the answer, and gives the messages to others.
                taking.cancel()
        with suppress(asyncio.CancelledError):
            return await taking
        return ReadRecords([], [], [])

    async def _readable(self, taken: ReadRecords) -> list[LeasedMessage]:
        """Return what was leased beyond the bytes asked for, release what cannot be read, and keep the rest."""
        name = self.declared.name
        for message, reason in taken.unreadable:
            place = {"partition": f"{message.topic}-{message.partition}", "offset": message.record.offset}
            _logger.warning("a message cannot be pushed: %s", reason, extra={"subscription": name, **place})
        await asyncio.gather(
            *(self._settler.settle(one, Verb.RETURN, delay_ms=0) for one in taken.surplus),
            *(
                self._settler.settle(one, Verb.RELEASE, reason=reason[:REASON_LENGTH_MAX])
                for one, reason in taken.unreadable
            ),
        )
        return taken.messages

    async def _confirmed(self, messages: list[LeasedMessage]) -> list[LeasedMessage]:
        """The messages that nobody else can have got, however long their answer was on its way."""
        if all(message.is_fresh for message in messages):
            return messages
        extended = await asyncio.gather(*map(self._extended, messages))
        return [message for message in extended if message is not None]

    async def _extended(self, message: LeasedMessage) -> LeasedMessage | None:
        """The same message with a longer lease; None if it is not held any more."""
        sent_at = monotonic()
        is_held = await self._settler.settle(message, Verb.EXTEND, delay_ms=message.lease_ms)
        extended = message.extended(sent_at)
        return extended if is_held and extended.is_fresh else None

    async def _wait(self, seconds: float | None) -> None:
        self._changed.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()

    # -- sending them ----------------------------------------------------------------------------------------

    def _begin(self, message: LeasedMessage) -> None:
        task = asyncio.get_running_loop().create_task(self._deliver(message))
        self._in_flight[task] = message
        self._bytes += _size(message)
        self._busy.set()
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._bytes -= _size(self._in_flight.pop(task))
        if not self._in_flight:
            self._busy.clear()
        if self._probe is task:
            self._probe = None
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.error("a message could not be pushed", extra={"subscription": self.declared.name}, exc_info=error)
        self._changed.set()
        self._when_changed()

    async def _deliver(self, message: LeasedMessage) -> None:
        """Send a message until it is settled, or given back since there is no more time."""
        endpoint, sender = self._endpoint, self._sender
        sent = 0
        """How often the endpoint may have got it."""
        try:
            content = content_of(message, self.declared.layout)
            while True:
                began = self._now
                sent += 1
                answer = await sender.post(content)
                sent -= answer.is_unsent
                self._note(endpoint, message, answer, began)
                if sent >= PROBES_MAX or not self._is_kept(endpoint, answer):
                    break
                await self._rest(endpoint)
                if self._stopping.is_set() and not sent:
                    await self._give_back(message, sent)
                    return
                if not await self._is_held():
                    # Whoever has it now sends it.
                    return
            await self._settle(endpoint, message, answer)
        except asyncio.CancelledError:
            await self._give_back(message, sent)

    async def _give_back(self, message: LeasedMessage, sent: int) -> None:
        """Leave a message to whoever pushes next; that it was never sent does not count as a delivery."""
        verb = Verb.RELEASE if sent else Verb.RETURN
        await self._settler.settle(message, verb, delay_ms=0, reason="the node stops")

    def _note(self, endpoint: Endpoint, message: LeasedMessage, answer: Answer, began: float) -> None:
        now = self._now
        self._statistics.note(answer, now - began, int(time() * 1000))
        was = endpoint.state
        if answer.verdict is Verdict.ACCEPTED:
            endpoint.succeeded(len(self._in_flight))
        elif answer.verdict is Verdict.REFUSED:
            endpoint.refused()
        else:
            place = message.partition, message.record.offset
            endpoint.failed(began, now, len(self._in_flight), message=place, is_unsent=answer.is_unsent)
            if answer.retry_after_s is not None:
                endpoint.rest(answer.retry_after_s, now)
        if (endpoint.state == "down") != (was == "down"):
            extra = {"subscription": self.declared.name, "host": self.declared.host, "reason": answer.reason}
            _logger.warning("an endpoint is %s", "down" if endpoint.is_down else "up again", extra=extra)
        self._when_changed()

    def _is_kept(self, endpoint: Endpoint, answer: Answer) -> bool:
        """Whether the message of this task waits here for the endpoint to come back: one of them does."""
        if answer.verdict not in _OF_ENDPOINT or not endpoint.is_down:
            return False
        if self.declared.delivery == AT_MOST_ONCE:
            # The endpoint may have got it, though it did not say so.
            return False
        if endpoint is not self._endpoint or self._stopping.is_set():
            return False
        if self._probe is None:
            self._probe = asyncio.current_task()
        return self._probe is asyncio.current_task()

    async def _rest(self, endpoint: Endpoint) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(endpoint.rest_left(self._now)):
                await self._stopping.wait()

    async def _settle(self, endpoint: Endpoint, message: LeasedMessage, answer: Answer) -> None:
        if answer.verdict is Verdict.ACCEPTED:
            await self._settler.settle(message, Verb.ACCEPT)
            return
        declared = self.declared
        if declared.delivery == AT_MOST_ONCE:
            # It was done when it was handed out.
            return
        if answer.verdict in _OF_ENDPOINT and endpoint.is_to_blame:
            # After a while, so that another one is tried first.
            rest_ms = int(2000 * endpoint.rest_left(self._now))
            await self._settler.settle(message, Verb.RETURN, delay_ms=max(rest_ms, RETURN_MS_MIN), reason=answer.reason)
            return
        delay_ms = answer.delay_ms(
            message.attempt, backoff_min_ms=declared.backoff_min_ms, backoff_max_ms=declared.backoff_max_ms
        )
        await self._settler.settle(message, Verb.RELEASE, delay_ms=delay_ms, reason=answer.reason[:REASON_LENGTH_MAX])

    # -- holding them ----------------------------------------------------------------------------------------

    async def _keep_leases(self) -> None:
        """Extend the leases of messages that are being sent for long, while there are any."""
        while True:
            await self._busy.wait()
            self._redeclared.clear()
            with suppress(TimeoutError):
                # Another length of leases counts at once.
                async with asyncio.timeout(self.declared.lease_ms / 3000):
                    await self._redeclared.wait()
            if self.declared.delivery == AT_MOST_ONCE:
                continue
            soon = monotonic() + self.declared.lease_ms / 2000
            # Another length of leases may have been declared.
            due = {
                task: self._extended(message._replace(lease_ms=self.declared.lease_ms))
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
        extended = await self._extended(self._in_flight[task])
        if extended is not None:
            self._in_flight[task] = extended
        return extended is not None

    @property
    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _size(message: LeasedMessage) -> int:
    return len(message.record.value or b"") + len(message.record.key or b"") + 1024
