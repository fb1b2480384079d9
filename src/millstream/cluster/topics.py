"""The topics of this node: the catalog's declarations joined with the partitions that carry them out."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping
from uuid import UUID

from millstream.catalog.catalog import Catalog
from millstream.config import Config
from millstream.log.store import LogStore
from millstream.model.clock import Clock
from millstream.model.errors import (
    InvalidPartitions,
    InvalidReplication,
    InvalidTopicName,
    PolicyViolation,
    TopicExists,
    UnknownTopic,
    UnknownTopicId,
)
from millstream.model.ids import PartitionIndex
from millstream.model.metric import Metric, Sample, gauge
from millstream.model.topic import INTERNAL_TOPICS, Topic, TopicPartition, TopicSettings, check_topic_name
from millstream.replication.partition import Partition

_logger = logging.getLogger(__name__)

PARTITIONS_MAX = 10_000
_NAMES_SHOWN_MAX = 5
_CLEANUP = "cleanup.policy"


class Topics:
    """Every topic and its partitions, by name and by id."""

    def __init__(self, catalog: Catalog, store: LogStore, config: Config, clock: Clock) -> None:
        self._catalog = catalog
        self._store = store
        self._config = config
        self._clock = clock
        self._defaults = TopicSettings(flush=config.default_flush, retention_ms=config.default_retention_ms)
        self._by_name: dict[str, Topic] = {}
        self._by_id: dict[UUID, Topic] = {}
        self._by_metric_name: dict[str, str] = {}
        self._partitions: dict[str, list[Partition]] = {}
        self._version = 0
        self._deletion_listeners: list[Callable[[Topic], None]] = []
        # One change of the catalog at a time; readers never wait for it.
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Finish interrupted deletions, then open every partition that the catalog declares."""
        declared = await asyncio.to_thread(self._catalog.topics)
        for topic_id in await asyncio.to_thread(self._catalog.deleted_topic_ids):
            self._remove_leftovers(topic_id)
            await asyncio.to_thread(self._catalog.forget_deleted, topic_id)
        for topic in declared:
            self._open(topic)
        known = {topic.topic_id for topic in declared}
        strangers = {topic_id for topic_id, _ in self._store.stored()} - known
        if strangers:
            _logger.warning(
                "the data folder holds partitions that the catalog does not know; they are left alone",
                extra={"topic_ids": ", ".join(sorted(map(str, strangers))[:_NAMES_SHOWN_MAX]), "count": len(strangers)},
            )

    @property
    def version(self) -> int:
        """A number that changes whenever a topic comes, grows or goes; it does not outlive the process."""
        return self._version

    def get(self, name: str) -> Topic | None:
        """The topic of this name, if there is one."""
        return self._by_name.get(name)

    def by_id(self, topic_id: UUID) -> Topic | None:
        """The topic with this id, if there is one."""
        return self._by_id.get(topic_id)

    def all(self) -> list[Topic]:
        """Every topic, by name."""
        return [self._by_name[name] for name in sorted(self._by_name)]

    def partition(self, name: str, index: int) -> Partition:
        """One partition by the topic's name."""
        partitions = self._partitions.get(name)
        if partitions is None:
            raise UnknownTopic(f"topic {name!r} does not exist")
        if not 0 <= index < len(partitions):
            raise UnknownTopic(f"topic {name!r} has {len(partitions)} partitions, there is no number {index}")
        return partitions[index]

    def partition_by_id(self, topic_id: UUID, index: int) -> Partition:
        """One partition by the topic's id."""
        topic = self._by_id.get(topic_id)
        if topic is None:
            raise UnknownTopicId(f"no topic has the id {topic_id}")
        return self.partition(topic.name, index)

    def high_watermark(self, name: str, index: int) -> int | None:
        """Where consumers of a partition will read next; None when there is no such partition."""
        partitions = self._partitions.get(name, ())
        return partitions[index].high_watermark if 0 <= index < len(partitions) else None

    def partitions_of(self, topic: Topic) -> list[Partition]:
        """The partitions of a topic, in order."""
        return self._partitions[topic.name]

    def settings_of(self, topic: Topic) -> TopicSettings:
        """What holds for a topic: the node's defaults and, on top, what its owner set."""
        return TopicSettings.from_strings(topic.overrides, base=self._defaults)

    async def create(
        self,
        name: str,
        *,
        partitions: int = -1,
        replication: int = -1,
        overrides: Mapping[str, str] | None = None,
        internal: bool = False,
        validate_only: bool = False,
    ) -> Topic:
        """Declare a topic durably, then open its partitions."""
        async with self._changing:
            topic = self._declare(name, partitions, replication, overrides or {}, internal=internal)
            if not validate_only:
                await asyncio.to_thread(self._catalog.add_topic, topic)
                self._open(topic)
                _logger.info("topic created", extra={"topic": name, "partitions": topic.partitions})
            return topic

    async def ensure(self, name: str) -> Topic:
        """The topic of this name; created if it is missing and the config allows that."""
        topic = self._by_name.get(name)
        if topic is not None:
            return topic
        check_topic_name(name)
        if not self._config.auto_create_topics:
            raise UnknownTopic(f"topic {name!r} does not exist, and auto-create-topics is off")
        try:
            return await self.create(name)
        except TopicExists:
            return self._by_name[name]

    async def delete(self, name: str) -> None:
        """Delete a topic and its data. The deletion record comes first, so that a crash cannot bring it back."""
        async with self._changing:
            topic = self._require(name)
            if topic.is_internal:
                raise PolicyViolation(f"topic {name!r} holds the broker's own state and cannot be deleted")
            await asyncio.to_thread(self._catalog.delete_topic, topic, now_ms=self._clock.now_ms())
            del self._by_name[name]
            del self._by_id[topic.topic_id]
            self._version += 1
            del self._by_metric_name[_metric_name(name)]
            for partition in self._partitions.pop(name):
                partition.close()
                self._store.delete_log(partition.log)
            await asyncio.to_thread(self._catalog.forget_deleted, topic.topic_id)
            for listener in self._deletion_listeners:
                listener(topic)
            _logger.info("topic deleted", extra={"topic": name})

    def when_deleted(self, listener: Callable[[Topic], None]) -> None:
        """Have `listener` called after each deletion of a topic."""
        self._deletion_listeners.append(listener)

    async def add_partitions(self, name: str, total: int, *, validate_only: bool = False) -> Topic:
        """Grow a topic to `total` partitions; it never shrinks."""
        async with self._changing:
            topic = self._require(name)
            if total <= topic.partitions:
                raise InvalidPartitions(
                    f"topic {name!r} has {topic.partitions} partitions; ask for more than that, not {total}"
                )
            self._check_partitions(total)
            grown = dataclasses.replace(topic, partitions=total)
            if not validate_only:
                await asyncio.to_thread(self._catalog.change_topic, grown)
                self._open(grown)
            return grown

    async def alter(
        self, name: str, changes: Mapping[str, str | None], *, replace: bool = False, validate_only: bool = False
    ) -> Topic:
        """Set some of a topic's settings; None takes a setting back to the node's default, `replace` all others."""
        async with self._changing:
            topic = self._require(name)
            overrides = {} if replace else dict(topic.overrides)
            for setting_name, text in changes.items():
                if text is None:
                    overrides.pop(setting_name, None)
                else:
                    overrides[setting_name] = text
            if topic.is_internal and overrides.get(_CLEANUP) != topic.overrides.get(_CLEANUP):
                raise PolicyViolation(f"topic {name!r} holds the broker's own state; its {_CLEANUP} stays as it is")
            settings = TopicSettings.from_strings(overrides, base=self._defaults)
            changed = dataclasses.replace(topic, overrides=overrides)
            if not validate_only:
                await asyncio.to_thread(self._catalog.change_topic, changed)
                self._register(changed)
                for partition in self._partitions[name]:
                    partition.change_settings(changed, settings)
            return changed

    def metrics(self) -> Iterable[Metric]:
        """What is stored and how much went in and out, by topic and by partition."""
        yield gauge("millstream_topics", "Topics.", len(self._by_name))
        yield gauge("millstream_partitions", "Partitions.", sum(map(len, self._partitions.values())))
        totals = (
            ("millstream_topic_records_in_total", "Records appended.", "records_in"),
            ("millstream_topic_bytes_in_total", "Bytes appended.", "bytes_in"),
            ("millstream_topic_bytes_out_total", "Bytes read.", "bytes_out"),
        )
        for name, text, attribute in totals:
            yield Metric(name, "counter", text, self._by_topic(attribute))
        yield Metric("millstream_log_start_offset", "gauge", "First offset kept.", self._by_partition("log_start"))
        yield Metric("millstream_high_watermark", "gauge", "Next offset to read.", self._by_partition("high_watermark"))
        yield Metric("millstream_log_bytes", "gauge", "Bytes on disk.", self._by_partition("size_bytes"))

    def _by_topic(self, attribute: str) -> Iterable[Sample]:
        for name, partitions in self._partitions.items():
            yield Sample(sum(getattr(partition, attribute) for partition in partitions), (("topic", name),))

    def _by_partition(self, attribute: str) -> Iterable[Sample]:
        for name, partitions in self._partitions.items():
            for partition in partitions:
                yield Sample(getattr(partition, attribute), (("topic", name), ("partition", str(partition.index))))

    def close(self) -> None:
        """Close every partition: waiting producers are told that the broker stops."""
        for partitions in self._partitions.values():
            for partition in partitions:
                partition.close()

    def _declare(
        self, name: str, partitions: int, replication: int, overrides: Mapping[str, str], *, internal: bool
    ) -> Topic:
        check_topic_name(name)
        if name in self._by_name:
            raise TopicExists(f"topic {name!r} exists already")
        twin = self._by_metric_name.get(_metric_name(name))
        if twin is not None:
            raise InvalidTopicName(
                f"topic {name!r} differs from topic {twin!r} only in '.' and '_', which metrics cannot tell apart"
            )
        if name in INTERNAL_TOPICS and not internal:
            raise PolicyViolation(f"the name {name!r} is kept for the broker's own state")
        wanted = self._config.default_partitions if partitions == -1 else partitions
        self._check_partitions(wanted)
        if replication not in (-1, 1):
            raise InvalidReplication(f"replication factor {replication} needs as many nodes, this cluster has 1")
        TopicSettings.from_strings(overrides, base=self._defaults)
        return Topic(
            name=name,
            topic_id=uuid.uuid4(),
            partitions=wanted,
            replication=1,
            overrides=dict(overrides),
            created_ms=self._clock.now_ms(),
        )

    def _remove_leftovers(self, topic_id: UUID) -> None:
        """Carry a deletion to its end that a crash interrupted."""
        for stored_id, index in tuple(self._store.stored()):
            if stored_id == topic_id:
                log = self._store.open_log(topic_id, TopicPartition(f"deleted-{topic_id}", index), self._defaults)
                self._store.delete_log(log)

    def _check_partitions(self, wanted: int) -> None:
        if not 1 <= wanted <= PARTITIONS_MAX:
            raise InvalidPartitions(f"a topic has 1 to {PARTITIONS_MAX} partitions, not {wanted}")

    def _require(self, name: str) -> Topic:
        topic = self._by_name.get(name)
        if topic is None:
            raise UnknownTopic(f"topic {name!r} does not exist")
        return topic

    def _register(self, topic: Topic) -> None:
        self._by_name[topic.name] = topic
        self._by_id[topic.topic_id] = topic
        self._by_metric_name[_metric_name(topic.name)] = topic.name

    def _open(self, topic: Topic) -> None:
        self._version += 1
        settings = self.settings_of(topic)
        partitions = self._partitions.get(topic.name, [])
        for number in range(len(partitions), topic.partitions):
            index = PartitionIndex(number)
            log = self._store.open_log(topic.topic_id, TopicPartition(topic.name, index), settings)
            partitions.append(Partition(topic, index, log, self._store))
        for partition in partitions:
            partition.topic = topic
        self._partitions[topic.name] = partitions
        self._register(topic)


def _metric_name(name: str) -> str:
    return name.replace(".", "_")
