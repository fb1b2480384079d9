"""A node's part of every mirror: it copies the partitions that it leads, and reports on them.

One node, the controller of the target cluster, also does what there is to do once per mirror (`follower`): it creates
topics, carries over settings, offsets and queues, and moves on where clients may read transactions.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final, TypeVar

from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.topics import Topics
from millstream.broker.coordination.peers import WirePeers
from millstream.broker.mirror.copier import Copier, Copy, CopyKey
from millstream.broker.mirror.declared import Mirrors
from millstream.broker.mirror.source import Source
from millstream.broker.replication.partition import Partition
from millstream.core.backoff import Backoff
from millstream.core.clock import Clock
from millstream.core.errors import InvalidMirror, MillstreamError, NotLeader
from millstream.core.ids import Epoch, NodeId, Offset, PartitionIndex
from millstream.core.metric import Metric, Sample
from millstream.core.mirror import Mirror, TopicOffsets
from millstream.core.tasks import Supervise, run_until_first
from millstream.core.topic import Topic, TopicPartition
from millstream.protocol.private.message import Response, decode, encode
from millstream.protocol.private.mirror_messages import CUT_KEY, CutPartition, CutRequest, CutResponse
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import error_from_code

_logger = logging.getLogger(__name__)

REFRESH_S: Final = 1.0
"""How often a node looks which copies it leads."""
EPOCH_STEP: Final = 1000
"""How far a cut raises the epoch: the old source does not elect that often before it follows this cluster."""
R = TypeVar("R", bound=Response)


class MirrorRun:
    """One mirror on this node, while it is not paused."""

    def __init__(self, mirror: Mirror, service: MirrorService) -> None:
        self.mirror = mirror
        self.settings = mirror.settings
        self.service = service
        self.copier: Copier | None = None
        self.source: Source | None = None
        self.error = ""
        self.notes: dict[str, str] = {}
        """What could not be mirrored, and why."""
        self.groups: dict[str, dict[TopicPartition, int]] = {}
        """The offsets of groups that were applied here."""
        self.queues = 0
        """The number of queues whose state was applied."""
        self.refreshed = asyncio.Event()
        self.task: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Run until cancelled, connecting again after each failure."""
        from millstream.broker.mirror.follower import Follower

        backoff = Backoff(max_s=5.0)
        while True:
            try:
                async with Source(self.settings, name=self.mirror.name) as source:
                    if source.cluster_id == self.service.membership.cluster_id:
                        raise InvalidMirror(f"{self.settings.source} is this cluster itself")
                    self.source = source
                    self.copier = Copier(
                        self.service.topics,
                        source,
                        self.service.clock,
                        rate=self.settings.rate,
                        gates=source.is_millstream,
                        cut_of=self._cut_of,
                    )
                    self.error = ""
                    backoff.reset()
                    follower = Follower(self, source, self.copier)
                    await run_until_first([self.copier.run(), self._refresh(self.copier), follower.run()])
            except MillstreamError as error:
                if self.error != str(error):
                    _logger.warning(
                        "a mirror cannot run; retrying", extra={"mirror": self.mirror.name, "error": str(error)}
                    )
                self.error = str(error)
            finally:
                self.source = self.copier = None
            await backoff.pause()

    def _cut_of(self, partition: Partition) -> int | None:
        """Return up to where a copy may be truncated: only one that was reversed."""
        mirror = self.service.mirrors.get(self.mirror.name) or self.mirror
        return mirror.cuts.get(partition.topic.name, {}).get(partition.index)

    async def _refresh(self, copier: Copier) -> None:
        """Follow the partitions that this node leads; runs forever."""
        while True:
            mirror = self.service.mirrors.get(self.mirror.name) or self.mirror
            copier.follow(self._led(mirror))
            with suppress(TimeoutError):
                async with asyncio.timeout(REFRESH_S):
                    await self.refreshed.wait()
            self.refreshed.clear()

    def _led(self, mirror: Mirror) -> Iterator[Copy]:
        topics = self.service.topics
        for topic in topics.all():
            if topic.mirror != mirror.name or topic.is_draining:
                continue
            verified = mirror.verified.get(topic.name, {})
            for partition in topics.partitions_of(topic):
                key = topic.topic_id, partition.index
                if partition.is_leader and key not in self.service.cutting:
                    original = TopicPartition(mirror.source_name(topic), partition.index)
                    yield Copy(partition, original, verified=verified.get(partition.index, 0))

    # -- what is shown --------------------------------------------------------------------------------------

    @property
    def state(self) -> str:
        if self.error or (self.copier is not None and any(copy.error for copy in self.copier.copies.values())):
            return "retrying"
        return "starting" if self.copier is None else "running"

    def copies(self) -> list[Copy]:
        return [] if self.copier is None else list(self.copier.copies.values())

    def describe(self, now_ms: int) -> dict[str, Any]:
        """Return how this node's part does."""
        return {
            "node": self.service.membership.me.node_id,
            "state": self.state,
            "error": self.error,
            "source_cluster": "" if self.source is None else self.source.cluster_id,
            "bytes": 0 if self.copier is None else self.copier.bytes_copied,
            "notes": [self.notes[key] for key in sorted(self.notes)],
            "groups": len(self.groups),
            "queues": self.queues,
            "partitions": [
                {
                    "topic": copy.partition.topic.name,
                    "partition": copy.partition.index,
                    "source_end": copy.source_end,
                    "end": copy.end,
                    "exposed": copy.partition.high_watermark,
                    "lag": copy.lag,
                    "lag_ms": _lag_ms(copy, now_ms),
                    "epoch": copy.partition.leader_epoch,
                    "error": copy.error,
                }
                for copy in self.copies()
            ],
        }


