"""Advice to the owner of a pipeline when it is declared or changed: hints that do not reject it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Final

from millstream.broker.cluster.topics import Topics
from millstream.broker.pipelines.declared import Pipelines
from millstream.core.errors import MillstreamError
from millstream.core.pipeline import Pipeline
from millstream.core.setting import suggestion

NAMED_MAX: Final = 5
"""The most topics named in a note."""

Routes = Mapping[str, Mapping[str, str]]
"""For each topic, the topics that its messages reach and the pipeline that takes them there."""


class PipelineAdvice:
    """Compares a pipeline with the existing topics and pipelines."""

    def __init__(self, pipelines: Pipelines, topics: Topics) -> None:
        self._pipelines = pipelines
        self._topics = topics

    def notes_for(self, pipeline: Pipeline) -> list[str]:
        """Return the hints, a sentence each."""
        with suppress(MillstreamError):
            # The declaration of an older node may not be readable here.
            return [*self._missing(pipeline), *_unused(pipeline), *self._loops(pipeline)]
        return []

    def _missing(self, pipeline: Pipeline) -> Iterator[str]:
        if not pipeline.settings.names_every_topic:
            return
        missing = [name for name in pipeline.flows() if self._topics.get(name) is None]
        known = [topic.name for topic in self._topics.all()] if missing else []
        for name in missing[:NAMED_MAX]:
            yield f"There is no topic {name!r} yet; the pipeline waits for it{suggestion(name, known) or '.'}"
        if len(missing) > NAMED_MAX:
            yield f"{len(missing) - NAMED_MAX} more of its topics do not exist yet either."

    def _loops(self, pipeline: Pipeline) -> Iterator[str]:
        routes = _routes([*(one for one in self._pipelines.all() if one.name != pipeline.name), pipeline])
        for topic, targets in pipeline.flows().items():
            for target in sorted(targets):
                path = _path(routes, target, topic)
                if path is not None:
                    round_trip = [topic, *path]
                    steps = zip(round_trip, path, strict=False)
                    names = sorted({pipeline.name, *(routes[one][other] for one, other in steps)})
                    yield (
                        f"Messages may loop forever: {' to '.join(round_trip)}, through the pipelines "
                        f"{', '.join(names)}. Add a condition that ends the loop."
                    )
                    return


def _unused(pipeline: Pipeline) -> Iterator[str]:
    for setting, name, reads in pipeline.settings.unused_names():
        yield f"The statement does not read {name!r}, which `{setting}` names{suggestion(name, reads) or '.'}"


def _routes(pipelines: Iterable[Pipeline]) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for pipeline in pipelines:
        with suppress(MillstreamError):
            for topic, targets in pipeline.flows().items():
                found.setdefault(topic, {}).update(dict.fromkeys(targets, pipeline.name))
    return found


def _path(routes: Routes, start: str, goal: str) -> list[str] | None:
    """Return the topics from one to another, both included; None if messages do not get there."""
    before: dict[str, str | None] = {start: None}
    waiting = [start]
    for topic in waiting:
        if topic == goal:
            path = [topic]
            while (last := before[path[0]]) is not None:
                path.insert(0, last)
            return path
        for target in routes.get(topic, {}):
            if target not in before:
                before[target] = topic
                waiting.append(target)
    return None
