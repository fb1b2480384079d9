"""Receives the messages of a subscription from all nodes of a cluster, within a credit.

The messages requested from all nodes together never exceed the remaining credit. The prefetch adapts to the handlers:
quick ones get many messages at a time, slow ones few, so that other workers are busy as well.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import inf
from operator import attrgetter
from time import monotonic
from typing import Final

from millstream.client.message import Lease, Message, read_leased
from millstream.client.message_stream import Source
from millstream.client.settling import RETRIED, Completion, Settlement, Settler
from millstream.core.backoff import Backoff
from millstream.core.errors import InvalidRecordState, MillstreamError, ProtocolViolation
from millstream.core.ids import NodeId
from millstream.core.subscription import AT_MOST_ONCE, Verb
from millstream.core.tasks import cancel_and_wait
from millstream.protocol.private.leasing import LeaseRequests, LeaseResponse, fresh_until
from millstream.protocol.private.subscription_messages import LeasedRange, PartitionMessages, ReceiveRequest
from millstream.protocol.wire.client import BACKOFF_S_MAX, Client
from millstream.protocol.wire.error_codes import error_from_code

_logger = logging.getLogger(__name__)

WAIT_MS: Final = 30_000

_RESPONSE_S_MAX: Final = 30.0

_BYTES_MAX: Final = 1024 * 1024

_NODES_S: Final = 5.0
"""The shortest interval at which the cluster's nodes are looked up."""

_LAST_RESPONSE_S: Final = 1.0
"""How long stopping waits for a response that may carry messages; nodes hang up sooner if there are none."""

Share = Callable[[int, int], int]
"""Returns how many messages to request from one more node, given the number already requested and the number of nodes.
"""

OnLeased = Callable[[NodeId, LeaseResponse], None]
"""Called with a node's response."""