def _lag_ms(copy: Copy, now_ms: int) -> int | None:
    if copy.lag is None:
        return None
    return max(0, now_ms - copy.caught_up_ms) if copy.lag else 0


class MirrorService:
    """The mirrors of one node."""

    def __init__(
        self,
        topics: Topics,
        membership: Membership,
        mirrors: Mirrors,
        clock: Clock,
        supervise: Supervise,
    ) -> None:
        self.topics = topics
        self.membership = membership
        self.mirrors = mirrors
        self.clock = clock
        self.cutting: set[CopyKey] = set()
        """Copies that are being made writable; nothing is copied to them any more."""
        self.peers = WirePeers(membership.node, me=membership.me.node_id)
        self._supervise = supervise
        self._runs: dict[str, MirrorRun] = {}
        self._client: Client | None = None
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_owner(self) -> bool:
        """Whether this node does what there is to do once per mirror."""
        return self.membership.controller_id == self.membership.me.node_id

    def start(self) -> None:
        """Restrict what clients may read, then run the declared mirrors."""
        for mirror in self.mirrors.all():
            self._restrict(mirror)
        self.mirrors.on_change(self._changed.set)
        self._changed.set()
        self._task = self._supervise("mirrors", self._run())

    async def close(self) -> None:
        """Stop copying."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        if self._client is not None:
            await self._client.close()
        await self.peers.close()

    def client(self) -> Client:
        """Return a client of this cluster."""
        if self._client is None:
            self._client = Client.connect(self.membership.addresses(), client_id="mirrors")
        return self._client

    def run_of(self, name: str) -> MirrorRun | None:
        """Return what this node runs of a mirror."""
        return self._runs.get(name)

    def copied_topics(self, name: str) -> list[Topic]:
        """Return the topics that a mirror writes."""
        return [topic for topic in self.topics.all() if topic.mirror == name]

    def _restrict(self, mirror: Mirror) -> None:
        """After a restart: let clients read only up to where transactions are known to be whole."""
        for topic in self.copied_topics(mirror.name):
            verified = mirror.verified.get(topic.name, {})
            for partition in self.topics.partitions_of(topic):
                if partition.index in verified:
                    partition.expose(Offset(max(verified[partition.index], partition.log_start)))

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
        declared = {mirror.name: mirror for mirror in self.mirrors.all() if mirror.is_due}
        for name, run in list(self._runs.items()):
            now = declared.get(name)
            if now is None or now.mirror_id != run.mirror.mirror_id or now.overrides != run.mirror.overrides:
                await self._stop(name)
        for name, mirror in declared.items():
            if name not in self._runs:
                run = self._runs[name] = MirrorRun(mirror, self)
                run.task = self._supervise(f"mirror {name}", run.run())
            self._runs[name].refreshed.set()

    async def _stop(self, name: str) -> None:
        run = self._runs.pop(name)
        if run.task is not None:
            run.task.cancel()
            await asyncio.wait([run.task])

    # -- what others ask for --------------------------------------------------------------------------------

    def describe(self, mirror: Mirror) -> dict[str, Any]:
        """Return a mirror as declared, and how this node's part of it does."""
        run = self._runs.get(mirror.name)
        return {
            "name": mirror.name,
            "mirror_id": str(mirror.mirror_id),
            "settings": mirror.settings.as_strings(),
            "overrides": mirror.shown_overrides(),
            "wanted": mirror.is_wanted,
            "problem": mirror.idle_reason,
            "created_ms": mirror.created_ms,
            "version": mirror.version,
            "topics": [topic.name for topic in self.copied_topics(mirror.name)],
            "cuts": {topic: dict(offsets) for topic, offsets in mirror.cuts.items()},
            "report": None if run is None else run.describe(self.clock.now_ms()),
        }

    async def cut(self, request: CutRequest) -> CutPartition:
        """Cut a copy that this node leads where its transactions are whole, and lead it in a later epoch.

        May be repeated: nothing is cut twice.
        """
        partition = self.topics.partition(request.topic, request.partition)
        topic = partition.topic
        if not partition.is_leader:
            raise NotLeader(f"{partition.log.partition} is not led by this node")
        key = topic.topic_id, partition.index
        self.cutting.add(key)
        try:
            run = self._runs.get(request.mirror)
            copy = None if run is None or run.copier is None else run.copier.drop(key)
            log = partition.log
            limit = partition.exposed
            if copy is not None:
                limit = copy.exposed
            end = log.end_offset
            if limit is not None and limit < end:
                await partition.cut_mirrored(limit)
            else:
                partition.expose(None)
            stored = partition.stored()
            if stored is not None:
                await stored
            cut = int(log.end_offset)
            epoch = Epoch(max(partition.leader_epoch, log.latest_epoch) + EPOCH_STEP)
            await self.topics.raise_epoch(topic, partition.index, epoch)
            await partition.begin_own_history()
            aborted = await partition.abort_open()
            return CutPartition(
                topic=topic.name,
                partition=partition.index,
                offset=cut,
                epoch=partition.leader_epoch,
                dropped=int(end) - cut,
                aborted=aborted,
            )
        except BaseException:
            self.cutting.discard(key)
            raise

    def release(self, topic: Topic) -> None:
        """Note that a topic is writable now, or no longer to be cut."""
        self.cutting -= {(topic.topic_id, PartitionIndex(index)) for index in range(topic.partitions)}

    async def ask_leader(self, where: TopicPartition, key: int, request: Any, kind: type[R]) -> R:
        """Send a request to the node that leads a partition."""

        async def attempt(node: NodeId) -> R:
            answer = decode(await self.client().private(node, key, encode(request), waits=True), kind)
            if answer.error:
                raise error_from_code(answer.error, answer.message, about=str(where))
            return answer

        return await self.client().call_leader(where.topic, where.partition, attempt)

    async def cut_everywhere(self, mirror: str, where: TopicPartition) -> CutPartition:
        """Let the leader of a copy cut it."""
        asked = CutRequest(mirror=mirror, topic=where.topic, partition=where.partition)
        answer = await self.ask_leader(where, CUT_KEY, asked, CutResponse)
        if answer.cut is None:
            raise NotLeader(f"the leader of {where} did not say where it was cut")
        return answer.cut

    def metrics(self) -> Iterable[Metric]:
        """Yield the lag, the traffic and the errors of mirrors."""
        now_ms = self.clock.now_ms()
        runs = list(self._runs.items())
        if not runs:
            return

        def by_copy(value: Callable[[Copy], float | None]) -> list[Sample]:
            found = []
            for name, run in runs:
                for copy in run.copies():
                    number = value(copy)
                    if number is not None:
                        labels = (
                            ("mirror", name),
                            ("topic", copy.partition.topic.name),
                            ("partition", str(copy.partition.index)),
                        )
                        found.append(Sample(number, labels))
            return found

        yield Metric(
            "millstream_mirror_lag",
            "gauge",
            "Offsets of the source that clients cannot read here yet.",
            by_copy(lambda copy: copy.lag),
        )
        yield Metric(
            "millstream_mirror_lag_seconds",
            "gauge",
            "For how long a copy has been behind its source.",
            by_copy(lambda copy: None if (lag_ms := _lag_ms(copy, now_ms)) is None else lag_ms / 1000),
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


def merged_offsets(before: TopicOffsets, after: TopicOffsets) -> dict[str, dict[int, int]]:
    """Return offsets by topic and partition, the later ones in place of the earlier."""
    merged = {topic: dict(offsets) for topic, offsets in before.items()}
    for topic, offsets in after.items():
        known: dict[int, int] = merged.setdefault(topic, {})
        known.update(offsets)
    return merged


def without_topics(offsets: TopicOffsets, topics: Mapping[str, object]) -> dict[str, dict[int, int]]:
    """Return offsets by topic and partition without those of some topics."""
    return {topic: dict(found) for topic, found in offsets.items() if topic not in topics}
