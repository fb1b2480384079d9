"""The tasks of a mirror as a whole: topics, settings, partitions, groups, queues and transactions.

Only the controller of the target runs them. Each may be repeated, so it does no harm if two nodes briefly consider
themselves the controller.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from typing import Final, NamedTuple

from millstream.broker.cluster.new_topics import NewTopic
from millstream.broker.mirror.declared_copies import ABSENT_TIMES, DeclaredCopies
from millstream.broker.mirror.queue_states import MirroredQueues, Vector
from millstream.broker.mirror.service import MirrorRun
from millstream.broker.mirror.source import Source, is_original, known_id
from millstream.core.errors import (
    AuthenticationFailed,
    BrokerUnreachable,
    GroupNotEmpty,
    InvalidMirror,
    MillstreamError,
    RequestTimedOut,
    TopicExists,
)
from millstream.core.ids import PartitionIndex
from millstream.core.mirror import Problem, listed
from millstream.core.tasks import gather_or_cancel, run_until_first, wait_up_to
from millstream.core.topic import INTERNAL_TOPICS, Topic, TopicPartition, TopicSettings
from millstream.protocol.private.mirror_messages import BarrierRequest, ExposeRequest, OfferRequest, OfferResponse
from millstream.protocol.wire.admin_requests import topic_configs
from millstream.protocol.wire.cluster_metadata import TopicMetadata
from millstream.protocol.wire.group_offsets import (
    MIRRORED,
    Commit,
    commit_offsets,
    commits_by_group,
    committed_by_group,
    list_groups,
)

Commits = dict[str, dict[TopicPartition, int]]

TOPICS_S: Final = 1.0
GROUPS_S: Final = 1.0
RECONNECT_S: Final = 30.0
"""After how long without a response the source is looked up again."""
DECLARED_S: Final = 2.0
QUEUES_S: Final = 0.5
TRANSACTIONS_S: Final = 0.2
"""How often the source is asked for a barrier, while clients wait at a commit."""
ARRIVAL_S: Final = 30.0
ARRIVAL_WAIT_S: Final = 5.0
NOTICE_LOST_S: Final = 5.0
"""After how long the owner asks all nodes whether clients wait at a commit, although none has reported it."""
HELD_BACK: Final = "offsets after a failover"
"""The key of the note that offsets of some groups are not applied any more."""
LEFT_OUT: Final = "offsets of transactions"
"""The key of the note that offsets of transactional groups are mirrored like those of other groups."""
CONFIGS_S: Final = 10.0


class Barrier(NamedTuple):
    """A moment at which no transaction of the source is half committed."""

    offsets: Vector
    """The high watermarks of the originals, by the names of their copies."""
    cut_off: Vector
    """The high watermarks of topics that were failed over, with which the mirror does not continue."""
    transactional: Commits
    """The groups for which transactions have committed offsets, and their offsets in the copies at that moment."""
    groups_omitted: bool
    """Whether these groups are unknown, because they have too many offsets."""


class Follower:
    """Runs the tasks of one mirror while this node is its owner."""

    def __init__(self, run: MirrorRun, source: Source) -> None:
        self._run = run
        self._service = run.service
        self._source = source
        self._settings = run.settings
        self._configs_at = 0.0
        self._committed: Commits = {}
        """The offsets of groups on the source, as last read."""
        self._applicable: Commits = {}
        """The offsets that may be applied: all transactions that committed them are readable here."""
        self._syncing = asyncio.Lock()
        """Held while offsets of groups are carried over: none are applied that were read before those applied last."""
        self._is_awaited = False
        """Whether a planned switch or failover waits for the lock; then a wait for copies to arrive ends early."""
        self._creating = asyncio.Lock()
        """Held while a copy is created, and while what was read of the source is recorded and applied."""
        self._created: set[str] = set()
        """The copies that were created since the source was last asked for offsets, which are not theirs."""
        self._waiting_at: set[tuple[str, int]] = set()
        """The copies at which clients wait at a commit."""
        self._queues = MirroredQueues(run, source, self._reached_offsets)
        self.pending: set[str] = set()
        """The tasks that have not compared topics, schemas or access rules with the source's yet."""
        self._absent: dict[str, int] = {}
        """Copies whose original is gone, and how often in a row it was missing."""

    async def run(self) -> None:
        """Run until cancelled or until the source cannot be reached."""
        comparing: list[tuple[Callable[[], Awaitable[None]], float]] = [(self._sync_topics, TOPICS_S)]
        copies = DeclaredCopies(self._run, self._source)
        if self._settings.acls:
            comparing.append((copies.sync_acls, DECLARED_S))
        if self._settings.schemas and self._source.is_millstream:
            comparing.append((copies.sync_schemas, DECLARED_S))
        self.pending = {work.__name__ for work, _ in comparing}
        work = [self._loop(*task) for task in comparing]
        if self._settings.groups:
            work.append(self._loop(self._sync_groups, GROUPS_S))
        if self._source.is_millstream:
            work.append(self._loop(self._sync_transactions, TRANSACTIONS_S, self._run.wants_barrier))
            if self._settings.subscriptions and not self._settings.rename:
                work.append(self._loop(self._queues.sync_subscriptions, QUEUES_S))
        await run_until_first(work)

    async def _loop(
        self, work: Callable[[], Awaitable[None]], pause_s: float, trigger: asyncio.Event | None = None
    ) -> None:
        """Repeat a task after a pause, or when an event is set, while this node is the owner."""
        what = f"{work.__name__.lstrip('_').removeprefix('sync_')} cannot be mirrored now"
        unreachable_since: float | None = None
        while True:
            if trigger is not None:
                # A notice may be lost with the node that was the owner.
                await wait_up_to(NOTICE_LOST_S, trigger)
                trigger.clear()
            if self._service.is_owner:
                try:
                    await work()
                    self._run.notes.pop(what, None)
                    unreachable_since = None
                except AuthenticationFailed:
                    raise
                except MillstreamError as error:
                    self._run.notes[what] = Problem(f"{what}: {error}")
                    if trigger is not None:
                        trigger.set()
                    if isinstance(error, BrokerUnreachable):
                        # One node of several may be down. If it is the whole source, another may come up in its place.
                        now = self._service.clock.monotonic()
                        unreachable_since = now if unreachable_since is None else unreachable_since
                        if now - unreachable_since > RECONNECT_S:
                            raise
                self.pending.discard(work.__name__)
            await asyncio.sleep(pause_s)

    async def sync_all(self, topics: Collection[str]) -> None:
        """Carry over everything but records a last time, for a planned switch or failover of some copies.

        For groups, this includes only the offsets in these copies, since other copies may be unable to catch up.
        """
        if self._settings.groups:
            self._is_awaited = True
            try:
                async with self._syncing:
                    await self._read_groups()
                    await self._forget_lost_offsets()
                    if self._source.is_millstream:
                        await self._sync_offsets_in(topics)
                    else:
                        await self._apply_applicable()
            finally:
                self._is_awaited = False
        if self._source.is_millstream and self._settings.subscriptions and not self._settings.rename:
            await self._queues.sync_all(topics)

    # -- topics ---------------------------------------------------------------------------------------------

    async def _sync_topics(self) -> None:
        metadata = await self._source.metadata()
        offer = OfferResponse()
        if self._source.is_millstream:
            offer = await self._source.ask(None, OfferRequest())
        mirrored = frozenset(offer.mirrored)
        now = self._service.clock.monotonic()
        checks_configs = now >= self._configs_at
        if checks_configs:
            self._configs_at = now + CONFIGS_S
        letters = self._mirrored_letter_topics(offer.letters)
        fenced = {topic for topic, mirror in offer.fenced.items() if mirror == self._run.mirror.name}
        self._run.fenced = sorted(fenced & {topic.name for topic in self._service.copied_topics(self._run.mirror.name)})
        for name, topic in sorted(metadata.topics.items()):
            if not self._is_mirrored(topic, letters):
                continue
            key = f"topic {name}"
            if name in self._run.fenced:
                self._run.notes.pop(key, None)
                continue
            if name in mirrored:
                note = f"topic {name!r} is a mirror's copy on the source, and is not mirrored again"
                # Sites that mirror each other have copies of each other's topics.
                is_ours = self._service.membership.cluster_id in offer.origins.get(name, ())
                advice = "mirror it from the cluster that writes it, or exclude it"
                self._run.notes[key] = note if is_ours else Problem(f"{note}; {advice}")
                continue
            try:
                await self._sync_topic(topic, offer.origins.get(name, ()), checks_configs=checks_configs)
                self._run.notes.pop(key, None)
            except MillstreamError as error:
                self._run.notes[key] = Problem(f"topic {name!r}: {error}")
        await self._sync_deletions(metadata.topics)

    def _is_mirrored(self, topic: TopicMetadata, letters: Set[str]) -> bool:
        if topic.is_internal or topic.name in INTERNAL_TOPICS:
            return False
        return self._settings.takes(topic.name) or topic.name in letters

    def _mirrored_letter_topics(self, origins: Mapping[str, Sequence[str]]) -> set[str]:
        """Return the dead letter topics of mirrored subscriptions, and note those that are excluded.

        The queues of these subscriptions count the messages in them as done, so they would be lost in a failover.
        """
        settings, mirrored = self._settings, set[str]()
        if not settings.subscriptions or settings.rename:
            return mirrored
        copied = {topic.name for topic in self._service.copied_topics(self._run.mirror.name)}
        while fresh := {
            letters
            for letters, topics in origins.items()
            if letters not in mirrored
            and any(name in mirrored or name in copied or settings.takes(name) for name in topics)
        }:
            mirrored |= fresh
        for letters in origins:
            self._run.notes.pop(f"letters {letters}", None)
        for letters in filter(settings.excludes, mirrored - copied):
            self._run.notes[f"letters {letters}"] = (
                f"dead letter topic {letters!r} is excluded, so the dead letters of mirrored subscriptions stay on the "
                "source; after a failover they are not here, and their messages are not delivered"
            )
        return {letters for letters in mirrored if not settings.excludes(letters)}

    async def _sync_topic(self, original: TopicMetadata, came_from: Sequence[str], *, checks_configs: bool) -> None:
        """Create a copy, or let it follow changes; `came_from` are the clusters from which the original was copied."""
        topics, name = self._service.topics, self._settings.rename + original.name
        copy, here = topics.get(name), self._service.membership.cluster_id
        passed = dict.fromkeys((*came_from, self._source.cluster_id))
        origins = tuple(cluster_id for cluster_id in passed if cluster_id != here)
        if copy is None:
            # A mirror that was reversed restores its copies, whose records came from here.
            if here in passed and name not in self._cuts() and not self._settings.returning:
                raise InvalidMirror(
                    "its records came from this cluster, so it is not copied back; use `millstream mirror reverse` on "
                    f"the source, or `millstream mirror update {self._run.mirror.name} --set returning=true`"
                )
            async with self._creating:
                await self._create(original, name, origins)
            return
        if copy.mirror != self._run.mirror.name:
            if copy.mirror:
                raise TopicExists(f"{name!r} is a copy of mirror {copy.mirror!r} here")
            if name in self._cuts():
                # It was failed over, and the description of the mirror says so.
                return
            if self._source.cluster_id in copy.origins:
                raise TopicExists(
                    f"{name!r} was failed over here when another mirror copied it, and is not copied again; to delete "
                    "it here would lose what was written since. To copy it the other way, delete it on the source, and "
                    "create a mirror of this cluster there with --set returning=true"
                )
            raise TopicExists(f"{name!r} already exists here; delete it, or mirror it under another name (--rename)")
        if not is_original(copy, original):
            # The copier reports the error.
            return
        original_id = copy.original_id or known_id(original)
        if copy.origins != origins or copy.original_id != original_id:
            await topics.set_origins(name, origins, original_id)
        if len(original.partitions) > copy.partitions:
            await topics.add_partitions(name, len(original.partitions))
            self._run.refreshed.set()
        if checks_configs:
            overrides = await self._overrides(original.name)
            if dict(copy.overrides) != overrides and copy.name in await self._following([copy]):
                await topics.alter(name, overrides, replace=True)

    async def _following(self, copies: Iterable[Topic]) -> set[str]:
        """Return the copies whose originals exist and were not recreated; everything that was read of them before is
        valid.

        The others are copies of topics that no longer exist.
        """
        originals = {self._run.mirror.source_name(copy): copy for copy in copies}
        now = (await self._source.metadata(originals)).topics
        return {copy.name for name, copy in originals.items() if name in now and is_original(copy, now[name])}

    async def _create(self, original: TopicMetadata, name: str, origins: tuple[str, ...]) -> None:
        service, settings = self._service, self._settings
        # A topic of this name may have been mirrored before; its offsets are not those of the new one.
        await service.mirrors.forget_topic(self._run.mirror.name, name)
        original_id = known_id(original)
        topic_id = None if settings.rename else original_id
        # Offsets that were read before may be those of a topic that had this name.
        self._created.add(name)
        self._committed, self._applicable = (
            _offsets_outside(self._committed, {name}),
            _offsets_outside(self._applicable, {name}),
        )
        new = NewTopic(
            name=name,
            partitions=len(original.partitions),
            replication=settings.replication or -1,
            original_replication=original.replication,
            overrides=await self._overrides(original.name),
            mirror=self._run.mirror.name,
            topic_id=topic_id,
            origins=origins,
            original_id=original_id,
        )
        [created] = await service.topics.create_all([new])
        if isinstance(created, MillstreamError):
            raise created
        self._queues.forget(lambda key: key.topic_id == topic_id)
        self._run.refreshed.set()

    async def _overrides(self, name: str) -> dict[str, str]:
        """Return the settings of a topic at the source that topics here also have."""
        overrides = {
            key: config.value
            for key, config in (await topic_configs(self._source.client, name)).items()
            if config.is_override and config.value is not None
        }
        usable: dict[str, str] = {}
        for key, text in overrides.items():
            try:
                TopicSettings.from_strings({key: text}, base=self._service.topics.defaults_for(1))
                usable[key] = text
            except MillstreamError as error:
                self._run.notes[f"setting {name} {key}"] = f"topic {name!r} is mirrored without {key}={text}: {error}"
        return usable

    async def _sync_deletions(self, originals: Mapping[str, TopicMetadata]) -> None:
        """Delete copies of deleted topics, if the mirror is set to; otherwise they stay as they are."""
        copies = {
            self._run.mirror.source_name(topic): topic for topic in self._service.copied_topics(self._run.mirror.name)
        }
        for name in self._absent.keys() - copies.keys():
            del self._absent[name]
            self._run.notes.pop(f"topic {name}", None)
        for name, copy in copies.items():
            if name in originals:
                self._absent.pop(name, None)
                continue
            self._absent[name] = self._absent.get(name, 0) + 1
            if not self._settings.deletions:
                self._run.notes[f"topic {name}"] = f"topic {name!r} is gone from the source; its copy stays"
            elif self._absent[name] >= ABSENT_TIMES:
                await self._service.topics.delete(copy.name)

    # -- transactions ---------------------------------------------------------------------------------------

    async def _sync_transactions(self) -> None:
        """Expose committed transactions to clients once all their mirrored partitions have arrived.

        The source names the high watermarks of a moment at which no transaction was half committed. Once all copies
        reach them, everything that is committed below has arrived as a whole. That is recorded before clients see it,
        so that a failover cuts every copy at the same moment.
        """
        async with self._syncing:
            await self._expose_transactions(stops_if_awaited=True)

    async def _sync_offsets_in(self, topics: Collection[str]) -> None:
        """Apply the offsets of groups in some copies, once these have what was committed together with the offsets.

        A transaction at which clients wait may have written to any copy, so it has to arrive in all of them.
        """
        self._created.clear()
        before = self._applicable
        chosen = _offsets_in(self._committed, topics)
        applicable = {**before, **{group: {**before.get(group, {}), **offsets} for group, offsets in chosen.items()}}
        await self._reached_offsets({})
        if applicable != before and not self._is_waiting_in(topics):
            applicable = self._applicable_at(applicable, await self._reach_barrier(topics))
        if self._is_waiting_in(topics):
            await self._expose_transactions()
            return
        async with self._creating:
            self._applicable = _offsets_outside(applicable, self._created)
            await self._apply_groups(_offsets_in(self._applicable, topics))

    def _is_waiting_in(self, topics: Collection[str]) -> bool:
        return any(topic in topics for topic, _ in self._waiting_at)

    def _cut_topics(self) -> dict[str, Mapping[int, int]]:
        """Return the topics of a failover while the mirror continues with others, with their cuts if it has ended."""
        cuts = self._cuts()
        unfinished = self._service.mirrors.unfinished_cuts(self._run.mirror.name)
        ended = {topic: cuts[topic] for topic in self._service.taken_over(cuts)}
        return {**ended, **{topic: {} for topic in unfinished}}

    def _applicable_at(self, committed: Commits, barrier: Barrier) -> Commits:
        """Return which offsets may be applied at a barrier; groups whose work may be cut off keep what they had before.

        A transaction may have committed offsets together with records that a failover of some topics has cut off. Later
        offsets of the same group count on its work too, even if no transaction has committed them.
        """
        ends = barrier.cut_off
        torn = [
            topic
            for topic, cuts in self._cut_topics().items()
            if topic not in ends or any(end > cuts.get(index, 0) for index, end in ends[topic].items())
        ]
        self._run.notes.pop(HELD_BACK, None)
        if not torn:
            return committed
        applicable, held_back = dict(committed), list[str]()
        for group in committed if barrier.groups_omitted else committed.keys() & barrier.transactional.keys():
            before = self._applicable.get(group, {})
            applicable[group] = {where: before[where] for where in committed[group] if where in before}
            if applicable[group] != committed[group]:
                held_back.append(group)
        if held_back:
            self._run.notes[HELD_BACK] = (
                f"the offsets of some groups are not mirrored any more ({listed(held_back)}), because of the failover "
                f"of {listed(torn)}: the source has records there beyond the cut, perhaps of transactions that also "
                "committed these offsets. When the other topics are failed over, these groups continue at the offsets "
                "that were mirrored before"
            )
        return {group: offsets for group, offsets in applicable.items() if offsets}

    async def _reach_barrier(self, topics: Collection[str], *, stops_if_awaited: bool = False) -> Barrier:
        """Wait until copies have what their originals have at a moment when no transaction is half committed."""
        prefix, cut = self._settings.rename, self._cut_topics()
        topic_ids = {
            topic.name.removeprefix(prefix): topic.original_id
            for topic in self._service.copied_topics(self._run.mirror.name)
            if topic.original_id is not None
        }
        request = BarrierRequest(
            topics=[topic.removeprefix(prefix) for topic in (*topics, *cut)],
            topic_ids=topic_ids,
            with_groups=self._settings.groups,
        )
        barrier = await self._source.ask(None, request, waits=True)
        targets = {prefix + topic: ends for topic, ends in barrier.offsets.items()}
        offsets = {topic: ends for topic, ends in targets.items() if topic not in cut}
        deadline = self._service.clock.monotonic() + ARRIVAL_S
        missing = await self._await_reached(offsets, deadline, stops_if_awaited=stops_if_awaited)
        if missing is not None:
            raise RequestTimedOut(
                f"offsets of groups and clients that read transactions wait, because {missing} has not arrived"
            )
        groups = {
            group: {
                TopicPartition(prefix + topic, PartitionIndex(index)): offset
                for topic, ends in read.items()
                for index, offset in ends.items()
                if index in offsets.get(prefix + topic, {})
            }
            for group, read in barrier.groups.items()
        }
        self._run.notes.pop(LEFT_OUT, None)
        if barrier.groups_omitted:
            self._run.notes[LEFT_OUT] = (
                "transactions have committed too many offsets in mirrored topics to mirror them together with their "
                "records; after an unplanned failover, their groups may repeat their last seconds of work"
            )
        return Barrier(offsets, {topic: targets.get(topic, {}) for topic in cut}, groups, barrier.groups_omitted)

    async def _expose_transactions(self, *, stops_if_awaited: bool = False) -> None:
        self._created.clear()
        committed = self._committed
        await self._reached_offsets({})
        if not self._waiting_at and committed == self._applicable:
            self._run.notes.pop(HELD_BACK, None)
            return
        name = self._run.mirror.name
        cut = self._service.mirrors.unfinished_cuts(name)
        copied = [topic.name for topic in self._service.copied_topics(name) if topic.name not in cut]
        barrier = await self._reach_barrier(copied, stops_if_awaited=stops_if_awaited)
        async with self._creating:
            await self._record_barrier(barrier, committed, cut)

    async def _record_barrier(self, barrier: Barrier, committed: Commits, cut: Collection[str]) -> None:
        """Record up to where transactions are whole, let clients read on, and apply offsets.

        They were read before the barrier, and so was which copies are being cut.
        """
        mirror = self._service.mirrors.get(self._run.mirror.name)
        if mirror is None or not self._service.is_owner:
            return
        # Copies that were created since then are those of other topics.
        offsets = {topic: ends for topic, ends in barrier.offsets.items() if topic not in self._created}
        waiting = {
            *self._waiting_at,
            *((topic, index) for topic in mirror.verified for index in mirror.verified[topic]),
        }
        # A failover that has begun, and is repeated later, cuts its copies where they were whole when it began.
        verified: dict[str, dict[int, int]] = {
            topic: dict(by_partition) for topic, by_partition in mirror.verified.items() if topic in cut
        }
        for topic, index in waiting:
            if index in offsets.get(topic, {}):
                verified.setdefault(topic, {})[index] = offsets[topic][index]
        # Offsets from before the barrier: the transactions that committed them have arrived as a whole. Those of
        # transactional groups are from the barrier itself, so that they include all transactions that are exposed.
        merged = {group: committed.get(group, {}) | read for group, read in barrier.transactional.items()}
        committed = _offsets_outside(
            {**committed, **{group: commits for group, commits in merged.items() if commits}}, self._created
        )
        applicable = self._applicable_at(committed, barrier)
        await self._service.mirrors.note_verified(mirror, verified, self._unapplied(applicable, barrier.transactional))
        await self._reached_offsets(offsets, is_verified=True)
        self._committed, self._applicable = committed, applicable
        await self._apply_groups(self._applicable)

    def _unapplied(self, commits: Commits, groups: Collection[str]) -> dict[str, dict[str, dict[int, int]]]:
        """Return the offsets of some groups that were not applied here, by group, topic and partition."""
        commits_left: dict[str, dict[str, dict[int, int]]] = {}
        for group in commits.keys() & groups:
            known = self._run.groups.get(group, {})
            for where, offset in commits[group].items():
                if known.get(where) != offset:
                    commits_left.setdefault(group, {}).setdefault(where.topic, {})[where.partition] = offset
        return commits_left

    async def drain(self, ends: Vector, deadline: float) -> None:
        """Wait until clients can read everything that the source has, which accepts no more writes."""
        behind = await self._await_reached(ends, deadline, is_readable=True)
        if behind is not None:
            raise RequestTimedOut(f"{behind} did not catch up in time, so the source keeps its role")

    async def _await_reached(
        self, offsets: Vector, deadline: float, *, is_readable: bool = False, stops_if_awaited: bool = False
    ) -> TopicPartition | None:
        """Wait until all copies reach these offsets; return one that does not when the time is up."""
        clock, topics = self._service.clock, self._service.topics
        while True:
            revision = topics.states_revision
            wait_s = min(ARRIVAL_WAIT_S, max(0.0, deadline - clock.monotonic()))
            reached = await self._reached_offsets(offsets, wait_s=wait_s, is_readable=is_readable)
            missing = _find_behind(offsets, reached)
            if missing is None or clock.monotonic() >= deadline or (stops_if_awaited and self._is_awaited):
                return missing
            if missing.partition not in reached.get(missing.topic, {}):
                # No node leads it. Nothing changes before another leader is agreed on.
                with suppress(RequestTimedOut):
                    left_s = min(ARRIVAL_WAIT_S, max(0.0, deadline - clock.monotonic()))
                    await topics.await_revision(revision + 1, left_s)

    async def _reached_offsets(
        self, offsets: Vector, *, is_verified: bool = False, wait_s: float = 0.0, is_readable: bool = False
    ) -> dict[str, dict[int, int]]:
        """Return the end offsets of the copies on all nodes; with `is_verified`, expose them up to these offsets.

        Nodes respond when their copies have reached the offsets, or after a while. With `is_readable`, clients have to
        be able to read them.
        """
        request = ExposeRequest(
            mirror=self._run.mirror.name,
            offsets={topic: dict(by_partition) for topic, by_partition in offsets.items()},
            is_verified=is_verified,
            wait_ms=int(wait_s * 1000),
            revision=self._service.topics.states_revision,
            is_readable=is_readable,
        )
        responses = await gather_or_cancel(
            [
                self._service.expose(request),
                *(self._service.ask_node(node, request, waits=wait_s > 0) for node in self._service.others),
            ]
        )
        self._waiting_at = {(topic, index) for response in responses for topic, index in response.waiting}
        reached: dict[str, dict[int, int]] = {}
        for response in responses:
            for topic, found in response.reached.items():
                reached.setdefault(topic, {}).update(found)
        return reached

    # -- groups ---------------------------------------------------------------------------------------------

    async def _sync_groups(self) -> None:
        """Carry over the committed offsets of groups, never beyond what clients can read here."""
        async with self._syncing:
            await self._read_groups()
            await self._forget_lost_offsets()
            await self._apply_applicable()

    async def _apply_applicable(self) -> None:
        async with self._creating:
            await self._apply_groups(self._applicable)

    async def _forget_lost_offsets(self) -> None:
        """Forget offsets that were applied and are gone, so that they are applied again: deleted here, or expired."""
        for group, here in (await commits_by_group(self._service.client(), list(self._run.groups))).items():
            if isinstance(here, MillstreamError):
                continue
            remaining = {where: offset for where, offset in self._run.groups[group].items() if where in here}
            if remaining:
                self._run.groups[group] = remaining
            else:
                del self._run.groups[group]

    async def _read_groups(self) -> None:
        prefix = self._settings.rename
        self._created.clear()
        names = [name for name, _, kind in await list_groups(self._source.client) if kind != "share"]
        copies = self._service.copied_topics(self._run.mirror.name)
        read = await committed_by_group(self._source.client, names)
        used = {
            prefix + where.topic
            for response in read.values()
            if not isinstance(response, MillstreamError)
            for where in response
        }
        following = await self._following(copy for copy in copies if copy.name in used)
        copied = {topic.name: topic.partitions for topic in copies if topic.name in following}
        commits: Commits = {}
        for group, committed in read.items():
            if isinstance(committed, MillstreamError):
                continue
            ours = {
                TopicPartition(prefix + where.topic, where.partition): offset
                for where, offset in committed.items()
                if where.partition < copied.get(prefix + where.topic, 0)
            }
            if ours:
                commits[group] = ours
        self._committed = commits = _offsets_outside(commits, self._created)
        if not self._source.is_millstream:
            self._applicable = commits
        elif commits != self._applicable:
            # A transaction that committed offsets may have records that have not arrived.
            self._run.wants_barrier.set()

    async def _apply_groups(self, groups: Mapping[str, Mapping[TopicPartition, int]]) -> None:
        partitions = {where for offsets in groups.values() for where in offsets}
        exposed = await self._service.exposed_offsets(partitions)
        changes: Commits = {}
        for group, offsets in groups.items():
            known = self._run.groups.get(group, {})
            changed = {
                where: min(offset, exposed[where])
                for where, offset in offsets.items()
                if where in exposed and known.get(where) != min(offset, exposed[where])
            }
            if changed:
                changes[group] = changed
        for group, here in (await commits_by_group(self._service.client(), list(changes))).items():
            key, changed, known = f"group {group}", changes[group], self._run.groups.get(group, {})
            try:
                if isinstance(here, MillstreamError):
                    raise here
                own = {
                    where
                    for where, commit in here.items()
                    if changed.get(where, commit.offset) < commit.offset <= exposed[where]
                    and self._is_committed_here(where, commit)
                }
                changed = {where: offset for where, offset in changed.items() if where not in own}
                if changed:
                    await commit_offsets(self._service.client(), group, changed, metadata=MIRRORED)
            except GroupNotEmpty:
                self._run.notes[key] = f"group {group!r} has members here, so its offsets are not mirrored"
                continue
            except MillstreamError as error:
                self._run.notes[key] = Problem(f"group {group!r}: {error}")
                continue
            self._run.notes.pop(key, None)
            if own:
                self._run.notes[key] = (
                    f"group {group!r} has a later offset here than at the source; it is not moved back"
                )
            self._run.groups[group] = {**known, **changed}

    def _is_committed_here(self, where: TopicPartition, commit: Commit) -> bool:
        """Whether a group has committed an offset here itself, in records that this cluster has only copied.

        An old source that follows may have offsets of records that it has dropped.
        """
        return commit.metadata != MIRRORED and where.topic not in self._cuts()

    def _cuts(self) -> Vector:
        """Return the offsets at which a failover cut copies, as far as this node knows."""
        return (self._service.mirrors.get(self._run.mirror.name) or self._run.mirror).cuts


def _offsets_outside(commits: Commits, topics: Set[str]) -> Commits:
    return _offsets_in(commits, {where.topic for offsets in commits.values() for where in offsets} - topics)


def _offsets_in(commits: Commits, topics: Collection[str]) -> Commits:
    selected = {
        group: {where: offset for where, offset in offsets.items() if where.topic in topics}
        for group, offsets in commits.items()
    }
    return {group: offsets for group, offsets in selected.items() if offsets}


def _find_behind(targets: Vector, reached: Vector) -> TopicPartition | None:
    """Return a partition that does not reach its offset; those without a leader do not either."""
    for topic, offsets in targets.items():
        for index, offset in offsets.items():
            if offset > reached.get(topic, {}).get(index, 0):
                return TopicPartition(topic, PartitionIndex(index))
    return None
