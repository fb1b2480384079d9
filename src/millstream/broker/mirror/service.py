"""The mirrors that a node runs: it copies the partitions that it leads, and reports their lag.

The controller of the target cluster is the *owner* of every mirror. It also runs the tasks of the mirror as a whole
(`follower`): it creates topics, copies settings, offsets and queues, and decides up to where clients may read
transactions.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.topics import Topics
from millstream.broker.coordination.peers import WirePeers, ask_peer
from millstream.broker.mirror.barriers import Barriers
from millstream.broker.mirror.copier import Copier, Copy, CopyKey, ReadableWait, awaits_gaps, commits_from, offset_in
from millstream.broker.mirror.declared import Mirrors
from millstream.broker.mirror.source import Source
from millstream.broker.replication.partition import Partition
from millstream.broker.schemas.registry import SchemaRegistry
from millstream.broker.security.rights import Rights
from millstream.broker.security.state import SecurityState
from millstream.core.acl import Operation
from millstream.core.backoff import Backoff
from millstream.core.clock import Clock
from millstream.core.errors import InvalidMirror, MillstreamError, MirrorInUse, NotLeader, RequestTimedOut
from millstream.core.ids import Epoch, NodeId, Offset, PartitionIndex
from millstream.core.metric import Metric, Sample
from millstream.core.mirror import EPOCH_STEP, SOURCE, Mirror, Problem, TopicOffsets, listed, merged_offsets, pattern_of
from millstream.core.setting import HIDDEN
from millstream.core.tasks import Supervise, cancel_and_wait, gather_or_cancel, run_until_first
from millstream.core.topic import Topic, TopicPartition
from millstream.protocol.private.message import (
    R,
    Request,
    decode_response,
    encode,
    request_private,
    response_type,
)
from millstream.protocol.private.mirror_messages import (
    ANY_SEQUENCE,
    CommitNoticeRequest,
    CutPartition,
    CutRequest,
    ExposeRequest,
    ExposeResponse,
    FenceRequest,
    OfferedSubscription,
    OfferRequest,
    OfferResponse,
    QueueSnapshot,
)
from millstream.protocol.wire.client import Client

if TYPE_CHECKING:
    from millstream.broker.groups.coordinator import GroupCoordinator
    from millstream.broker.kafka.subscription_service import SubscriptionService
    from millstream.broker.mirror.follower import Follower
    from millstream.broker.transactions.coordinator import TransactionCoordinator

_logger = logging.getLogger(__name__)

FENCE_S: Final = 10.0
"""How long an old source waits until all written records are replicated, before the step fails."""
NOTICE_S: Final = 0.05
"""The shortest time between two notices to the owner that clients of this node wait at a commit."""
NOTICE_RETRY_S: Final = 0.5
LOAD_RETRY_S: Final = 1.0
TRUNCATED_AT_ONCE: Final = 32
OFFER_BYTES_MAX: Final = 8 * 1024 * 1024


class MirrorRun:
    """A mirror on this node, while it is not paused."""

    def __init__(self, mirror: Mirror, service: MirrorService) -> None:
        self.mirror = mirror
        self.settings = mirror.settings
        self.service = service
        self.copier: Copier | None = None
        self.follower: Follower | None = None
        self.source: Source | None = None
        self.error = ""
        self.notes: dict[str, str] = {}
        """The items that could not be mirrored, with the reasons."""
        self.groups: dict[str, dict[TopicPartition, int]] = {}
        """The offsets of groups that were applied here."""
        self.queues = 0
        """The number of queues whose state was applied."""
        self.refreshed = asyncio.Event()
        """Set when this node may lead other copies than before."""
        self.wants_barrier = asyncio.Event()
        """On the owner: set when clients of any node wait at a commit, or offsets of groups wait to be applied."""
        self.fenced: list[str] = []
        """On the owner: the originals that refuse writers, because a switch of this mirror has begun."""
        self._commit_waits = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        from millstream.broker.mirror.follower import Follower

        backoff = Backoff(max_s=5.0)
        while True:
            try:
                async with Source(self.settings, name=self.mirror.name) as source:
                    if source.cluster_id == self.service.membership.cluster_id:
                        raise InvalidMirror(f"{self.settings.source} is this cluster itself")
                    self.source = source
                    if source.is_millstream:
                        await self.service.mirrors.record_gated(self.mirror)
                    self.copier = Copier(
                        self.service.topics,
                        source,
                        self.service.clock,
                        rate=self.settings.rate,
                        gates=source.is_millstream,
                        cut_of=self._cut_of,
                        note_gaps=self._note_gaps,
                        on_commit=self._commit_waits.set,
                    )
                    self.error = ""
                    backoff.reset()
                    follower = self.follower = Follower(self, source)
                    self.service.note_connected()
                    parts = [self.copier.run(), self._refresh(self.copier), self._notify_owner(), follower.run()]
                    await run_until_first(parts)
            except MillstreamError as error:
                if self.error != str(error):
                    _logger.warning(
                        "a mirror cannot run; retrying", extra={"mirror": self.mirror.name, "error": str(error)}
                    )
                self.error = str(error)
            except Exception as error:
                # A source may send anything, and must not end the node.
                _logger.exception("a mirror failed; retrying", extra={"mirror": self.mirror.name})
                self.error = f"internal error: {error!r}"
            finally:
                if self.copier is not None:
                    self.service.gone[_run_key(self.mirror)] = {copy.key for copy in self.copies() if copy.is_gone}
                self.source = self.copier = self.follower = None
            await backoff.pause()

    def _cut_of(self, partition: Partition) -> int | None:
        """Return the offset of the source's first own record in a copy that was reversed; otherwise None."""
        mirror = self.service.mirrors.get(self.mirror.name) or self.mirror
        return mirror.cuts.get(partition.topic.name, {}).get(partition.index)

    async def _note_gaps(self, gaps: Mapping[TopicPartition, int | None]) -> TopicOffsets:
        return await self.service.mirrors.note_gaps(self.mirror, gaps)

    async def _refresh(self, copier: Copier) -> None:
        """Follow the partitions that this node leads; runs forever."""
        while True:
            self.refreshed.clear()
            mirror = self.service.mirrors.get(self.mirror.name) or self.mirror
            copier.follow(self._led_copies(mirror))
            await self.refreshed.wait()

    async def _notify_owner(self) -> None:
        """Notify the owner when clients wait at a commit here; runs forever."""
        while True:
            await self._commit_waits.wait()
            self._commit_waits.clear()
            if self.service.is_owner:
                self.wants_barrier.set()
                continue
            try:
                notice = CommitNoticeRequest(mirror=self.mirror.name)
                await self.service.ask_node(self.service.membership.controller_id, notice)
            except MillstreamError:
                await asyncio.sleep(NOTICE_RETRY_S)
                self._commit_waits.set()
            else:
                await asyncio.sleep(NOTICE_S)

    def _led_copies(self, mirror: Mirror) -> Iterator[Copy]:
        for partition in self.service.led(mirror.name):
            topic, key = partition.topic, (partition.topic.topic_id, partition.index)
            is_cut = partition.index in mirror.cut_epochs.get(topic.name, ())
            if not is_cut and not awaits_gaps(partition) and key not in self.service.cutting.get(mirror.mirror_id, ()):
                yield Copy(
                    partition,
                    TopicPartition(mirror.source_name(topic), partition.index),
                    verified=mirror.verified_until(topic.name, partition.index) or 0,
                    gap=mirror.gap_of(topic.name, partition.index),
                    caught_up_ms=self.service.clock.now_ms(),
                    is_gone=key in self.service.gone.get(_run_key(mirror), ()),
                )

    # -- what is shown --------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        if self.error or (self.copier is not None and any(copy.error for copy in self.copier.copies.values())):
            return "retrying"
        return "starting" if self.copier is None else "running"

    def copies(self) -> list[Copy]:
        return [] if self.copier is None else list(self.copier.copies.values())

    def describe(self, now_ms: int) -> dict[str, Any]:
        return {
            "node": self.service.membership.me.node_id,
            "state": self.state,
            "error": self.error,
            "source_cluster": "" if self.source is None else self.source.cluster_id,
            "bytes": 0 if self.copier is None else self.copier.bytes_copied,
            "bytes_per_s": 0.0 if self.copier is None else self.copier.bytes_per_s,
            "is_listed": self.follower is not None and not self.follower.pending,
            "notes": [str(self.notes[key]) for key in sorted(self.notes)],
            "problems": sorted(str(note) for note in self.notes.values() if isinstance(note, Problem)),
            "groups": len(self.groups),
            "queues": self.queues,
            "partitions": [
                {
                    "topic": copy.partition.topic.name,
                    "partition": copy.partition.index,
                    "source_end": copy.source_end if copy.source_end >= 0 else None,
                    "end": copy.end,
                    "exposed": copy.partition.high_watermark,
                    "lag": copy.lag(now_ms),
                    "lag_ms": copy.lag_ms(now_ms),
                    "epoch": copy.partition.leader_epoch,
                    "error": copy.error,
                }
                for copy in self.copies()
            ],
        }


