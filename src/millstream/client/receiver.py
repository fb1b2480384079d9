"""Receives the messages of a subscription from all nodes of a cluster, as many as there is credit for.

All nodes together are never asked for more than the credit that is left. How much is held ahead follows the handlers:
quick ones get many messages at a time, slow ones few, so that other workers have something to do as well.
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

from millstream.client.held import Held
from millstream.client.leased_records import read_leased
from millstream.client.message import Message
from millstream.client.settling import REPEATED, Awaited, Order, Settling
from millstream.core.errors import InvalidRecordState, MillstreamError, ProtocolViolation
from millstream.core.ids import NodeId
from millstream.core.subscription import AT_MOST_ONCE
from millstream.core.verb import Verb
from millstream.protocol.private.leasing import Leased, LeaseRequests, fresh_until
from millstream.protocol.private.subscription_messages import LeasedRange, PartitionMessages, Receive
from millstream.protocol.wire.client import BACKOFF_S_MAX, BACKOFF_S_MIN, Client
from millstream.protocol.wire.refusal import refusal

_logger = logging.getLogger(__name__)


WAIT_MS: Final = 30_000

_ANSWER_S_MAX: Final = 30.0

_BYTES_MAX: Final = 1024 * 1024

_NODES_S: Final = 5.0

"""How often the nodes of the cluster are asked for at most."""


_LAST_ANSWER_S: Final = 1.0

"""How long the end waits for an answer that may be on its way with messages; nodes hang up sooner if there is none."""


Share = Callable[[int, int], int]

"""How many messages one more node may be asked for, while so many are asked for already, of so many nodes."""


TakeIn = Callable[[NodeId, Leased], None]

"""Called with what a node gives."""


class Polls:
    """The polls of one worker, one for each node."""

    def __init__(
        self,
        client: Client,
        subscription: str,
        worker: str,
        *,
        share: Share,
        take_in: TakeIn,
        failed: Callable[[MillstreamError], None],
    ) -> None:
        self._client = client
        self._subscription = subscription
        self._worker = worker
        self._share = share
        self._take_in = take_in
        self._failed = failed
        """Told why nothing comes any more."""
        self._loop = asyncio.get_running_loop()
        self.hungry: deque[asyncio.Future[int]] = deque()
        """Polls that wait for credit; each is told how many messages it may ask for."""
        self.is_stopping = False
        """Whether nobody is asked any more."""
        self.asked = 0
        """How many messages are asked for."""
        self._tasks: dict[NodeId, asyncio.Task[None]] = {}
        self._requests = LeaseRequests()
        self._sent: dict[NodeId, float] = {}
        """When the requests that have no answer yet were begun."""
        self._asked_nodes = 0.0

    async def follow_nodes(self) -> Collection[NodeId]:
        """Have one poll for each node that the cluster has now."""
        self._asked_nodes = self._loop.time()
        nodes = (await self._client.metadata(())).nodes
        for node in nodes:
            if node not in self._tasks and not self.is_stopping:
                task = self._tasks[node] = self._loop.create_task(self._poll(node))
                task.add_done_callback(partial(self._ended, node))
        return nodes

    def feed(self) -> None:
        """Let polls ask for what there is room for."""
        while self.hungry and not self.is_stopping and (share := self._share(self.asked, len(self._tasks))):
            waiting = self.hungry.popleft()
            if not waiting.done():
                self.asked += share
                waiting.set_result(share)

    def withdraw(self) -> None:
        """Have nodes answer at once; there may be nothing that messages could be asked for with."""
        self._requests.withdraw()

    def oldest_sent(self) -> float:
        """When the oldest request was begun that has no answer yet; infinity if there is none."""
        return min(self._sent.values(), default=inf)

    async def stop(self) -> None:
        """Ask for no more; what nodes have leased by then is taken in, or returned if it comes too late."""
        self.is_stopping = True
        tasks = list(self._tasks.values())
        self._requests.withdraw()
        for waiting in self.hungry:
            if not waiting.done():
                waiting.set_result(0)
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=_LAST_ANSWER_S)
        finally:
            for task in tasks:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def close(self) -> None:
        """Return what arrives too late."""
        await self._requests.close(_LAST_ANSWER_S)

    def _ended(self, node: NodeId, task: asyncio.Task[None]) -> None:
        self._tasks.pop(node, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.is_stopping = True
            told = error if isinstance(error, MillstreamError) else ProtocolViolation(f"receiving failed: {error!r}")
            self._failed(told)

    async def _poll(self, node: NodeId) -> None:
        pause_s = 0.0
        while not self.is_stopping:
            wanted = await self._reserve()
            if not wanted:
                continue
            leased: Leased | None = None
            self._sent[node] = monotonic()
            try:
                leased = await self._ask(node, wanted)
                pause_s = 0.0
            except REPEATED as error:
                _logger.debug("node %s gives nothing of %r for now: %s", node, self._subscription, error)
                pause_s = min(max(BACKOFF_S_MIN, pause_s * 2), BACKOFF_S_MAX)
            finally:
                self.asked -= wanted
                del self._sent[node]
            if leased is not None:
                self._take_in(node, leased)
            # What this node did not give may be asked of another one.
            self.feed()
            if not await self._is_there(node):
                return
            if pause_s:
                await asyncio.sleep(pause_s)

    async def _is_there(self, node: NodeId) -> bool:
        """Whether the cluster still has a node; others that it has got are asked from now on."""
        if self._loop.time() - self._asked_nodes < _NODES_S:
            return True
        try:
            return node in await self.follow_nodes()
        except REPEATED:
            return True

    async def _reserve(self) -> int:
        """How many messages to ask for; waits until there is room, behind the polls that wait already."""
        waiting: asyncio.Future[int] = self._loop.create_future()
        self.hungry.append(waiting)
        self.feed()
        return await waiting

    async def _ask(self, node: NodeId, wanted: int) -> Leased:
        request = Receive(self._subscription, self._worker, wanted, _BYTES_MAX, WAIT_MS)
        pool = await self._client.pool_of(node)
        leased = await self._requests.ask(pool, request, timeout_s=WAIT_MS / 1000 + _ANSWER_S_MAX)
        if leased.answer.error:
            raise refusal(leased.answer.error, leased.answer.message, about=f"subscription {self._subscription!r}")
        return leased


_is_settled = attrgetter("is_settled")


_QUICK_S: Final = 0.25

_SLOW_S: Final = 2.0


class Receiver:
    """Takes messages of one subscription for one worker."""

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
        self._client = client
        self.subscription = subscription
        self.worker = worker
        self._credit = max(1, credit)
        """How many messages are held at most."""
        self._ahead_min = min(self._credit, max(1, ahead))
        self._ahead = self._ahead_min
        """How many of them wait here at most; it follows how quickly they are settled."""
        self._low = self._ahead * 3 // 4
        """When so few wait, more are asked for."""
        self._lease_s = lease_s
        """How long leases last; every answer tells what is declared then."""
        self._is_settled_at_once = delivery == AT_MOST_ONCE
        self._loop = asyncio.get_running_loop()
        self._buffer: deque[Message] = deque()
        self._held = 0
        self._polls = Polls(client, subscription, worker, share=self._share, take_in=self._take_in, failed=self._failed)
        self.settling = Settling(client, subscription, worker, lost=self._lost, oldest_sent=self._polls.oldest_sent)
        self._hungry, self._feed = self._polls.hungry, self._polls.feed
        self._idle: deque[asyncio.Future[None]] = deque()
        """Workers that wait for a message."""
        self._left_alone: dict[Message, asyncio.TimerHandle] = {}
        """Messages whose lease is not renewed any more, and what is due when it is over."""
        self._helds: set[Held] = set()
        """All of which a message is not settled."""
        self._empty = asyncio.Event()
        """Set when the last of them is."""
        self._last_seen: dict[tuple[bytes, int], int] = {}
        """The last message that each partition has given; what comes from before it may be here, or settled."""
        self._unsure: set[Message] = set()
        """Messages that nobody gets before it is known whether they are leased."""
        self._sures: set[asyncio.Task[None]] = set()
        """What finds that out."""
        self._lost_in_hand: dict[tuple[bytes, int, int], Message] = {}
        """Messages that somebody works on although their lease was lost."""
        self._limit: int | None = None
        """How many messages may wait here, while the handler fails for everything."""
        self._stopping = False
        self._puts_back = False
        self.error: MillstreamError | None = None
        """Why nothing comes any more."""

    async def start(self) -> None:
        """Begin to receive from every node."""
        await self._polls.follow_nodes()

    def leave_alone(self, message: Message) -> None:
        """Do not renew the lease of a message any more; whoever took it went on to the next one."""
        if self._lost_in_hand:
            self._out_of_hand(message)
        if not message.is_settled and message not in self._left_alone:
            left_s = message._held.valid_until - monotonic()
            self._left_alone[message] = self._loop.call_later(left_s, self.done, message)

    def leave_alone_all(self, messages: Sequence[Message]) -> None:
        """The same of several, of which most are settled."""
        if self._lost_in_hand or not all(map(_is_settled, messages)):
            for message in messages:
                self.leave_alone(message)

    # -- messages -------------------------------------------------------------------------------------------

    def take(self) -> Message | None:
        """The next message, if one is here."""
        buffer = self._buffer
        while buffer:
            message = buffer.popleft()
            if self._hungry and (len(buffer) == self._low or not buffer):
                self._feed()
            if message.is_settled:
                continue
            if monotonic() >= message._held.fresh_until:
                # Its lease may be over, and somebody else may have it by now.
                self._confirm([message])
                continue
            if self._is_settled_at_once:
                self.done(message)
            return message
        return None

    def take_many(self, count: int) -> list[Message]:
        """The next messages, at most so many; none if none are here."""
        buffer = self._buffer
        taken = [buffer.popleft() for _ in range(min(count, len(buffer)))]
        now = monotonic()
        if any(map(_is_settled, taken)) or any(now >= held.fresh_until for held in self._helds):
            taken = [one for one in taken if not one.is_settled]
            self._confirm([one for one in taken if now >= one._held.fresh_until])
            taken = [one for one in taken if now < one._held.fresh_until]
        if self._is_settled_at_once:
            for message in taken:
                self.done(message)
        if self._hungry:
            self._feed()
        return taken

    async def arrival(self) -> None:
        """Wait until there may be a message, or the end."""
        waiting: asyncio.Future[None] = self._loop.create_future()
        self._idle.append(waiting)
        if self._hungry:
            self._feed()
        try:
            await waiting
        except asyncio.CancelledError:
            if waiting.cancelled():
                self._idle.remove(waiting)
            else:
                # The message is for whoever else waits.
                self._wake(1)
            raise

    @property
    def is_over(self) -> bool:
        """Whether no message will come any more."""
        return (self._stopping or self.error is not None) and not self._buffer

    def done(self, message: Message) -> None:
        """A message is settled or given up: its place is free for another."""
        if message.is_settled:
            return
        message.is_settled = True
        if self._left_alone and (due := self._left_alone.pop(message, None)) is not None:
            due.cancel()
        self._held -= 1
        held = message._held
        held.left -= 1
        if held.left == 0:
            self._finished(held)
        if self._hungry and not self._buffer:
            self._feed()

    def accept(self, message: Message) -> None:
        """A message is done, and nobody waits for the answer: it is told with others that came with it."""
        if message.is_settled:
            self._out_of_hand(message)
            return
        held = message._held
        order = held.accepting or self.settling.accepting(held)
        order.offsets.append(message.offset)
        message.is_settled = True
        self._held -= 1
        held.left -= 1
        if held.left == 0:
            self._finished(held)
        if self._hungry and not self._buffer:
            self._feed()

    def settle(self, message: Message, verb: int, delay_ms: int | None, reason: str) -> asyncio.Future[None]:
        """Tell the broker; the future ends when it is durable."""
        if verb != Verb.EXTEND:
            self.done(message)
        else:
            lease_s = self._lease_s if delay_ms is None else delay_ms / 1000
            message._held.valid_until = max(message._held.valid_until, monotonic() + lease_s)
            if self._left_alone and (due := self._left_alone.pop(message, None)) is not None:
                due.cancel()
                self._left_alone[message] = self._loop.call_later(lease_s, self.done, message)
        if self._is_settled_at_once:
            answer: asyncio.Future[None] = self._loop.create_future()
            answer.set_result(None)
            return answer
        return self.settling.settle(message, verb, delay_ms, reason)

    def accept_many(self, messages: Sequence[Message]) -> list[asyncio.Future[None]]:
        """Tell the broker that messages are done; the futures end when that is durable.

        One fails if there are messages that were settled before, or whose lease is over; the others are told.
        """
        refused = [message for message in messages if message.is_settled and message._held.is_leased]
        by_held: dict[Held, list[int]] = {}
        held: Held | None = None
        for message in messages:
            if not message.is_settled:
                message.is_settled = True
                if message._held is not held:
                    # Those that came together mostly stand together.
                    held = message._held
                    add = by_held.setdefault(held, []).append
                add(message.offset)
                if self._left_alone and (due := self._left_alone.pop(message, None)) is not None:
                    due.cancel()
        answers: list[asyncio.Future[None]] = []
        for held, offsets in by_held.items():
            answers.append(self._loop.create_future())
            self.settling.tell(Order(held, offsets, Verb.ACCEPT, awaited=Awaited(answers[-1])))
            self._held -= len(offsets)
            held.left -= len(offsets)
            if held.left == 0:
                self._finished(held)
        if self._hungry:
            self._feed()
        if refused:
            answers.append(self._loop.create_future())
            Awaited(answers[-1]).told(
                InvalidRecordState(
                    f"{len(refused)} of {len(messages)} messages are settled already, or their lease is over; "
                    f"the first is {refused[0].id}"
                )
            )
        return answers

    def tell(self, message: Message, verb: int, delay_ms: int | None = None, reason: str = "") -> None:
        """As `settle`, for whoever does not wait for the answer."""
        if message.is_settled:
            self._out_of_hand(message)
        else:
            self.done(message)
            if not self._is_settled_at_once:
                self.settling.tell(Order(message._held, [message.offset], verb, delay_ms, reason))

    def _finished(self, held: Held) -> None:
        """All messages of one answer are settled: by how long that took, hold more or fewer ahead."""
        if held.timer is not None:
            held.timer.cancel()
        held.messages.clear()
        self._helds.discard(held)
        if not self._helds:
            self._empty.set()
        took_s = monotonic() - held.received
        if took_s < _QUICK_S:
            self._ahead = min(self._credit, self._ahead * 2)
        elif took_s > _SLOW_S:
            self._ahead = max(self._ahead_min, self._ahead // 2)
        self._low = self._ahead * 3 // 4
        if self._hungry:
            self._feed()

    def _lost(self, order: Order) -> None:
        """Messages that are still here have no lease any more."""
        offsets = set(order.offsets)
        lost = [one for one in order.held.messages if one.offset in offsets and not one.is_settled]
        waiting = {*self._buffer, *self._unsure, *self._left_alone} if lost else set()
        for message in lost:
            if message not in waiting:
                self._lost_in_hand[*order.held.where, message.offset] = message
            self.done(message)

    def _out_of_hand(self, message: Message) -> None:
        """Nobody works on a message any more."""
        key = (*message._held.where, message.offset)
        if self._lost_in_hand.get(key) is message:
            del self._lost_in_hand[key]

    def throttle(self, limit: int | None) -> None:
        """Have at most so many messages wait here, and return the others; None for as many as usual."""
        self._limit = limit
        if limit is None or limit > 0:
            self._feed()
        else:
            self._polls.withdraw()
        self._return_excess()

    def _return_excess(self) -> None:
        if self._limit is not None and not self._is_settled_at_once:
            while len(self._buffer) > self._limit:
                self.tell(self._buffer.pop(), Verb.RETURN, 0, "the handler fails for every message")

    # -- the end --------------------------------------------------------------------------------------------

    def put_back(self) -> None:
        """Ask for no more, and return what waits here, unless it is done already: then it is still to be taken."""
        self._stopping = self._puts_back = self._polls.is_stopping = True
        if not self._is_settled_at_once:
            self._return_all()

    async def stop(self) -> None:
        """Ask for no more; what is here may still be taken."""
        self._stopping = True
        await self._polls.stop()
        # Nothing is known of what these would have confirmed: they return it.
        sures = list(self._sures)
        for sure in sures:
            sure.cancel()
        await asyncio.gather(*sures, return_exceptions=True)
        self._wake(len(self._idle))

    async def give_back(self) -> None:
        """Stop, and return what nobody has taken, so that others get it at once."""
        await self.stop()
        self._return_all()
        await self.settling.flush()

    def _return_all(self) -> None:
        while self._buffer:
            self.tell(self._buffer.popleft(), Verb.RETURN, 0, "the worker was stopped")

    async def leave(self) -> None:
        """Give back what nobody has taken, and close when what was taken is settled or its lease is over."""
        await self.give_back()
        for held in list(self._helds):
            for message in held.messages:
                self.leave_alone(message)
        while self._helds:
            self._empty.clear()
            await self._empty.wait()
        await self.settling.flush()
        await self.close()

    async def close(self) -> None:
        """Stop, and give up what is not settled."""
        await self.stop()
        self._buffer.clear()
        for held in list(self._helds):
            for message in list(held.messages):
                self.done(message)
        self._lost_in_hand.clear()
        await self._polls.close()
        await self.settling.close()

    # -- receiving ------------------------------------------------------------------------------------------

    def _failed(self, error: MillstreamError) -> None:
        _logger.error("subscription %r delivers nothing any more: %s", self.subscription, error)
        self.error = error
        self._wake(len(self._idle))

    def _share(self, asked: int, nodes: int) -> int:
        """How many messages one more node may be asked for, while others are; 0 if too few to be worth a request."""
        waiting = len(self._buffer)
        if self._limit is not None:
            return int(self._held < self._credit and waiting + len(self._unsure) + asked < self._limit)
        room = self._ahead - waiting - asked
        credit = self._credit - self._held - asked
        free = min(room, credit)
        if free > 0 and (waiting == 0 or free * 4 >= self._ahead):
            return max(1, free // max(1, nodes))
        # Somebody waits for a message, and nobody knows which node will have one: each is asked for one at least, so
        # as many may come too many as there are nodes.
        return 1 if self._idle and not waiting and self._held < self._credit else 0

    def _take_in(self, node: NodeId, leased: Leased) -> None:
        before = len(self._buffer)
        for part in leased.answer.partitions:
            if part.lease_ms is not None:
                self._lease_s = part.lease_ms / 1000
            attempts = {lease.attempt for lease in part.leases}
            if len(attempts) == 1:
                self._buffer += self._hold(node, part, part.leases, leased)
                continue
            messages: list[Message] = []
            for attempt in attempts:
                leases = [lease for lease in part.leases if lease.attempt == attempt]
                messages += self._hold(node, part, leases, leased)
            self._buffer += sorted(messages, key=attrgetter("offset"))
        self._return_excess()
        if self._puts_back:
            self.put_back()
        self._wake(len(self._buffer) - before)

    def _hold(
        self, node: NodeId, part: PartitionMessages, leases: list[LeasedRange], leased: Leased
    ) -> Sequence[Message]:
        """Read messages and keep their leases, all of the same delivery; says which of them are to be handed out."""
        now = monotonic()
        held = Held(
            part.topic,
            part.topic_id,
            part.partition,
            settler=self,
            subscription=self.subscription,
            node=node,
            received=now,
            lease_s=None if self._is_settled_at_once else self._lease_s,
            fresh_until=leased.fresh_until(part),
            deadline_ms=min((lease.deadline_ms for lease in leases), default=None),
            attempt=leases[0].attempt,
        )
        messages = read_leased(part.batches, leases, held)
        if messages:
            held.messages = list(messages)
            held.left = len(messages)
            self._helds.add(held)
            self._held += len(messages)
            if not self._is_settled_at_once:
                # Half of what is left, if the answer was long on its way.
                left_s = min(self._lease_s, max(0.0, held.fresh_until - now))
                held.timer = self._loop.call_later(left_s / 2, self._renew, held)
                last_seen = self._last_seen.get(held.where, -1)
                self._last_seen[held.where] = max(last_seen, messages[-1].offset)
                if messages[0].offset <= last_seen:
                    messages = self._sifted(held, leased.sent_at)
                if now >= held.fresh_until:
                    self._confirm(messages)
                    return []
        return messages

    # -- what comes again -----------------------------------------------------------------------------------

    def _sifted(self, held: Held, asked: float) -> list[Message]:
        """Those that are neither here already nor settled; after a node's restart, messages are leased anew.

        A message that somebody has, or that waits here, goes on under its new lease. One that was asked for before it
        was settled has to be found out about.
        """
        here = {
            one.offset: one
            for other in self._helds
            if other is not held and other.where == held.where
            for one in other.messages
            if not one.is_settled
        }
        new: list[Message] = []
        for at, message in enumerate(held.messages):
            copy = here.get(message.offset) or self._lost_in_hand.pop((*held.where, message.offset), None)
            if copy is None:
                new.append(message)
            elif copy in self._left_alone:
                self.done(copy)
                new.append(message)
            else:
                held.messages[at] = copy
                self._go_on_under(held, copy)
        unsure = self.settling.in_doubt(held, {message.offset for message in new}, asked)
        if unsure:
            self._set_aside(held, [message for message in new if message.offset in unsure])
            new = [message for message in new if message.offset not in unsure]
        return new

    def _go_on_under(self, held: Held, message: Message) -> None:
        """A message that is here has got another lease, which counts from now on."""
        before, message._held = message._held, held
        if message.is_settled:
            # Its first lease was lost, and its place was free.
            message.is_settled = False
            return
        self._held -= 1
        before.messages.remove(message)
        before.left -= 1
        if before.left == 0:
            self._finished(before)

    def _confirm(self, messages: Sequence[Message]) -> None:
        """Find out whether messages are held before anybody gets them; others that came with them wait as well."""
        for held in {message._held for message in messages}:
            waiting = [one for one in self._buffer if one._held is held]
            if waiting:
                self._buffer = deque(one for one in self._buffer if one._held is not held)
            self._set_aside(held, [*(one for one in messages if one._held is held), *waiting])

    def _set_aside(self, held: Held, messages: list[Message]) -> None:
        self._unsure.update(messages)
        task = self._loop.create_task(self._make_sure(held, messages))
        self._sures.add(task)
        task.add_done_callback(self._sures.discard)

    async def _make_sure(self, held: Held, messages: list[Message]) -> None:
        """Hand out messages that are leased when everything that was said of them has its answer.

        The broker knows that: it extends no lease of a message that is settled, or another worker's by now.
        """
        offsets = {message.offset for message in messages}
        try:
            while orders := self.settling.open_about(held, offsets):
                await orders[0].ended()
            await self._extend(held).ended()
        except asyncio.CancelledError:
            self._unsure.difference_update(messages)
            for message in messages:
                self.tell(message, Verb.RETURN, 0, "the worker was stopped")
            raise
        self._unsure.difference_update(messages)
        # Those that are not leased any more have been given up by `_lost`.
        leased = [message for message in messages if not message.is_settled]
        self._buffer += leased
        self._return_excess()
        if self._puts_back:
            self.put_back()
        self._wake(len(leased))

    def _renew(self, held: Held) -> None:
        """Half of the time is over: extend the leases of what is not settled."""
        if not self._extend(held).is_ended:
            lease_s = held.lease_s or self._lease_s
            held.timer = self._loop.call_later(lease_s / 2, self._renew, held)

    def _extend(self, held: Held) -> Awaited:
        """Extend the leases of what is not settled; when the broker has answered, they hold from now on."""
        sent_at, left_alone = monotonic(), self._left_alone
        # The time is named: another lease may have been declared meanwhile, and these go on as they began.
        lease_s = held.lease_s or self._lease_s
        lease_ms = int(lease_s * 1000)

        def extended() -> None:
            # Messages that could not be extended have been given up by `_lost`.
            longer_s = fresh_until(sent_at, lease_ms) - held.fresh_until
            if longer_s > 0:
                held.fresh_until += longer_s
                if held.deadline_ms is not None:
                    held.deadline_ms += int(longer_s * 1000)

        awaited = Awaited(None, when_ended=extended)
        offsets = [one.offset for one in held.messages if not one.is_settled and one not in left_alone]
        if offsets:
            held.valid_until = max(held.valid_until, sent_at + lease_s)
            self.settling.tell(Order(held, offsets, Verb.EXTEND, lease_ms, awaited=awaited))
        else:
            awaited.told(None)
        return awaited

    def _wake(self, count: int) -> None:
        idle = self._idle
        while idle and count > 0:
            waiting = idle.popleft()
            if not waiting.done():
                waiting.set_result(None)
                count -= 1
