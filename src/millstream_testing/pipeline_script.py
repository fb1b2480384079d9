"""Helpers for tests of the pipeline runtime: scripted jobs, and a claim without contenders."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Sequence

from millstream.core.pipeline import Pipeline, PipelineKind
from millstream.pipelines.jobs.job import JobContext, Step
from millstream.protocol.wire.group_offsets import GroupMember

HANG_S = 60.0


def landing(name: str = "landing", **overrides: str) -> Pipeline:
    return Pipeline(
        pipeline_id=uuid.uuid5(uuid.NAMESPACE_OID, name),
        name=name,
        kind=PipelineKind.LAND,
        overrides={"topics": "orders", **overrides},
    )


class UncontendedClaim:
    """A claim that is held as soon as it is taken; `busy` errors are raised first."""

    def __init__(self, busy: Sequence[Exception] = ()) -> None:
        self.busy = list(busy)
        self.on_lost: Callable[[], None] = lambda: None
        self.taken = 0
        self.left = 0
        self.is_held = False
        self.confirms = True
        """Whether the broker responds while it is held."""

    @property
    def is_confirmed(self) -> bool:
        return self.is_held and self.confirms

    def member(self) -> GroupMember:
        return GroupMember("me", self.taken)

    def take(self) -> None:
        """Acquire it, unless `busy` errors remain."""
        if self.busy:
            raise self.busy.pop(0)
        self.taken += 1
        self.is_held = True

    def leave(self) -> None:
        self.left += 1
        self.is_held = False

    def lose(self) -> None:
        self.is_held = False
        self.on_lost()


class Script:
    """Creates jobs that execute the lines of a script in order, and then wait for more."""

    def __init__(self, *lines: Step | Exception) -> None:
        self._lines: Iterator[Step | Exception] = iter(lines)
        self.contexts: list[JobContext] = []
        self.pipelines: list[Pipeline] = []
        self.closed = 0
        self.at_end = threading.Event()
        self.fails_when_stopped = False

    def __call__(self, pipeline: Pipeline, context: JobContext) -> ScriptedJob:
        self.pipelines.append(pipeline)
        self.contexts.append(context)
        return ScriptedJob(self, context)

    def next_line(self) -> Step | Exception | None:
        return next(self._lines, None)


class ScriptedJob:
    def __init__(self, script: Script, context: JobContext) -> None:
        self._script = script
        self._context = context

    def step(self) -> Step:
        """Execute the next line."""
        line = self._script.next_line()
        if line is None:
            self._script.at_end.set()
            self._context.stopping.wait(HANG_S)
            if self._script.fails_when_stopped:
                raise RuntimeError("cancelled")
            return Step()
        if isinstance(line, Exception):
            raise line
        return line

    def close(self) -> None:
        self._script.closed += 1