class MirrorService:
    def __init__(
        self,
        topics: Topics,
        membership: Membership,
        mirrors: Mirrors,
        subscriptions: SubscriptionService,
        transactions: TransactionCoordinator,
        groups: GroupCoordinator,
        schemas: SchemaRegistry,
        rules: SecurityState | None,
        clock: Clock,
        supervise: Supervise,
    ) -> None:
        self.topics = topics
        self.schemas = schemas
        self.rules = rules
        """The access rules; None if clients need not authenticate, so that none are enforced."""
        self.membership = membership
        self.mirrors = mirrors
        self.subscriptions = subscriptions
        self.barriers = Barriers(self, transactions, groups)
        self.clock = clock
        self.cutting: dict[UUID, dict[CopyKey, CutPartition | None]] = {}
        """The cuts of copies that are not writable yet, by the mirror's id; None while one is being cut."""
        self.gone: dict[tuple[UUID, str], set[CopyKey]] = {}
        """The copies whose original was gone when a mirror last stopped, by the mirror's id and its source."""
        self.switching: set[str] = set()
        """On the owner: the mirrors whose switch is running."""
        self.adopting = asyncio.Lock()
        """On the owner: held by a step in which this cluster becomes the target of its own mirror."""
        self.peers = WirePeers(membership.node, me=membership.me.node_id)
        self._supervise = supervise
        self._runs: dict[str, MirrorRun] = {}
        self._client: Client | None = None
        self._changed = asyncio.Event()
        self._connected = asyncio.Event()
        """Set when a mirror has connected to its source, and replaced."""
        self._task: asyncio.Task[None] | None = None

    @property
    def is_owner(self) -> bool:
        """Whether this node is the controller, which runs the tasks of mirrors as a whole."""
        return self.membership.controller_id == self.membership.me.node_id

    def start(self) -> None:
        """Restrict what clients may read, then run the declared mirrors."""
        self._restrict_reads(partition for partition in self.topics.hosted() if not awaits_gaps(partition))
        self.topics.on_roles_change(self._roles_changed)
        self.topics.on_dropped(self._on_dropped)
        self.mirrors.on_change(self._changed.set)
        self._changed.set()
        self._task = self._supervise("mirrors", self._run())

    async def close(self) -> None:
        if self._task is not None:
            await cancel_and_wait(self._task)
        self.barriers.close()
        if self._client is not None:
            await self._client.close()
        await self.peers.close()

    def client(self) -> Client:
        if self._client is None:
            self._client = Client.connect(self.membership.addresses(), client_id="mirrors")
        return self._client

    def note_connected(self) -> None:
        """Wake the tasks that wait until a mirror has connected to its source."""
        done, self._connected = self._connected, asyncio.Event()
        done.set()

    async def follower_of(self, mirror: Mirror, deadline: float) -> Follower:
        """Return the follower of a mirror; wait until it is connected to the source."""
        try:
            async with asyncio.timeout(max(0.0, deadline - self.clock.monotonic())):
                while (run := self._runs.get(mirror.name)) is None or run.follower is None:
                    await self._connected.wait()
        except TimeoutError:
            error = "" if run is None else run.error
            raise RequestTimedOut(
                f"mirror {mirror.name!r} is not connected to its source{f': {error}' if error else ''}"
            ) from None
        return run.follower

    def copied_topics(self, name: str) -> list[Topic]:
        return [topic for topic in self.topics.all() if topic.mirror == name]

    def taken_over(self, cuts: Iterable[str]) -> list[str]:
        """Return the topics with cuts that clients can write to here since a failover.

        The others are gone, or are copies: those of a mirror that was reversed.
        """
        return [name for name in cuts if (topic := self.topics.get(name)) is not None and not topic.mirror]

    def is_fenced(self, name: str) -> bool:
        """Whether topics of this cluster refuse writers, because it is the source of a switch."""
        return any(topic.is_draining for topic in self.copied_topics(name))

    def led(self, name: str) -> list[Partition]:
        """Return the partitions that a mirror writes and this node leads."""
        return [
            partition
            for topic in self.copied_topics(name)
            if not topic.is_draining
            for partition in self.topics.partitions_of(topic)
            if partition.is_leader
        ]

    def _roles_changed(self, partitions: Sequence[Partition]) -> None:
        """Follow the partitions that this node leads now, and no others."""
        self._restrict_reads(partition for partition in partitions if not awaits_gaps(partition))
        if any(awaits_gaps(partition) for partition in partitions):
            self._changed.set()
        self._forget_cuts(partition for partition in partitions if not partition.topic.mirror)
        for name in {partition.topic.mirror for partition in partitions}:
            run = self._runs.get(name)
            if run is not None:
                run.refreshed.set()

    def _on_dropped(self, partitions: Sequence[Partition]) -> None:
        """Forget partitions that are not hosted here any more."""
        self._forget_cuts(partitions)
        self._roles_changed(partitions)

    def _forget_cuts(self, partitions: Iterable[Partition]) -> None:
        for partition in partitions:
            for cut in self.cutting.values():
                cut.pop((partition.topic.topic_id, partition.index), None)

    def _restrict_reads(self, partitions: Iterable[Partition]) -> None:
        """As a new leader of copies: let clients read up to where transactions are known to be whole.

        That includes what clients could read when this node last checked. The source is not needed.
        """
        for partition in partitions:
            mirror = self.mirrors.get(partition.topic.mirror) if partition.awaits_exposure else None
            if mirror is None or not partition.is_leader:
                continue
            verified = mirror.verified_until(partition.topic.name, partition.index)
            partition.expose(_complete_until(partition, verified, mirror.gap_of(partition.topic.name, partition.index)))

    async def _restrict_compacted(self) -> None:
        """As a new leader of compacted copies, read which gaps earlier leaders have recorded, then restrict them."""
        awaiting = [(partition, partition.leader_epoch) for partition in self.topics.hosted() if awaits_gaps(partition)]
        if not awaiting:
            return
        try:
            await self.mirrors.load()
        except MillstreamError as error:
            _logger.warning(
                "compacted copies are not exposed further until the catalog is available", extra={"error": str(error)}
            )
            asyncio.get_running_loop().call_later(LOAD_RETRY_S, self._changed.set)
        else:
            self._restrict_reads(
                partition for partition, epoch in awaiting if awaits_gaps(partition) and partition.leader_epoch == epoch
            )

    async def _run(self) -> None:
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                await self._apply()
        finally:
            for name in list(self._runs):
                await self._stop(name)

    async def _apply(self) -> None:
        """Start, restart and stop what the declarations have changed."""
        await self._restrict_compacted()
        self._restrict_reads(partition for partition in self.topics.hosted() if not awaits_gaps(partition))
        declared = {mirror.name: mirror for mirror in self.mirrors.all() if mirror.is_due}
        for name, run in list(self._runs.items()):
            now = declared.get(name)
            if now is None or now.mirror_id != run.mirror.mirror_id or now.overrides != run.mirror.overrides:
                await self._stop(name)
        self._forget_cancelled()
        for name, mirror in declared.items():
            if name not in self._runs:
                run = self._runs[name] = MirrorRun(mirror, self)
                run.task = self._supervise(f"mirror {name}", run.run())
            self._runs[name].refreshed.set()

    def _forget_cancelled(self) -> None:
        """Forget the state of deleted mirrors and earlier sources, and cancelled cuts: copying continues."""
        current = {_run_key(mirror) for mirror in self.mirrors.all()}
        self.gone = {key: copies for key, copies in self.gone.items() if key in current}
        known = {mirror.mirror_id: mirror.cut_epochs for mirror in self.mirrors.all()}
        names = {topic.topic_id: topic.name for topic in self.topics.all()}
        for mirror_id, cuts in list(self.cutting.items()):
            for key in [key for key in cuts if names.get(key[0]) not in known.get(mirror_id, ())]:
                del cuts[key]
            if mirror_id not in known:
                del self.cutting[mirror_id]

    async def _stop(self, name: str) -> None:
        run = self._runs.pop(name)
        if run.task is not None:
            await cancel_and_wait(run.task)

    # -- what others ask for --------------------------------------------------------------------------------

    def describe(self, mirror: Mirror) -> dict[str, Any]:
        run, copied = self._runs.get(mirror.name), self.copied_topics(mirror.name)
        return {
            "name": mirror.name,
            "mirror_id": str(mirror.mirror_id),
            "settings": mirror.settings.as_strings(),
            "overrides": mirror.shown_overrides(),
            "enabled": mirror.is_enabled,
            "problem": mirror.idle_reason,
            "created_ms": mirror.created_ms,
            "version": mirror.version,
            "topics": [topic.name for topic in copied],
            "copies": {topic.name: topic.partitions for topic in copied if not topic.is_draining},
            "cuts": {topic: dict(offsets) for topic, offsets in mirror.cuts.items()},
            "cutting": self.unfinished_cuts(mirror),
            "taken_over": self.taken_over(mirror.cuts),
            "interrupted": self._interruption(mirror),
            "notes": list(self._notes(mirror)),
            "report": None if run is None else run.describe(self.clock.now_ms()),
        }

    async def delete(self, name: str, *, force: bool) -> None:
        """Delete a mirror without copies; one whose source can still be made to follow only by force."""
        if copies := self.copied_topics(name):
            raise MirrorInUse(
                f"mirror {name!r} still writes {listed([topic.name for topic in copies])}; make the copies writable "
                f"first (`millstream mirror failover {name}`), or pause the mirror and delete them"
            )
        await self.mirrors.load()
        mirror = await self.mirrors.find(name)
        if not force and mirror.is_reversible and (taken_over := self.taken_over(mirror.cuts)):
            raise MirrorInUse(
                f"clients can write to {listed(taken_over)} here since a failover; without mirror {name!r}, the old "
                f"source can no longer be made to follow (`millstream mirror reverse {name}`). Pass --force to delete "
                "it nevertheless"
            )
        await self.mirrors.delete(name)

    def _interruption(self, mirror: Mirror) -> str:
        """Return which failover or switch has begun and not finished, and how to finish it; empty if none."""
        name, run = mirror.name, self._runs.get(mirror.name)
        if unfinished := self.unfinished_cuts(mirror):
            return (
                f"a failover of {', '.join(unfinished)} has not finished, and nothing is copied there any more; run "
                f"`{self.failover_command(mirror)}` again"
            )
        if fenced := [topic.name for topic in self.copied_topics(name) if topic.is_draining]:
            return (
                f"clients cannot write to {listed(fenced)}, because a switch on the other side has not finished; if "
                f"none is running there, run `millstream mirror switch {name}` there again, or `millstream mirror "
                f"reverse {name}` if clients can write there already. To go back, `millstream mirror failover {name}` "
                "lets clients write here again"
            )
        if name in self.switching:
            return ""
        if mirror.is_reversible and (taken_over := self.taken_over(mirror.cut_epochs)):
            return (
                f"clients can write to {listed(taken_over)} here since a switch or failover that has not finished; "
                f"`millstream mirror reverse {name}` lets the old source follow"
            )
        if run is not None and run.fenced and self.is_owner:
            return (
                f"a switch has not finished: neither side lets clients write to {listed(run.fenced)}. Run `millstream "
                f"mirror switch {name}` again, or go back with `millstream mirror failover {name}` on the source"
            )
        return ""

    def _notes(self, mirror: Mirror) -> Iterator[str]:
        """Yield the problems of a mirror that an operator should know, and the remedies."""
        if taken_over := self.taken_over(mirror.cuts):
            what = f"clients can write to {listed(taken_over)} here since a failover"
            if not mirror.is_reversible:
                yield f"{what}; delete the mirror once its source is not needed any more"
            elif self.copied_topics(mirror.name):
                yield (
                    f"{what}; `millstream mirror switch {mirror.name}` lets the old source follow with all topics, or "
                    f"`millstream mirror reverse {mirror.name}` once the other copies are failed over too"
                )
            else:
                yield f"{what}; `millstream mirror reverse {mirror.name}` lets the old source follow"
        if unselected := mirror.unselected(self.copied_topics(mirror.name), self.subscriptions.letter_topics()):
            yield (
                "these topics are still copied, although the mirror's topics and exclude no longer select them: "
                f"{listed(unselected)}; to end this, delete the copies here or fail them over"
            )
        for name, gaps in sorted(mirror.gaps.items()):
            for index, offset in sorted(gaps.items()):
                yield (
                    f"{name}-{index} can be read up to offset {offset} until its copy has caught up: the source has "
                    "compacted records that were not copied"
                )

    def unfinished_cuts(self, mirror: Mirror) -> list[str]:
        return sorted(topic.name for topic in self.copied_topics(mirror.name) if topic.name in mirror.cut_epochs)

    def failover_command(self, mirror: Mirror) -> str:
        """Return the command that finishes a failover, and cuts no other copies."""
        unfinished = self.unfinished_cuts(mirror)
        command = ["millstream", "mirror", "failover", mirror.name]
        if len(unfinished) < len(self.copied_topics(mirror.name)):
            for name in unfinished:
                command += ["--topics", pattern_of(name)]
        return shlex.join(command)

    async def begin_cut(self, mirror: Mirror, topics: Sequence[Topic], *, is_partial: bool = False) -> Mirror:
        """Stop a mirror, and record durably in which epochs this cluster continues its copies.

        A failover that is repeated keeps the epochs of the first attempt: a copy that holds records of such an epoch is
        cut already, whichever node leads it now. It also keeps whether the mirror continues with its other copies.
        """
        epochs: dict[str, dict[int, int]] = {}
        for topic in topics:
            for index in range(topic.partitions):
                state = self.topics.state_of(topic, index)
                if state is None:
                    raise NotLeader(f"{topic.name}-{index} has no leader yet; try again")
                known = max((state.leader_epoch, *self._led_epoch(topic, index)))
                epochs.setdefault(topic.name, {})[index] = known + EPOCH_STEP

        def begun(now: Mirror) -> Mirror:
            return dataclasses.replace(
                now,
                is_enabled=False,
                cut_epochs=merged_offsets(epochs, now.cut_epochs),
                resumes=is_partial and (now.is_enabled or now.resumes),
            )

        return await self.mirrors.change(mirror.name, begun)

    def _led_epoch(self, topic: Topic, index: int) -> list[Epoch]:
        """Return the epoch in which this node leads a partition; a node that is alone may be ahead of the store."""
        with suppress(MillstreamError):
            partition = self.topics.partition(topic.name, index)
            return [partition.leader_epoch] if partition.is_leader else []
        return []

    async def end_cut(self, mirror: Mirror) -> None:
        """Forget the epochs of copies that are writable now, and copy to the others again if that was recorded."""
        copied = {topic.name for topic in self.copied_topics(mirror.name)}

        def ended(now: Mirror) -> Mirror:
            left = {name: epochs for name, epochs in now.cut_epochs.items() if name in copied}
            gaps = {name: offsets for name, offsets in now.gaps.items() if name in copied}
            resumed = dataclasses.replace(now, is_enabled=now.is_enabled or now.resumes, resumes=False)
            return dataclasses.replace(resumed, cut_epochs=left, gaps=gaps, group_offsets={})

        await self.mirrors.change(mirror.name, ended)

    async def cancel_cut(self, mirror: Mirror) -> None:
        """Resume a mirror that was stopped for a planned switch.

        Copies that were already cut have nothing of their own but the mark of the cut, which the copier removes.
        """

        def resumed(now: Mirror) -> Mirror:
            return dataclasses.replace(now, cut_epochs={}, is_enabled=now.is_enabled or bool(now.cut_epochs))

        await self.mirrors.change(mirror.name, resumed)

    async def cut(self, request: CutRequest) -> CutPartition:
        """Cut a copy that this node leads where its transactions are whole, and lead it in a later epoch.

        `verified` is where they were known to be whole when the mirror was stopped: the same moment for all copies.
        """
        partition = self.topics.partition(request.topic, request.partition)
        topic = partition.topic
        if not partition.is_leader:
            raise NotLeader(f"{partition.log.partition} is not led by this node")
        key = topic.topic_id, partition.index
        mirror = await self.mirrors.find(request.mirror)
        if not _is_cut_in(mirror, request):
            # This node may not have heard of it yet.
            await self.mirrors.load()
            mirror = await self.mirrors.find(request.mirror)
            if not _is_cut_in(mirror, request):
                raise InvalidMirror(f"the cut of {partition.log.partition} was cancelled")
        cutting = self.cutting.setdefault(mirror.mirror_id, {})
        before = cutting.get(key)
        if before is not None and before.epoch == partition.leader_epoch:
            # A failover that is repeated because another copy could not be cut.
            return before
        cutting[key] = None
        try:
            run = self._runs.get(request.mirror)
            if run is not None and run.copier is not None:
                run.copier.drop(key)
            log = partition.log
            end = log.end_offset
            dropped: int | None = None
            begun_at = own_history_start(partition, request.epoch)
            if begun_at is None:
                limit = _complete_until(partition, request.verified, request.gap)
                if limit is not None and limit < end:
                    await partition.cut_mirrored(limit, refetches=False)
                else:
                    partition.expose(None)
                stored = partition.stored()
                if stored is not None:
                    await stored
                cut = log.end_offset
                dropped = end - cut
                await self.topics.raise_epoch(topic, partition.index, Epoch(request.epoch))
                await partition.begin_own_history()
            else:
                # Another node led it when the failover was tried first.
                cut = begun_at
                partition.expose(None)
                await partition.settled()
            await partition.abort_open()
            done = cutting[key] = CutPartition(
                topic=topic.name,
                partition=partition.index,
                offset=cut,
                epoch=partition.leader_epoch,
                dropped=dropped,
                aborted=partition.aborted_across(cut),
            )
            return done
        except BaseException:
            cutting.pop(key, None)
            raise
        finally:
            # It may have been cancelled meanwhile.
            self._forget_cancelled()

    async def ask_leader(self, where: TopicPartition, request: Request[R]) -> R:
        async def attempt(node: NodeId) -> R:
            return await request_private(self.client(), node, request, waits=True, about=str(where))

        return await self.client().call_leader(where.topic, where.partition, attempt)

    async def cut_everywhere(self, mirror: Mirror, where: TopicPartition) -> CutPartition:
        """Ask the leader of a copy to cut it."""
        request = CutRequest(
            mirror=mirror.name,
            topic=where.topic,
            partition=where.partition,
            verified=mirror.verified_until(where.topic, where.partition),
            gap=mirror.gap_of(where.topic, where.partition),
            epoch=mirror.cut_epochs[where.topic][where.partition],
        )
        response = await self.ask_leader(where, request)
        if response.cut is None:
            raise NotLeader(f"the leader of {where} did not say where it was cut")
        return response.cut

    async def ask_node(
        self, node: NodeId, request: Request[R], *, waits: bool = False, timeout_s: float | None = None
    ) -> R:
        """Send a request to another node of this cluster; one that may wait has its own connection."""
        if not waits:
            return await ask_peer(self.peers, node, request, about=f"node {node}")
        response = await self.client().private(node, request.KEY, encode(request), waits=True, timeout_s=timeout_s)
        return decode_response(response, response_type(request), about=f"node {node}")

    @property
    def others(self) -> list[NodeId]:
        """Every other live node."""
        me = self.membership.me.node_id
        return [node.node_id for node in self.membership.nodes() if node.node_id != me]

    # -- transactions ---------------------------------------------------------------------------------------

    def note_commit(self, mirror: str) -> None:
        """Record that clients of another node wait at a commit; called on the owner."""
        run = self._runs.get(mirror)
        if run is not None:
            run.wants_barrier.set()

    async def expose(self, request: ExposeRequest) -> ExposeResponse:
        """Report the progress of the copies that this node leads, and where clients wait; expose verified offsets.

        A node whose view of the cluster is older than the caller's catches up first.
        """
        if request.wait_ms:
            # Another node reports on those that this one no longer leads.
            with suppress(TimeoutError, MillstreamError):
                async with asyncio.timeout(request.wait_ms / 1000):
                    await self.topics.await_revision(request.revision)
                    offsets = {
                        partition: offset_in(request.offsets, partition) for partition in self.led(request.mirror)
                    }
                    while (run := self._runs.get(request.mirror)) is None or (copier := run.copier) is None:
                        await self._connected.wait()
                    await copier.await_comparison(partition for partition, offset in offsets.items() if offset)
                    if request.is_readable:
                        await ReadableWait(offsets).wait()
                    else:
                        arrivals = [partition.arrived(offset) for partition, offset in offsets.items()]
                        await asyncio.gather(*(arrival for arrival in arrivals if arrival is not None))
                        await copier.without_gaps()
        run = self._runs.get(request.mirror)
        copier = None if run is None else run.copier
        if request.is_verified and copier is not None:
            copier.verify(request.offsets)
        reached: dict[str, dict[int, int]] = {}
        for partition in self.led(request.mirror):
            copy = None if copier is None else copier.compared_copy(partition)
            if copy is None:
                # It may have offsets beyond those of the source, which are truncated: then it has not reached them.
                offset = 0
            elif request.is_readable or copy.gap is not None:
                # A failover cuts copies where values are missing, so no transaction beyond that is whole.
                offset = partition.high_watermark
            else:
                offset = partition.replicated_offset
            reached.setdefault(partition.topic.name, {})[partition.index] = offset
        waiting = [
            (copy.partition.topic.name, int(copy.partition.index))
            for copy in ([] if run is None else run.copies())
            if copy.commits
        ]
        return ExposeResponse(reached=reached, waiting=waiting)

    async def fence(self, request: FenceRequest) -> None:
        """As an old source: wait until this node refuses writes to topics, and has acknowledged all earlier ones.

        With cuts, it then truncates those partitions only; raise `NotLeader` if it does not lead one of them.
        """
        await self.topics.await_mirror(request.topic_ids, request.mirror)
        topic_ids = set(request.topic_ids)
        if request.cuts:
            led = [self.topics.partition(topic, index) for topic, cuts in request.cuts.items() for index in cuts]
            if any(partition.topic.topic_id not in topic_ids for partition in led):
                raise InvalidMirror("a topic was deleted and created again meanwhile; try again")
        else:
            led = [
                partition
                for partition in self.topics.hosted()
                if partition.topic.topic_id in topic_ids and partition.is_leader
            ]
        try:
            async with asyncio.timeout(FENCE_S):
                for partition in led:
                    await partition.settled()
        except TimeoutError:
            raise RequestTimedOut("records that were written before are not replicated yet; try again") from None
        for partition in led if request.cuts else ():
            cut = Offset(request.cuts[partition.topic.name][partition.index])
            if cut < partition.log.end_offset:
                await partition.cut_mirrored(cut, refetches=True)
            if not partition.is_leader:
                # Its current leader may not know of the truncation yet.
                raise NotLeader(f"{partition.log.partition} is not led by this node any more")

    async def truncate_everywhere(self, mirror: str, topics: Iterable[Topic], cuts: TopicOffsets) -> None:
        """Ask the leaders of fenced topics to truncate each partition at its cut; raise an error if one does not."""
        turn = asyncio.Semaphore(TRUNCATED_AT_ONCE)

        async def truncate(topic: Topic, index: int, cut: int) -> None:
            request = FenceRequest(mirror=mirror, topic_ids=[topic.topic_id], cuts={topic.name: {index: cut}})
            async with turn:
                await self.ask_leader(TopicPartition(topic.name, PartitionIndex(index)), request)

        await gather_or_cancel(
            truncate(topic, index, cut)
            for topic in topics
            for index, cut in cuts.get(topic.name, {}).items()
            if index < topic.partitions
        )

    async def fence_everywhere(self, mirror: str, topic_ids: Collection[UUID]) -> None:
        """Ask every node of this cluster to fence topics."""
        request = FenceRequest(mirror=mirror, topic_ids=list(topic_ids))
        others = (self.ask_node(node, request, waits=True) for node in self.others)
        await gather_or_cancel([self.fence(request), *others])

    async def high_watermarks(self, topics: Iterable[str]) -> dict[str, dict[int, int]]:
        """Return up to where clients may read topics of this cluster."""
        known = self.topics.existing(topics)
        places = [
            TopicPartition(topic.name, PartitionIndex(index)) for topic in known for index in range(topic.partitions)
        ]
        watermarks: dict[str, dict[int, int]] = {}
        for where, offset in (await self._readable_offsets(places)).items():
            if isinstance(offset, MillstreamError):
                raise offset
            watermarks.setdefault(where.topic, {})[where.partition] = offset
        return watermarks

    async def exposed_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the offsets up to which clients may read copies; those of unavailable nodes are missing."""
        offsets = await self._readable_offsets(partitions)
        return {where: offset for where, offset in offsets.items() if not isinstance(offset, MillstreamError)}

    async def _readable_offsets(
        self, partitions: Iterable[TopicPartition]
    ) -> dict[TopicPartition, int | MillstreamError]:
        offsets: dict[TopicPartition, int | MillstreamError] = {}
        elsewhere: list[TopicPartition] = []
        for where in partitions:
            with suppress(MillstreamError):
                partition = self.topics.partition(where.topic, where.partition)
                if partition.is_leader:
                    offsets[where] = partition.high_watermark
                    continue
            elsewhere.append(where)
        if elsewhere:
            listed = await self.client().list_offsets_of(dict.fromkeys(elsewhere, -1))
            offsets |= {
                where: listed_offset if isinstance(listed_offset, MillstreamError) else listed_offset.offset
                for where, listed_offset in listed.items()
            }
        return offsets

    # -- what a source has in addition to records -----------------------------------------------------------

    async def offer(self, request: OfferRequest, rights: Rights | None = None) -> OfferResponse:
        """As a source: return the declared subscriptions and the states of queues that this node stores, as far as a
        client with these rights may read them.
        """
        if not request.topics:
            mirrored = [topic.name for topic in self.topics.all() if topic.mirror]
            origins = {topic.name: list(topic.origins) for topic in self.topics.all() if topic.origins}
            letters = {name: sorted(topics) for name, topics in self.subscriptions.letter_origins().items()}
            fenced = {topic.name: topic.mirror for topic in self.topics.all() if topic.is_draining}
            return OfferResponse(mirrored=mirrored, origins=origins, letters=letters, fenced=fenced)
        topic_ids = set(request.topics)
        names = {topic.name for topic in self.topics.all() if topic.topic_id in topic_ids}
        known = dict(request.known)
        declared = [
            subscription for subscription in self.subscriptions.declared.all() if names & set(subscription.topics)
        ]
        subscriptions = [
            OfferedSubscription(
                name=subscription.name,
                subscription_id=subscription.subscription_id,
                topics=list(subscription.topics),
                settings={key: text for key, text in subscription.shown_overrides().items() if text != HIDDEN},
                starts={topic: list(offsets) for topic, offsets in subscription.starts.items()},
                created_ms=subscription.created_ms,
            )
            for subscription in declared
            if rights is None or rights.group(Operation.READ, subscription.name)
        ]
        has_hidden = len(subscriptions) < len(declared)
        if rights is not None:
            topic_ids = {
                topic_id for topic_id in topic_ids if rights.topic(Operation.READ, rights.topic_name(topic_id) or "")
            }

        def may_read(subscription_id: UUID) -> bool:
            if rights is None:
                return True
            subscription = self.subscriptions.declared.by_id(subscription_id)
            return subscription is not None and rights.group(Operation.READ, subscription.name)

        queues: list[QueueSnapshot] = []
        size, has_more = 0, False
        for key, loaded in self.subscriptions.states.changed(
            lambda key, sequence: (
                key.topic_id in topic_ids
                and known.get(key) not in (sequence, ANY_SEQUENCE)
                and may_read(key.subscription_id)
            )
        ):
            if size > OFFER_BYTES_MAX:
                has_more = True
                break
            if loaded.snapshot is None:
                continue
            content = await asyncio.to_thread(loaded.snapshot) if loaded.is_large else loaded.snapshot()
            size += len(content)
            queues.append(QueueSnapshot(key, loaded.sequence, content))
        return OfferResponse(subscriptions=subscriptions, queues=queues, has_more=has_more, has_hidden=has_hidden)

    def metrics(self) -> Iterable[Metric]:
        now_ms = self.clock.now_ms()
        runs = list(self._runs.items())
        if not runs:
            return

        def by_copy(value: Callable[[Copy], float | None]) -> list[Sample]:
            samples = []
            for name, run in runs:
                for copy in run.copies():
                    number = value(copy)
                    if number is not None:
                        labels = (
                            ("mirror", name),
                            ("topic", copy.partition.topic.name),
                            ("partition", str(copy.partition.index)),
                        )
                        samples.append(Sample(number, labels))
            return samples

        yield Metric(
            "millstream_mirror_lag",
            "gauge",
            "Offsets of the source that clients cannot read here yet.",
            by_copy(lambda copy: copy.lag(now_ms)),
        )
        yield Metric(
            "millstream_mirror_lag_seconds",
            "gauge",
            "For how long a copy has been behind its source, or its source has not responded.",
            by_copy(lambda copy: None if (lag_ms := copy.lag_ms(now_ms)) is None else lag_ms / 1000),
        )
        yield Metric(
            "millstream_mirror_lag_unknown",
            "gauge",
            "Copies whose lag is unknown, because their source does not respond.",
            [
                Sample(
                    len(self.led(name)) - sum(copy.lag(now_ms) is not None for copy in run.copies()),
                    (("mirror", name),),
                )
                for name, run in runs
            ],
        )
        yield Metric(
            "millstream_mirror_bytes_total",
            "counter",
            "Bytes fetched from the source.",
            [Sample(run.copier.bytes_copied, (("mirror", name),)) for name, run in runs if run.copier is not None],
        )
        yield Metric(
            "millstream_mirror_failing",
            "gauge",
            "Copies that cannot be continued now.",
            [Sample(sum(bool(copy.error) for copy in run.copies()), (("mirror", name),)) for name, run in runs],
        )


def _is_cut_in(mirror: Mirror, request: CutRequest) -> bool:
    """Whether a cut belongs to a failover or switch of a mirror that has begun and not ended."""
    return mirror.cut_epochs.get(request.topic, {}).get(request.partition) == request.epoch


def _run_key(mirror: Mirror) -> tuple[UUID, str]:
    return mirror.mirror_id, mirror.overrides.get(SOURCE, "")


def own_history_start(partition: Partition, epoch: int) -> Offset | None:
    """Return the offset from which a copy holds records of this cluster, in an epoch; None if it has none."""
    log = partition.log
    return log.end_of_epoch(epoch - 1)[1] if log.latest_epoch >= epoch else None


def _complete_until(partition: Partition, verified: int | None, gap: int | None) -> Offset | None:
    """Return up to where a copy has whole transactions and every value of a key; None if all of it does.

    Whatever clients could read before has arrived as a whole.
    """
    before = partition.high_watermark
    limits = [] if verified is None else commits_from(partition, max(verified, before))[:1].tolist()
    if gap is not None:
        limits.append(max(gap, before))
    return Offset(min(limits)) if limits else None
