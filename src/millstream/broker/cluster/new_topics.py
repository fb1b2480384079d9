"""New topics: checks of names, partitions and replicas before a topic is declared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final
from uuid import UUID

from millstream.broker.cluster.keys import Placement
from millstream.core.config import Config
from millstream.core.errors import (
    InvalidPartitions,
    InvalidReplication,
    InvalidTopicName,
    MillstreamError,
    PolicyViolation,
    TopicExists,
)
from millstream.core.topic import INTERNAL_TOPICS, Topic, TopicSettings, check_topic_name

PARTITIONS_MAX: Final = 10_000
_SAFE_REPLICATION: Final = 3
_SAFE_IN_SYNC: Final = 2
"""With three replicas, two must have a record unless the topic says otherwise: one may be lost, and one down."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewTopic:
    """The parameters of a new topic; -1 means the default of the node."""

    name: str
    partitions: int = -1
    replication: int = -1
    overrides: Mapping[str, str] = field(default_factory=dict)
    internal: bool = False
    placement: Placement | None = None
    mirror: str = ""
    """The mirror that writes it, as a copy of the topic with `original_id`."""
    topic_id: UUID | None = None
    origins: tuple[str, ...] = ()
    original_id: UUID | None = None
    original_replication: int = 0
    """A copy has at least as many replicas by default; it has fewer if the cluster has fewer machines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CreationContext:
    names: Collection[str]
    metric_names: Mapping[str, str]
    config: Config
    defaults: TopicSettings
    failure_domains: int
    new_id: Callable[[], UUID]
    now_ms: int

    def declare_all(
        self, new_topics: Sequence[NewTopic], deleted: Collection[UUID] = ()
    ) -> list[Topic | MillstreamError]:
        """Return each topic that may be created, or why it may not; `deleted` are ids whose files still exist."""
        outcomes: list[Topic | MillstreamError] = []
        taken: dict[str, str] = {}
        for new_topic in new_topics:
            try:
                if new_topic.topic_id in deleted:
                    raise TopicExists(
                        f"topic {new_topic.name!r} was deleted, and its files are still being removed; try again"
                    )
                outcomes.append(self._declare(new_topic, taken))
                taken[metric_name(new_topic.name)] = new_topic.name
            except MillstreamError as error:
                outcomes.append(error)
        return outcomes

    def _declare(self, new: NewTopic, taken: Mapping[str, str]) -> Topic:
        """Return the requested topic; `taken` maps the metric names of topics declared with it to their names."""
        check_topic_name(new.name)
        if new.name in self.names:
            raise exists_error(new.name)
        shown_as = metric_name(new.name)
        twin = self.metric_names.get(shown_as) or taken.get(shown_as)
        if twin is not None:
            raise InvalidTopicName(
                f"topic {new.name!r} differs from topic {twin!r} only in '.' and '_', which metrics cannot distinguish"
            )
        if new.name in INTERNAL_TOPICS and not new.internal:
            raise PolicyViolation(f"the name {new.name!r} is reserved for the broker's own state")
        partitions = self.config.default_partitions if new.partitions == -1 else new.partitions
        check_partitions(partitions)
        nodes = self.failure_domains
        usual = max(self.config.default_replication, new.original_replication)
        copies = usual if new.replication == -1 else new.replication
        if new.replication == -1 or new.mirror:
            copies = max(1, min(copies, nodes))
        if not 1 <= copies <= max(1, nodes):
            raise InvalidReplication(
                f"replication factor {copies} needs as many machines, but this cluster has {nodes}"
            )
        TopicSettings.from_strings(new.overrides, base=self.defaults)
        return Topic(
            name=new.name,
            topic_id=new.topic_id or self.new_id(),
            partitions=partitions,
            replication=copies,
            overrides=dict(new.overrides),
            created_ms=self.now_ms,
            mirror=new.mirror,
            origins=new.origins,
            original_id=new.original_id,
        )


def check_partitions(partitions: int) -> None:
    if not 1 <= partitions <= PARTITIONS_MAX:
        raise InvalidPartitions(f"a topic has 1 to {PARTITIONS_MAX} partitions, not {partitions}")


def exists_error(name: str) -> TopicExists:
    return TopicExists(f"topic {name!r} already exists")


def metric_name(name: str) -> str:
    return name.replace(".", "_")


def safe_defaults(defaults: TopicSettings, replication: int) -> TopicSettings:
    """Return the default settings of a topic with this many replicas."""
    if replication < _SAFE_REPLICATION:
        return defaults
    return replace(defaults, min_insync_replicas=_SAFE_IN_SYNC)
