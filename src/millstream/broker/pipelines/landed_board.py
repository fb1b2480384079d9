"""How far the pipelines that land topics have come, as their driver tells this node; retention may ask for it.

Nothing of it is kept on disk. What a pipeline has not told since this node began counts as not landed, and the driver
tells it again with every batch, also with those that find nothing new. Only what is in the table that a pipeline is
declared with counts: not what a run by hand put elsewhere, nor what one of the same name, or with another lake, did.
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
    """A pipeline that lands topics, as it is declared now."""

    place: tuple[str, str]
    """The lake that is said for it, which may be that of the node, and the format of its tables."""
    takes: Callable[[str], bool]
    landed: dict[UUID, Offsets] = field(default_factory=dict)
    """By topic, how far it has come in that place."""


class LandedBoard:
    """The last that each pipeline told of each topic."""

    def __init__(self, pipelines: Pipelines, topics: Topics) -> None:
        self._pipelines = pipelines
        self._topics = topics
        self._landings: dict[UUID, Landing] = {}
        self._of_topic: dict[str, list[Landing]] = {}
        """By name, who lands a topic, as far as somebody asked since the pipelines or the topics changed."""
        self._topics_version = -1

    def start(self) -> None:
        """Have retention ask here."""
        self._read()
        self._pipelines.when_changed(self._read)
        self._topics.use_landed_floor(self.floor)

    def take(self, pipeline_id: UUID, place: tuple[str, str], topic_id: UUID, offsets: Offsets) -> None:
        """A pipeline has come this far in a topic, in tables at a place."""
        landing = self._landings.get(pipeline_id)
        if landing is None or landing.place != place or self._topics.by_id(topic_id) is None:
            return
        for gone in [one for one in landing.landed if self._topics.by_id(one) is None]:
            del landing.landed[gone]
        landing.landed[topic_id] = dict(offsets)

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
        landed = [one.landed.get(topic.topic_id, {}).get(place.partition, 0) for one in self._landing(place.topic)]
        return min(landed, default=0)

    def _landing(self, topic: str) -> list[Landing]:
        """Who lands a topic; expressions are matched once for each, and not for every partition again and again."""
        if self._topics_version != self._topics.version:
            self._of_topic.clear()
            self._topics_version = self._topics.version
        found = self._of_topic.get(topic)
        if found is None:
            found = self._of_topic[topic] = [one for one in self._landings.values() if one.takes(topic)]
        return found

    def _read(self) -> None:
        """Know the pipelines as they are declared now, and of each what it told unless it lands elsewhere now."""
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
