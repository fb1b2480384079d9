"""How far pipelines have landed topics, as their driver reports to this node; retention may ask for it.

Nothing of it is stored. What a pipeline has not reported since this node started counts as not landed; the driver
reports with every batch, even if it finds nothing new. Only the table that a pipeline is declared with counts: not what
a run by hand put elsewhere, nor what another pipeline of the same name, or with another lake, did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from uuid import UUID

from millstream.broker.cluster.topics import Topics
from millstream.broker.pipelines.declared import Pipelines
from millstream.core.errors import MillstreamError
from millstream.core.pipeline import LandSettings
from millstream.core.topic import TopicPartition

Offsets = Mapping[int, int]
"""By partition, the next offset that is not in the table."""


@dataclass(frozen=True, slots=True)
class Landing:
    """A landing pipeline, as it is declared now."""

    place: tuple[str, str]
    """Its lake, which may be that of the node, and the format of its tables."""
    takes: Callable[[str], bool]
    landed: dict[UUID, Offsets] = field(default_factory=dict)
    """By topic, how far it has landed there."""


class LandedBoard:
    """The last report of each pipeline about each topic."""

    def __init__(self, pipelines: Pipelines, topics: Topics) -> None:
        self._pipelines = pipelines
        self._topics = topics
        self._landings: dict[UUID, Landing] = {}
        self._of_topic: dict[str, list[Landing]] = {}
        """By name, which pipelines land a topic; filled on demand since the last change."""
        self._topics_version = -1

    def start(self) -> None:
        """Let retention ask here."""
        self._read()
        self._pipelines.when_changed(self._read)
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
        """Return the first offset that is not yet in the tables of all pipelines that land a partition."""
        topic = self._topics.get(place.topic)
        if topic is None:
            return 0
        try:
            partition = self._topics.partition(place.topic, place.partition)
        except MillstreamError:
            # It is coming here or going away, and nothing of it may be deleted for its age meanwhile.
            return 0
        if not partition.is_leader:
            # The leader knows, and others begin where it does.
            return partition.log_start
        landed = [one.landed.get(topic.topic_id, {}).get(place.partition, 0) for one in self._landing(place.topic)]
        return min(landed, default=0)

    def _landing(self, topic: str) -> list[Landing]:
        """Return which pipelines land a topic; patterns are matched once per topic, not per partition."""
        if self._topics_version != self._topics.version:
            self._of_topic.clear()
            self._topics_version = self._topics.version
        found = self._of_topic.get(topic)
        if found is None:
            found = self._of_topic[topic] = [one for one in self._landings.values() if one.takes(topic)]
        return found

    def _read(self) -> None:
        """Read the declared pipelines; keep the reports of those that still land at the same place."""
        before, self._landings = self._landings, {}
        self._of_topic.clear()
        for pipeline in self._pipelines.all():
            try:
                settings = pipeline.settings
            except MillstreamError:
                # A newer node may have declared what cannot be read here.
                continue
            if isinstance(settings, LandSettings):
                known = before.get(pipeline.pipeline_id)
                place = settings.lake, settings.format
                landed = known.landed if known is not None and known.place == place else {}
                self._landings[pipeline.pipeline_id] = Landing(place, settings.matcher(), landed)
