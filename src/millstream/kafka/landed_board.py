"""How far the pipelines that land topics have come, as their driver tells this node; retention may ask for it.

Nothing of it is kept on disk. What a pipeline has not told since this node began counts as not landed, and the driver
tells it again with every batch, also with those that find nothing new.
"""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

from millstream.cluster.pipelines import Pipelines
from millstream.cluster.topics import Topics
from millstream.model.errors import MillstreamError
from millstream.model.pipeline import LandSettings, Pipeline
from millstream.model.topic import TopicPartition

Landed = Mapping[int, int]
"""By partition, the next offset that is not in the table."""


class LandedBoard:
    """The last that each pipeline told of each topic."""

    def __init__(self, pipelines: Pipelines, topics: Topics) -> None:
        self._pipelines = pipelines
        self._topics = topics
        self._landed: dict[str, dict[UUID, Landed]] = {}

    def start(self) -> None:
        """Have retention ask here."""
        self._topics.use_landed_floor(self.floor)

    def take(self, pipeline: str, topic_id: UUID, landed: Landed) -> None:
        """A pipeline has come this far in a topic."""
        declared = {one.name for one in self._pipelines.all()}
        self._landed = {name: by_topic for name, by_topic in self._landed.items() if name in declared}
        if pipeline not in declared or self._topics.by_id(topic_id) is None:
            return
        known = self._landed.setdefault(pipeline, {})
        for gone in [one for one in known if self._topics.by_id(one) is None]:
            del known[gone]
        known[topic_id] = dict(landed)

    def floor(self, place: TopicPartition) -> int:
        """From where on a partition is not in the tables of all pipelines that land it; all of it if there is none."""
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
        landing = [one.name for one in self._pipelines.all() if _lands(one, place.topic)]
        told = [self._landed.get(name, {}).get(topic.topic_id, {}).get(place.partition, 0) for name in landing]
        return min(told, default=0)


def _lands(pipeline: Pipeline, topic: str) -> bool:
    try:
        settings = pipeline.settings
    except MillstreamError:
        # A newer node may have declared what cannot be read here.
        return False
    return isinstance(settings, LandSettings) and settings.takes(topic)
