"""The progress of landing pipelines, as their drivers report it to this node; retention may wait for it.

Nothing of it is stored. What a pipeline has not reported since this node started counts as not landed, and the driver
reports it with every batch, empty ones included. Only what is in the table that a pipeline is declared with counts: not
what a manual run wrote elsewhere, nor what another pipeline of the same name, or with another lake, did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from uuid import UUID

from millstream.broker.cluster.topics import Topics
from millstream.broker.pipelines.declared import Pipelines
from millstream.core.errors import MillstreamError
from millstream.core.pipeline import LandSettings, LedgerSettings
from millstream.core.topic import TopicPartition

Offsets = Mapping[int, int]
"""The next offset that is not in the table, by partition."""


@dataclass(frozen=True, slots=True)
class Landing:
    """A landing pipeline as it is declared now."""

    place: tuple[str, str]
    """Its lake, possibly the node's, and the format of its tables."""
    takes: Callable[[str], bool]
    landed: dict[UUID, Offsets] = field(default_factory=dict)
    """The landed offsets in that place, by topic."""


class LandedBoard:
    """The last report of each pipeline for each topic."""

    def __init__(self, pipelines: Pipelines, topics: Topics) -> None:
        self._pipelines = pipelines
        self._topics = topics
        self._landings: dict[UUID, Landing] = {}
        self._of_topic: dict[str, list[Landing]] = {}
        """The pipelines that land a topic, by name; cached until pipelines or topics change."""
        self._topics_version = -1

    def start(self) -> None:
        """Let retention ask here."""
        self._read()
        self._pipelines.on_change(self._read)
        self._topics.use_landed_floor(self.floor)

    def take(self, pipeline_id: UUID, place: tuple[str, str], topic_id: UUID, offsets: Offsets) -> None:
        """Record how far a pipeline has landed a topic, in tables at a place."""
        landing = self._landings.get(pipeline_id)
        if landing is None or landing.place != place or self._topics.by_id(topic_id) is None:
            return
        for gone in [one for one in landing.landed if self._topics.by_id(one) is None]:
            del landing.landed[gone]
        landing.landed[topic_id] = dict(offsets)

    def floor(self, place: TopicPartition) -> int:
        """Return from which offset on a partition is not in the tables of all pipelines that land it; the end if there
        is none.
        """
        topic = self._topics.get(place.topic)
        if topic is None:
            return 0
        try:
            partition = self._topics.partition(place.topic, place.partition)
        except MillstreamError:
            # The partition is moving, and nothing of it may be deleted meanwhile.
            return 0
        if not partition.is_leader:
            # The leader knows, and followers start where it does.
            return partition.log_start
        landed = [one.landed.get(topic.topic_id, {}).get(place.partition, 0) for one in self._landing(place.topic)]
        return min(landed, default=0)

    def _landing(self, topic: str) -> list[Landing]:
        """Return the pipelines that land a topic; patterns are matched once per topic."""
        if self._topics_version != self._topics.version:
            self._of_topic.clear()
            self._topics_version = self._topics.version
        found = self._of_topic.get(topic)
        if found is None:
            found = self._of_topic[topic] = [one for one in self._landings.values() if one.takes(topic)]
        return found

    def _read(self) -> None:
        """Follow the declared pipelines, keeping reports of those that still land in the same place."""
        before, self._landings = self._landings, {}
        self._of_topic.clear()
        for pipeline in self._pipelines.all():
            try:
                settings = pipeline.settings
            except MillstreamError:
                # A newer node may have declared settings that are unknown here.
                continue
            if isinstance(settings, LandSettings | LedgerSettings):
                known = before.get(pipeline.pipeline_id)
                place = settings.lake, settings.format
                landed = known.landed if known is not None and known.place == place else {}
                self._landings[pipeline.pipeline_id] = Landing(place, settings.matcher(), landed)