class Polls:
    def __init__(
        self,
        client: Client,
        subscription: str,
        worker: str,
        *,
        share: Share,
        on_leased: OnLeased,
        failed: Callable[[MillstreamError], None],
    ) -> None:
        self._client = client
        self._subscription = subscription
        self._worker = worker
        self._share = share
        self._receive = on_leased
        self._failed = failed
        """Called with the reason why no more messages will come."""
        self._loop = asyncio.get_running_loop()
        self.waiting_polls: deque[asyncio.Future[int]] = deque()
        """Polls that wait for credit; each gets the number of messages to request."""
        self.is_stopping = False
        """Whether no more requests are sent."""
        self.requested = 0
        """The number of messages requested."""
        self._tasks: dict[NodeId, asyncio.Task[None]] = {}
        self._requests = LeaseRequests()
        self._sent: dict[NodeId, float] = {}
        """When the pending requests were sent."""
        self._nodes_requested_at = 0.0

    async def follow_nodes(self) -> Collection[NodeId]:
        self._nodes_requested_at = self._loop.time()
        nodes = (await self._client.metadata(())).nodes
        for node in nodes:
            if node not in self._tasks and not self.is_stopping:
                task = self._tasks[node] = self._loop.create_task(self._poll(node))
                task.add_done_callback(partial(self._on_poll_done, node))
        return nodes

    def grant_credit(self) -> None:
        """Make polls request as many messages as there is room for."""
        while self.waiting_polls and not self.is_stopping and (share := self._share(self.requested, len(self._tasks))):
            waiting = self.waiting_polls.popleft()
            if not waiting.done():
                self.requested += share
                waiting.set_result(share)

    def withdraw(self) -> None:
        """Make nodes respond at once."""
        self._requests.withdraw()

    def oldest_sent(self) -> float:
        """Return when the oldest pending request was sent; infinity if there is none."""
        return min(self._sent.values(), default=inf)

    async def stop(self) -> None:
        """Send no more requests; leases granted by then are received, or returned if they arrive too late."""
        self.is_stopping = True
        tasks = list(self._tasks.values())
        self._requests.withdraw()
        for waiting in self.waiting_polls:
            if not waiting.done():
                waiting.set_result(0)
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=_LAST_RESPONSE_S)
        finally:
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Return leases that arrive too late."""
        await self._requests.close(_LAST_RESPONSE_S)

    def _on_poll_done(self, node: NodeId, task: asyncio.Task[None]) -> None:
        self._tasks.pop(node, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.is_stopping = True
            cause = error if isinstance(error, MillstreamError) else ProtocolViolation(f"receiving failed: {error!r}")
            self._failed(cause)

    async def _poll(self, node: NodeId) -> None:
        backoff = Backoff(max_s=BACKOFF_S_MAX)
        while not self.is_stopping:
            count = await self._reserve()
            if not count:
                continue
            leased: LeaseResponse | None = None
            self._sent[node] = monotonic()
            try:
                leased = await self._send_receive(node, count)
                backoff.reset()
            except RETRIED as error:
                _logger.debug("node %s cannot deliver messages of %r now: %s", node, self._subscription, error)
            finally:
                self.requested -= count
                del self._sent[node]
            if leased is not None:
                self._receive(node, leased)
            # What this node did not give may be asked of another one.
            self.grant_credit()
            if not await self._is_in_cluster(node):
                return
            if leased is None:
                await backoff.pause()

    async def _is_in_cluster(self, node: NodeId) -> bool:
        """Return whether a node is still in the cluster; new nodes are polled from now on."""
        if self._loop.time() - self._nodes_requested_at < _NODES_S:
            return True
        try:
            return node in await self.follow_nodes()
        except RETRIED:
            return True

    async def _reserve(self) -> int:
        """Wait for credit, behind earlier polls; return how many messages to request."""
        waiting: asyncio.Future[int] = self._loop.create_future()
        self.waiting_polls.append(waiting)
        self.grant_credit()
        return await waiting

    async def _send_receive(self, node: NodeId, count: int) -> LeaseResponse:
        request = ReceiveRequest(self._subscription, self._worker, count, _BYTES_MAX, WAIT_MS)
        pool = await self._client.pool_for(node)
        leased = await self._requests.receive(pool, request, timeout_s=WAIT_MS / 1000 + _RESPONSE_S_MAX)
        if leased.response.error:
            raise error_from_code(
                leased.response.error, leased.response.message, about=f"subscription {self._subscription!r}"
            )
        return leased


_is_settled = attrgetter("is_settled")

_QUICK_S: Final = 0.25

_SLOW_S: Final = 2.0


class Receiver(Source):
    """Receives messages of one subscription for one worker."""

    def __init__(
        self,
        client: Client,
        subscription: str,
        worker: str,
        *,
        credit: int,
        lease_s: float,
        ahead: int = 1,
        delivery: str = "at-least-once",
    ) -> None:
        super().__init__(subscription)
        self._client = client
        self.worker = worker
        self._credit = max(1, credit)
        """The maximum number of messages held."""
        self._ahead_min = min(self._credit, max(1, ahead))
        self._ahead = self._ahead_min
        """The maximum number that waits for handlers; it adapts to how quickly messages are settled."""
        self._low = self._ahead * 3 // 4
        """Below this number of waiting messages, more are requested."""
        self._lease_s = lease_s
        """The duration of leases; every response carries the declared one."""
        self._is_settled_at_once = delivery == AT_MOST_ONCE
        self._in_flight = 0
        self._polls = Polls(
            client, subscription, worker, share=self._share, on_leased=self._receive, failed=self._failed
        )
        self.settling: Settler = Settler(
            client, subscription, worker, on_lost=self._on_lost, oldest_sent=self._polls.oldest_sent
        )
        self._waiting_polls, self._grant_credit = self._polls.waiting_polls, self._polls.grant_credit
        self._not_renewed: dict[Message, asyncio.TimerHandle] = {}
        """Messages whose lease is no longer renewed, and the timer of its end."""
        self._leases: set[Lease] = set()
        """Leases with unsettled messages."""
        self._empty = asyncio.Event()
        """Set when the last lease is settled."""
        self._last_seen: dict[tuple[bytes, int], int] = {}
        """The last message received of each partition; earlier ones may be held already, or settled."""
        self._unconfirmed: set[Message] = set()
        """Messages that are held back until it is known whether they are leased."""
        self._confirmations: set[asyncio.Task[None]] = set()
        """The tasks that confirm leases."""
        self._lost_in_progress: dict[tuple[bytes, int, int], Message] = {}
        """Messages in the hands of a handler although their lease was lost."""
        self._limit: int | None = None
        """The maximum number of waiting messages while the handler fails for everything."""
        self._returns_buffered = False

    async def start(self) -> None:
        await self._polls.follow_nodes()

    def stop_renewing(self, message: Message) -> None:
        if self._lost_in_progress:
            self._forget_lost(message)
        if not message.is_settled and message not in self._not_renewed:
            left_s = message._lease.valid_until - monotonic()
            self._not_renewed[message] = self._loop.call_later(left_s, self.done, message)

    def stop_renewing_all(self, messages: Sequence[Message]) -> None:
        if self._lost_in_progress or not all(map(_is_settled, messages)):
            for message in messages:
                self.stop_renewing(message)

    # -- messages -------------------------------------------------------------------------------------------

    def take(self) -> Message | None:
        buffer = self._buffer
        while buffer:
            message = buffer.popleft()
            if self._waiting_polls and (len(buffer) == self._low or not buffer):
                self._grant_credit()
            if message.is_settled:
                continue
            if monotonic() >= message._lease.fresh_until:
                # Its lease may have ended, and another worker may have the message.
                self._confirm([message])
                continue
            if self._is_settled_at_once:
                self.done(message)
            return message
        return None

    def take_many(self, count: int) -> list[Message]:
        buffer = self._buffer
        taken = [buffer.popleft() for _ in range(min(count, len(buffer)))]
        now = monotonic()
        if any(map(_is_settled, taken)) or any(now >= lease.fresh_until for lease in self._leases):
            taken = [candidate for candidate in taken if not candidate.is_settled]
            self._confirm([candidate for candidate in taken if now >= candidate._lease.fresh_until])
            taken = [candidate for candidate in taken if now < candidate._lease.fresh_until]
        if self._is_settled_at_once:
            for message in taken:
                self.done(message)
        if self._waiting_polls:
            self._grant_credit()
        return taken

    async def wait_for_message(self) -> None:
        waiting: asyncio.Future[None] = self._loop.create_future()
        self._idle.append(waiting)
        if self._waiting_polls:
            self._grant_credit()
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.cancelled():
                self._idle.remove(waiting)
            else:
                # Leave the message to another waiting worker.
                self._wake(1)
            raise

    def done(self, message: Message) -> None:
        """Free the place of a message that is settled or given up."""
        if message.is_settled:
            return
        message.is_settled = True
        if self._not_renewed and (due := self._not_renewed.pop(message, None)) is not None:
            due.cancel()
        self._in_flight -= 1
        lease = message._lease
        lease.left -= 1
        if lease.left == 0:
            self._finished(lease)
        if self._waiting_polls and not self._buffer:
            self._grant_credit()

    def accept(self, message: Message) -> None:
        """Accept a message without waiting, together with others of its lease."""
        if message.is_settled:
            self._forget_lost(message)
            return
        lease = message._lease
        settlement = lease.open_accept or self.settling.open_accept(lease)
        settlement.offsets.append(message.offset)
        message.is_settled = True
        self._in_flight -= 1
        lease.left -= 1
        if lease.left == 0:
            self._finished(lease)
        if self._waiting_polls and not self._buffer:
            self._grant_credit()

    def settle(self, message: Message, verb: int, delay_ms: int | None, reason: str) -> asyncio.Future[None]:
        """Settle a message; the future completes when that is durable."""
        if verb != Verb.EXTEND:
            self.done(message)
        else:
            lease_s = self._lease_s if delay_ms is None else delay_ms / 1000
            message._lease.valid_until = max(message._lease.valid_until, monotonic() + lease_s)
            if self._not_renewed and (due := self._not_renewed.pop(message, None)) is not None:
                due.cancel()
                self._not_renewed[message] = self._loop.call_later(lease_s, self.done, message)
        if self._is_settled_at_once:
            response: asyncio.Future[None] = self._loop.create_future()
            response.set_result(None)
            return response
        return self.settling.settle(message._lease, message.offset, verb, delay_ms=delay_ms, reason=reason)

    def accept_many(self, messages: Sequence[Message]) -> list[asyncio.Future[None]]:
        """Accept messages; the futures complete when that is durable.

        One future fails if some messages were settled before or their lease has ended; the others are accepted.
        """
        refused = [message for message in messages if message.is_settled and message._lease.is_leased]
        by_lease: dict[Lease, list[int]] = {}
        lease: Lease | None = None
        for message in messages:
            if not message.is_settled:
                message.is_settled = True
                if message._lease is not lease:
                    # Messages that arrived together are usually adjacent.
                    lease = message._lease
                    add = by_lease.setdefault(lease, []).append
                add(message.offset)
                if self._not_renewed and (due := self._not_renewed.pop(message, None)) is not None:
                    due.cancel()
        responses: list[asyncio.Future[None]] = []
        for lease, offsets in by_lease.items():
            responses.append(self._loop.create_future())
            self.settling.enqueue(Settlement(lease, offsets, Verb.ACCEPT, completion=Completion(responses[-1])))
            self._in_flight -= len(offsets)
            lease.left -= len(offsets)
            if lease.left == 0:
                self._finished(lease)
        if self._waiting_polls:
            self._grant_credit()
        if refused:
            responses.append(self._loop.create_future())
            Completion(responses[-1]).part_settled(
                InvalidRecordState(
                    f"{len(refused)} of {len(messages)} messages are already settled, or their lease has expired; "
                    f"the first is {refused[0].id}"
                )
            )
        return responses

    def settle_nowait(self, message: Message, verb: int, delay_ms: int | None = None, reason: str = "") -> None:
        if message.is_settled:
            self._forget_lost(message)
        else:
            self.done(message)
            if not self._is_settled_at_once:
                self.settling.enqueue(Settlement(message._lease, [message.offset], verb, delay_ms, reason))

    def _finished(self, lease: Lease) -> None:
        """Adapt the prefetch to how long it took to settle all messages of a lease."""
        if lease.timer is not None:
            lease.timer.cancel()
        lease.messages.clear()
        self._leases.discard(lease)
        if not self._leases:
            self._empty.set()
        took_s = monotonic() - lease.received
        if took_s < _QUICK_S:
            self._ahead = min(self._credit, self._ahead * 2)
        elif took_s > _SLOW_S:
            self._ahead = max(self._ahead_min, self._ahead // 2)
        self._low = self._ahead * 3 // 4
        if self._waiting_polls:
            self._grant_credit()

    def _on_lost(self, settlement: Settlement) -> None:
        """Discard messages whose lease was lost."""
        offsets = set(settlement.offsets)
        lost = [leased for leased in settlement.lease.messages if leased.offset in offsets and not leased.is_settled]
        waiting = {*self._buffer, *self._unconfirmed, *self._not_renewed} if lost else set()
        for message in lost:
            if message not in waiting:
                self._lost_in_progress[*settlement.lease.where, message.offset] = message
            self.done(message)

    def _forget_lost(self, message: Message) -> None:
        key = (*message._lease.where, message.offset)
        if self._lost_in_progress.get(key) is message:
            del self._lost_in_progress[key]

    def throttle(self, limit: int | None) -> None:
        self._limit = limit
        if limit is None or limit > 0:
            self._grant_credit()
        else:
            self._polls.withdraw()
        self._return_excess()

    def _return_excess(self) -> None:
        if self._limit is not None and not self._is_settled_at_once:
            while len(self._buffer) > self._limit:
                self.settle_nowait(self._buffer.pop(), Verb.RETURN, 0, "the handler fails for every message")

    # -- the end --------------------------------------------------------------------------------------------

    def return_buffered(self) -> None:
        """Request no more, and return waiting messages, except settled ones, which are still to be taken."""
        self._stopping = self._returns_buffered = self._polls.is_stopping = True
        if not self._is_settled_at_once:
            self._return_all()

    async def stop(self) -> None:
        self._stopping = True
        await self._polls.stop()
        # The leases that these tasks would have confirmed are unknown: the tasks return them.
        confirmations = list(self._confirmations)
        await cancel_and_wait(*confirmations)
        self._wake(len(self._idle))

    async def stop_and_return(self) -> None:
        await self.stop()
        self._return_all()
        await self.flush()

    async def flush(self) -> None:
        await self.settling.flush()

    def _return_all(self) -> None:
        while self._buffer:
            self.settle_nowait(self._buffer.popleft(), Verb.RETURN, 0, "the worker was stopped")

    async def leave(self) -> None:
        await self.stop_and_return()
        for lease in list(self._leases):
            for message in lease.messages:
                self.stop_renewing(message)
        while self._leases:
            self._empty.clear()
            await self._empty.wait()
        await self.flush()
        await self.close()

    async def close(self) -> None:
        await self.stop()
        self._buffer.clear()
        for lease in list(self._leases):
            for message in list(lease.messages):
                self.done(message)
        self._lost_in_progress.clear()
        await self._polls.close()
        await self.settling.close()

    # -- receiving ------------------------------------------------------------------------------------------

    def _failed(self, error: MillstreamError) -> None:
        _logger.error("subscription %r has stopped delivering: %s", self.subscription, error)
        self._fail(error)

    def _share(self, requested: int, nodes: int) -> int:
        """Return how many messages to request from one more node; 0 if too few to be worth a request."""
        waiting = len(self._buffer)
        if self._limit is not None:
            return int(self._in_flight < self._credit and waiting + len(self._unconfirmed) + requested < self._limit)
        room = self._ahead - waiting - requested
        credit = self._credit - self._in_flight - requested
        free = min(room, credit)
        if free > 0 and (waiting == 0 or free * 4 >= self._ahead):
            return max(1, free // max(1, nodes))
        # A worker waits, and any node may have the next message: each is asked for at least one, so there may be as
        # many messages too many as there are nodes.
        return 1 if self._idle and not waiting and self._in_flight < self._credit else 0

    def _receive(self, node: NodeId, leased: LeaseResponse) -> None:
        before = len(self._buffer)
        for part in leased.response.partitions:
            if part.lease_ms is not None:
                self._lease_s = part.lease_ms / 1000
            attempts = {leased_range.attempt for leased_range in part.leases}
            if len(attempts) == 1:
                self._buffer += self._add_leased(node, part, part.leases, leased)
                continue
            messages: list[Message] = []
            for attempt in attempts:
                leased_ranges = [leased_range for leased_range in part.leases if leased_range.attempt == attempt]
                messages += self._add_leased(node, part, leased_ranges, leased)
            self._buffer += sorted(messages, key=attrgetter("offset"))
        self._return_excess()
        if self._returns_buffered:
            self.return_buffered()
        self._wake(len(self._buffer) - before)

    def _add_leased(
        self, node: NodeId, part: PartitionMessages, leased_ranges: list[LeasedRange], leased: LeaseResponse
    ) -> Sequence[Message]:
        """Read leased messages, all of one delivery attempt; return those that may be handed out."""
        now = monotonic()
        lease = Lease(
            part.topic,
            part.topic_id,
            part.partition,
            settler=self,
            subscription=self.subscription,
            node=node,
            received=now,
            lease_s=None if self._is_settled_at_once else self._lease_s,
            fresh_until=leased.fresh_until(part),
            deadline_ms=min((leased_range.deadline_ms for leased_range in leased_ranges), default=None),
            attempt=leased_ranges[0].attempt,
        )
        lease.client = self._client
        messages = read_leased(part.batches, leased_ranges, lease)
        if messages:
            lease.messages = list(messages)
            lease.left = len(messages)
            self._leases.add(lease)
            self._in_flight += len(messages)
            if not self._is_settled_at_once:
                # Half of what is left, if the response was long on its way.
                left_s = min(self._lease_s, max(0.0, lease.fresh_until - now))
                lease.timer = self._loop.call_later(left_s / 2, self._renew, lease)
                last_seen = self._last_seen.get(lease.where, -1)
                self._last_seen[lease.where] = max(last_seen, messages[-1].offset)
                if messages[0].offset <= last_seen:
                    messages = self._without_duplicates(lease, leased.sent_at)
                if now >= lease.fresh_until:
                    self._confirm(messages)
                    return []
        return messages

    # -- redeliveries ----------------------------------------------------------------------------------------

    def _without_duplicates(self, lease: Lease, sent_at: float) -> list[Message]:
        """Return the messages that are neither held nor settled; after a node's restart, messages are leased again.

        A message that is held continues under its new lease. One that was requested before it was settled must be
        confirmed first.
        """
        here = {
            leased.offset: leased
            for other in self._leases
            if other is not lease and other.where == lease.where
            for leased in other.messages
            if not leased.is_settled
        }
        new: list[Message] = []
        for at, message in enumerate(lease.messages):
            copy = here.get(message.offset) or self._lost_in_progress.pop((*lease.where, message.offset), None)
            if copy is None:
                new.append(message)
            elif copy in self._not_renewed:
                self.done(copy)
                new.append(message)
            else:
                lease.messages[at] = copy
                self._transfer_to(lease, copy)
        unconfirmed = self.settling.possibly_settled(lease, {message.offset for message in new}, sent_at)
        if unconfirmed:
            self._confirm_later(lease, [message for message in new if message.offset in unconfirmed])
            new = [message for message in new if message.offset not in unconfirmed]
        return new

    def _transfer_to(self, lease: Lease, message: Message) -> None:
        before, message._lease = message._lease, lease
        if message.is_settled:
            # Its first lease was lost, and its place was free.
            message.is_settled = False
            return
        self._in_flight -= 1
        before.messages.remove(message)
        before.left -= 1
        if before.left == 0:
            self._finished(before)

    def _confirm(self, messages: Sequence[Message]) -> None:
        """Hold messages back until it is known whether they are leased, with others of the same lease."""
        for lease in {message._lease for message in messages}:
            waiting = [message for message in self._buffer if message._lease is lease]
            if waiting:
                self._buffer = deque(message for message in self._buffer if message._lease is not lease)
            self._confirm_later(lease, [*(message for message in messages if message._lease is lease), *waiting])

    def _confirm_later(self, lease: Lease, messages: list[Message]) -> None:
        self._unconfirmed.update(messages)
        task = self._loop.create_task(self._confirm_leases(lease, messages))
        self._confirmations.add(task)
        task.add_done_callback(self._confirmations.discard)

    async def _confirm_leases(self, lease: Lease, messages: list[Message]) -> None:
        """Hand out the messages that are leased once every pending settlement of them has its response.

        The broker decides: it does not extend the lease of a message that is settled, or leased to another worker.
        """
        offsets = {message.offset for message in messages}
        try:
            while settlements := self.settling.pending_for(lease, offsets):
                await settlements[0].ended()
            await self._extend(lease).ended()
        except asyncio.CancelledError:
            self._unconfirmed.difference_update(messages)
            for message in messages:
                self.settle_nowait(message, Verb.RETURN, 0, "the worker was stopped")
            raise
        self._unconfirmed.difference_update(messages)
        # `_on_lost` has given up messages that are no longer leased.
        leased = [message for message in messages if not message.is_settled]
        self._buffer += leased
        self._return_excess()
        if self._returns_buffered:
            self.return_buffered()
        self._wake(len(leased))

    def _renew(self, lease: Lease) -> None:
        """Extend the leases of unsettled messages when half of their time has passed."""
        if not self._extend(lease).is_complete:
            lease_s = lease.lease_s or self._lease_s
            lease.timer = self._loop.call_later(lease_s / 2, self._renew, lease)

    def _extend(self, lease: Lease) -> Completion:
        """Extend the leases of unsettled messages; they hold from now on when the broker has responded."""
        sent_at, not_renewed = monotonic(), self._not_renewed
        # The duration is given: another one may have been declared meanwhile, and these leases keep theirs.
        lease_s = lease.lease_s or self._lease_s
        lease_ms = int(lease_s * 1000)

        def extended() -> None:
            # `_on_lost` has given up messages that could not be extended.
            longer_s = fresh_until(sent_at, lease_ms) - lease.fresh_until
            if longer_s > 0:
                lease.fresh_until += longer_s
                if lease.deadline_ms is not None:
                    lease.deadline_ms += int(longer_s * 1000)

        completion = Completion(None, on_complete=extended)
        offsets = [
            message.offset for message in lease.messages if not message.is_settled and message not in not_renewed
        ]
        if offsets:
            lease.valid_until = max(lease.valid_until, sent_at + lease_s)
            self.settling.enqueue(Settlement(lease, offsets, Verb.EXTEND, lease_ms, completion=completion))
        else:
            completion.part_settled(None)
        return completion
