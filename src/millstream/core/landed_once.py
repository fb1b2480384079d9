"""A table has one pipeline that lands it: with two, whoever comes first would decide about the columns of each row."""

from __future__ import annotations

from collections.abc import Iterable

from millstream.core.errors import InvalidPipeline, MillstreamError
from millstream.core.pipeline import LandSettings, Pipeline


def check_landed_once(pipeline: Pipeline, declared: Iterable[Pipeline]) -> None:
    """Raise `InvalidPipeline` when another pipeline lands one of its topics in the same lake.

    Whether two patterns meet is not known before a topic fits both of them.
    """
    settings = _landing(pipeline)
    if settings is None:
        return
    for other in declared:
        theirs = _landing(other) if other.name != pipeline.name else None
        if theirs is None or _place(theirs) != _place(settings):
            continue
        for topic in _shared(settings, theirs):
            raise InvalidPipeline(
                f"{topic} is landed by pipeline {other.name!r} already, and a table has one pipeline: change that one "
                f"(`millstream pipeline update {other.name} --set …`), or give this one a place of its own (`lake`)"
            )


def _landing(pipeline: Pipeline) -> LandSettings | None:
    try:
        settings = pipeline.settings
    except MillstreamError:
        # Declared by a version that knew other settings: it cannot run, and lands nothing.
        return None
    return settings if isinstance(settings, LandSettings) else None


def _place(settings: LandSettings) -> str:
    return settings.lake.rstrip("/")


def _shared(one: LandSettings, other: LandSettings) -> Iterable[str]:
    if one.pattern and one.pattern == other.pattern:
        return [f"What fits {one.pattern!r}"]
    named = one.topic_names or other.topic_names
    return [f"Topic {name!r}" for name in named if one.takes(name) and other.takes(name)]
