"""The subscriptions of a mirror, and the states of their queues.

The state of a queue never runs ahead of records. It is cut at what is readable here, and it is stored only after the
dead letters that it counts as written have arrived. The state of a queue of dead letters, in which redriven letters are
closed, is stored only after the queues that have got those messages back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set
from typing import Final, NamedTuple, Protocol
from uuid import UUID

from millstream.broker.mirror.declared_copies import ABSENT_TIMES
from millstream.broker.mirror.service import MirrorRun
from millstream.broker.mirror.source import Source, is_original, offer_pages
from millstream.core import push
from millstream.core.errors import (
    BrokerUnreachable,
    InvalidMirror,
    InvalidSetting,
    MillstreamError,
    RequestTimedOut,
    SubscriptionExists,
)
from millstream.core.ids import Epoch, NodeId
from millstream.core.mirror import Problem, listed
from millstream.core.setting import HIDDEN, check_destinations
from millstream.core.subscription import (
    DEAD_LETTER_TOPIC,
    LETTERS_PREFIX,
    QueueKey,
    Subscription,
    SubscriptionSettings,
    topic_of_start,
)
from millstream.core.topic import Topic, TopicPartition
from millstream.protocol.private.mirror_messages import OfferedSubscription, OfferRequest, OfferResponse, QueueSnapshot

Vector = Mapping[str, Mapping[int, int]]
"""An offset of each partition, by topic."""

WAITING_BYTES_MAX: Final = 64 * 1024 * 1024
"""The size of the states that wait for others; more of them are read again later."""
SETTLED_S: Final = 30.0
"""The longest time for which a planned switch or failover waits for the states of queues."""
SETTLED_PAUSE_S: Final = 0.1
LATE_ROUNDS: Final = 20
"""After how many rounds it is reported that a state waits for dead letters."""
LETTERS_NOTE: Final = "queues wait for dead letters"
"""The key of the note about it."""


def _secrets_for_another_endpoint(known: Subscription, changes: dict[str, str | None]) -> str:
    """Drop a change of the endpoint to which secrets that were set here would be sent; return why it is dropped."""
    if push.URL in changes:
        try:
            check_destinations(SubscriptionSettings, {*known.overrides, *known.sealed}, known.overrides, changes)
        except InvalidSetting as error:
            del changes[push.URL]
            return str(error)
    return ""


class ReachedOffsets(Protocol):
    """Returns the offsets that the copies on all nodes have reached."""

    def __call__(self, offsets: Vector, *, is_readable: bool) -> Awaitable[Vector]: ...


class _WaitingState(NamedTuple):
    """The state of a queue that waits for dead letters, or of a queue of dead letters."""

    queue: QueueSnapshot
    letters: str
    read_in: int
    ends: Mapping[TopicPartition, int] = {}
    """The ends of the dead letter topic at the source, read after the state."""


class MirroredQueues:
    """Carries over the subscriptions of a source, while this node owns the mirror."""

    def __init__(self, run: MirrorRun, source: Source, reached: ReachedOffsets) -> None:
        self._run = run
        self._service = run.service
        self._settings = run.settings
        self._source = source
        self._reached = reached
        self._syncing = asyncio.Lock()
        """Held during a round, so that no state replaces a newer one."""
        self._round = 0
        self._stored: dict[QueueKey, int] = {}
        """The last write of each queue whose state is stored here as a whole."""
        self._cut_at: dict[QueueKey, tuple[int, int]] = {}
        """The offset at which each queue's state was cut, and the number of the write that it belongs to."""
        self._waiting: dict[QueueKey, _WaitingState] = {}
        """The states of queues whose dead letters have not arrived; later ones are read when these are stored."""
        self._stored_in: dict[QueueKey, int] = {}
        """The round in which the stored state of a queue was read, of those that had to wait."""
        self._letter_states: dict[QueueKey, _WaitingState] = {}
        """The states of queues of dead letters that are not stored yet."""
        self._unread: dict[QueueKey, str] = {}
        """Queues with later states than those that are kept, in this round, and their dead letter topics."""
        self._absent: dict[UUID, int] = {}
        """Subscriptions of the source, and how often in a row each was missing."""
        self._has_hidden = False
        """Whether the source has subscriptions that the user of the mirror may not read."""

    async def sync_subscriptions(self) -> None:
        """Carry over subscriptions and the state of each of their messages, never beyond what is readable here."""
        async with self._syncing:
            await self._sync()

    async def sync_all(self, topics: Collection[str]) -> None:
        """Carry over everything that the source has now; raise if that takes too long in one of these topics."""
        clock = self._service.clock
        deadline = clock.monotonic() + SETTLED_S
        await self.sync_subscriptions()
        first = self._round
        while (late := self._find_unsettled(topics, first)) is not None:
            if clock.monotonic() >= deadline:
                raise RequestTimedOut(f"the states of queues of {late!r} wait for dead letters that have not arrived")
            await asyncio.sleep(SETTLED_PAUSE_S)
            await self.sync_subscriptions()

    def forget(self, is_gone: Callable[[QueueKey], bool]) -> None:
        """Forget that states were stored, so that they are stored again: their queues were deleted here."""
        for known in (self._stored, self._cut_at, self._waiting, self._letter_states, self._stored_in):
            for key in [key for key in known if is_gone(key)]:
                del known[key]
        self._run.queues = len(self._stored)

    def _find_unsettled(self, topics: Collection[str], since: int) -> str | None:
        """Return one of these topics with a queue of which no state is stored that was read in a round or later."""
        names = {topic.topic_id: topic.name for topic in self._service.copied_topics(self._run.mirror.name)}
        for key in (*self._waiting, *self._letter_states, *self._unread):
            name = names.get(key.topic_id, "")
            if self._stored_in.get(key, 0) < since and name in topics:
                return name
        return None

    async def _sync(self) -> None:
        topics = {topic.topic_id: topic for topic in self._service.copied_topics(self._run.mirror.name)}
        if not topics:
            return
        self._round += 1
        self._unread.clear()
        self._has_hidden = False
        unreachable: BrokerUnreachable | None = None
        offered: set[UUID] = set()
        for node in (await self._source.metadata([])).nodes:
            try:
                offered |= await self._read_node(node, topics)
            except BrokerUnreachable as error:
                unreachable = error
        await self._store_waiting(topics)
        self._run.queues = len(self._stored)
        if unreachable is not None:
            raise unreachable
        for known in (self._waiting, self._letter_states, self._stored_in):
            for key in [key for key in known if key.topic_id not in topics or key.subscription_id not in offered]:
                del known[key]
        await self._store_letters(topics)
        self._run.queues = len(self._stored)
        if self._settings.deletions and not self._has_hidden:
            await self._delete_subscriptions(offered)

    async def _read_node(self, node: NodeId, topics: Mapping[UUID, Topic]) -> set[UUID]:
        """Carry over what one node of the source has; return the subscriptions that it knows."""
        offered: set[UUID] = set()

        async def ask(request: OfferRequest) -> OfferResponse:
            return await self._source.ask(node, request, waits=True)

        async for offer in offer_pages(ask, topics, self._stored):
            self._has_hidden |= offer.has_hidden
            for subscription in offer.subscriptions:
                offered.add(subscription.subscription_id)
                await self._sync_subscription(subscription)
            await self._apply_page(offer, topics)
        return offered

    async def _apply_page(self, offer: OfferResponse, topics: Mapping[UUID, Topic]) -> None:
        """Store the states of queues without dead letters, and keep the others until they may be stored."""
        of_letters = {
            subscription.subscription_id
            for subscription in offer.subscriptions
            if subscription.name.startswith(LETTERS_PREFIX)
        }
        letters = {
            subscription.subscription_id: subscription.settings[DEAD_LETTER_TOPIC]
            for subscription in offer.subscriptions
            if self._copies_letters(subscription.settings.get(DEAD_LETTER_TOPIC, ""))
        }
        plain, fresh = list[QueueSnapshot](), list[QueueSnapshot]()
        for queue in offer.queues:
            key = queue.key
            if key.subscription_id in of_letters:
                topic = topics.get(key.topic_id)
                if topic is None or key in self._letter_states or not self._has_room(queue):
                    self._unread[key] = ""
                else:
                    self._letter_states[key] = _WaitingState(queue, topic.name, self._round)
            elif key.subscription_id not in letters:
                plain.append(queue)
            elif key in self._waiting:
                self._unread[key] = letters[key.subscription_id]
            else:
                fresh.append(queue)
        await self._store(plain, topics)
        if not fresh:
            return
        ends = await self._letter_ends({letters[snapshot.key.subscription_id] for snapshot in fresh})
        for snapshot in fresh:
            name = letters[snapshot.key.subscription_id]
            if name in ends and self._has_room(snapshot):
                self._waiting[snapshot.key] = _WaitingState(snapshot, name, self._round, ends[name])
            else:
                self._unread[snapshot.key] = name

    def _has_room(self, queue: QueueSnapshot) -> bool:
        kept = (*self._waiting.values(), *self._letter_states.values())
        return (
            not kept
            or sum(len(waiting_state.queue.snapshot) for waiting_state in kept) + len(queue.snapshot)
            <= WAITING_BYTES_MAX
        )

    def _copies_letters(self, name: str) -> bool:
        """Whether this mirror copies a dead letter topic, or will as soon as it exists."""
        copy = self._service.topics.get(name)
        if copy is None:
            # A note says why a topic is not copied.
            return bool(name) and not self._settings.excludes(name) and f"topic {name}" not in self._run.notes
        return copy.mirror == self._run.mirror.name

    async def _letter_ends(self, names: Iterable[str]) -> dict[str, dict[TopicPartition, int]]:
        """Return the end offsets of dead letter topics at the source, except those that cannot be copied now."""
        partitions_of: dict[str, list[TopicPartition]] = {name: [] for name in names}
        for name, original in (await self._source.metadata(partitions_of)).topics.items():
            copy = self._service.topics.get(name)
            if copy is not None and not is_original(copy, original):
                # It was recreated, which the copier reports.
                del partitions_of[name]
            else:
                partitions_of[name] = [TopicPartition(name, index) for index in original.partitions]
        ends = await self._source.ends([where for partitions in partitions_of.values() for where in partitions])
        return {
            name: {where: ends[where] for where in partitions}
            for name, partitions in partitions_of.items()
            if all(where in ends for where in partitions)
        }

    async def _store_waiting(self, topics: Mapping[UUID, Topic]) -> None:
        """Store the states of queues whose dead letters have arrived."""
        self._run.notes.pop(LETTERS_NOTE, None)
        if not self._waiting:
            return
        reached = await self._reached({}, is_readable=True)
        ready, late = list[QueueSnapshot](), set[str]()
        for waiting_state in self._waiting.values():
            if all(reached.get(at.topic, {}).get(at.partition, 0) >= end for at, end in waiting_state.ends.items()):
                ready.append(waiting_state.queue)
            elif self._round - waiting_state.read_in >= LATE_ROUNDS:
                late.add(waiting_state.letters)
        for key in await self._store(ready, topics):
            self._stored_in[key] = self._waiting.pop(key).read_in
        if late:
            self._run.notes[LETTERS_NOTE] = (
                f"the states of queues wait, because dead letters in {', '.join(sorted(late))} have not arrived"
            )

    async def _store_letters(self, topics: Mapping[UUID, Topic]) -> None:
        """Store the states of queues of dead letters, if those of the queues that wrote the letters are not older."""
        behind = {**self._unread, **{key: waiting_state.letters for key, waiting_state in self._waiting.items()}}
        ready = [
            letter_state.queue
            for letter_state in self._letter_states.values()
            if letter_state.read_in < self._round
            and all(
                self._stored_in.get(key, 0) > letter_state.read_in
                for key, letters in behind.items()
                if letters == letter_state.letters
            )
        ]
        for key in await self._store(ready, topics):
            self._stored_in[key] = self._letter_states.pop(key).read_in

    async def _store(self, queues: Sequence[QueueSnapshot], topics: Mapping[UUID, Topic]) -> list[QueueKey]:
        """Store states of queues, cut at what is readable here; return those that are stored now."""
        places = {
            TopicPartition(topics[key.topic_id].name, key.partition)
            for key in (queue.key for queue in queues)
            if key.topic_id in topics
        }
        exposed = await self._service.exposed_offsets(places)
        stored: list[QueueKey] = []
        for queue in queues:
            key = queue.key
            topic = topics.get(key.topic_id)
            where = None if topic is None else TopicPartition(topic.name, key.partition)
            if topic is None or where is None or where not in exposed:
                continue
            state = self._service.topics.state_of(topic, where.partition)
            now = self._service.topics.get(topic.name)
            if state is None or now is None or now.mirror != self._run.mirror.name or now.is_draining:
                continue
            # Not loaded earlier: a mirror without queues needs none of it.
            from millstream.broker.subscriptions.snapshot import cut_snapshot

            if self._cut_at.get(key) != (queue.sequence, exposed[where]):
                snapshot, is_cut = await asyncio.to_thread(cut_snapshot, queue.snapshot, exposed[where])
                await self._service.subscriptions.write_state(key, Epoch(state.leader_epoch), snapshot)
                if is_cut:
                    self._cut_at[key] = queue.sequence, exposed[where]
                else:
                    self._cut_at.pop(key, None)
                    self._stored[key] = queue.sequence
            stored.append(key)
        return stored

    async def _delete_subscriptions(self, offered: Set[UUID]) -> None:
        """Delete subscriptions that the source had, and no longer has."""
        self._absent.update(dict.fromkeys(offered, 0))
        for subscription in self._service.subscriptions.declared.all():
            if self._originals(subscription.topics):
                continue
            if subscription.subscription_id in self._absent and subscription.subscription_id not in offered:
                self._absent[subscription.subscription_id] += 1
                if self._absent[subscription.subscription_id] >= ABSENT_TIMES:
                    await self._service.subscriptions.delete(subscription.name, force=True)

    def _originals(self, names: Iterable[str]) -> list[str]:
        """Return which topics are this cluster's own and never were copies: the source has no say over those."""
        topics = ((name, self._service.topics.get(name)) for name in names)
        return [name for name, topic in topics if topic is not None and not (topic.mirror or topic.origins)]

    async def _sync_subscription(self, offered: OfferedSubscription) -> None:
        declared, key = self._service.subscriptions.declared, f"subscription {offered.name}"
        known = declared.get(offered.name)
        is_other = known is not None and known.subscription_id != offered.subscription_id
        originals = self._originals(offered.topics)
        topics = [name for name in offered.topics if name not in originals]
        unsent = ""
        try:
            if not topics:
                raise InvalidMirror(f"all its topics are topics of this cluster here, not copies: {listed(originals)}")
            if is_other and offered.name.startswith(LETTERS_PREFIX):
                # Declared by a command here before the source had it. The letters of a copy are open or closed there.
                await declared.delete(offered.name)
                known = None
            if known is None:
                await declared.create(
                    offered.name,
                    topics,
                    offered.settings,
                    starts={
                        start: tuple(offsets)
                        for start, offsets in offered.starts.items()
                        if topic_of_start(start) in topics
                    },
                    subscription_id=offered.subscription_id,
                )
                self.forget(lambda key: key.subscription_id == offered.subscription_id)
            elif is_other:
                raise SubscriptionExists(
                    "a subscription of this name with another id exists here. If it is the copy of one that was "
                    f"deleted at the source, `millstream subscription delete {offered.name} --force` here lets the "
                    "mirror copy the new one"
                )
            else:
                shown = known.shown_overrides()
                changes: dict[str, str | None] = {
                    **{name: None for name in shown if name not in offered.settings and shown[name] != HIDDEN},
                    **{name: text for name, text in offered.settings.items() if shown.get(name) != text},
                }
                unsent = _secrets_for_another_endpoint(known, changes)
                if changes or known.topics != tuple(topics):
                    if own := self._originals(known.topics):
                        raise SubscriptionExists(
                            f"it is not changed as at the source, because it also has topics of this cluster: "
                            f"{listed(own)}"
                        )
                    if DEAD_LETTER_TOPIC in changes:
                        await self._service.subscriptions.track_letters_of(offered.name)
                    await declared.alter(offered.name, changes, topics=topics)
            self._run.notes.pop(key, None)
            if unsent:
                self._run.notes[f"{key}, push"] = Problem(
                    f"subscription {offered.name!r} keeps its {push.URL}, which differs from the source's: {unsent}"
                )
            else:
                self._run.notes.pop(f"{key}, push", None)
            if originals:
                self._run.notes[key] = (
                    f"subscription {offered.name!r} is mirrored without {listed(originals)}, which here are topics of "
                    "this cluster and not copies"
                )
        except MillstreamError as error:
            self._run.notes[key] = Problem(f"subscription {offered.name!r}: {error}")
