"""The declared pipelines, held in memory on every node; the catalog is the source of truth."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import NamedHolder
from millstream.core.credential import NO_OWNER, Owner
from millstream.core.errors import AlreadyLanded, InvalidPipeline, MillstreamError, PipelineExists, UnknownPipeline
from millstream.core.job import RUNS_KEPT, JobRun
from millstream.core.pipeline import (
    GROUP_PREFIX,
    TEXT_LENGTH_MAX,
    JobSettings,
    LandSettings,
    Pipeline,
    PipelineKind,
    Rule,
    check_pipeline,
)
from millstream.core.pipeline_rules import check_rules
from millstream.core.setting import with_changes
from millstream.core.tasks import finishing

_logger = logging.getLogger(__name__)


def check_landed_once(pipeline: Pipeline, declared: Iterable[Pipeline]) -> None:
    """Raise `AlreadyLanded` if another pipeline lands one of its topics in the same lake.

    Whether two patterns overlap is unknown until a topic matches both.
    """
    settings = _land_settings(pipeline)
    if settings is None:
        return
    for other in declared:
        theirs = _land_settings(other) if other.name != pipeline.name else None
        if theirs is None or _lake_url(theirs) != _lake_url(settings):
            continue
        for topic in _shared_topics(settings, theirs):
            raise AlreadyLanded(
                f"{topic} is already landed in this lake by pipeline {other.name!r}; change that pipeline with "
                f"`millstream pipeline update {other.name} --set …`, or set another `lake` for this one"
            )


def _land_settings(pipeline: Pipeline) -> LandSettings | None:
    try:
        settings = pipeline.settings
    except MillstreamError:
        # Declared by a version with other settings: it cannot run, and lands nothing.
        return None
    return settings if isinstance(settings, LandSettings) else None


def _lake_url(settings: LandSettings) -> str:
    return settings.lake.rstrip("/")


def _shared_topics(one: LandSettings, other: LandSettings) -> Iterable[str]:
    if one.pattern and one.pattern == other.pattern:
        return [f"what matches {one.pattern!r}"]
    named = one.topic_names or other.topic_names
    return [f"topic {name!r}" for name in named if one.takes(name) and other.takes(name)]


PIPELINES_MAX: Final = 1000


class Pipelines(NamedHolder[Pipeline]):
    noun = "pipeline"
    unknown = UnknownPipeline

    async def load(self) -> None:
        await self._load(Catalog.pipelines)

    def of_group(self, group_id: str) -> str | None:
        """Return the name of the declared pipeline that owns a group, if any."""
        name = group_id.removeprefix(GROUP_PREFIX)
        return name if name != group_id and name in self._by_name else None

    async def find(self, name: str) -> Pipeline:
        """Return the pipeline of this name, asking the catalog if another node may have just declared it."""
        return self._by_name.get(name) or await self._read(name)

    @finishing
    async def create(
        self,
        name: str,
        kind: PipelineKind,
        overrides: Mapping[str, str],
        *,
        rules: Iterable[Rule] = (),
        is_enabled: bool = True,
        validate_only: bool = False,
        owner: Owner | None = None,
    ) -> Pipeline:
        listed = tuple(sorted(rules, key=lambda rule: rule.name))
        settings = check_pipeline(name, kind, overrides)
        check_rules(kind, listed)
        # A job without a schedule runs once, and again when it is asked for.
        runs_now = isinstance(settings, JobSettings) and settings.schedule().is_empty and not settings.continuous
        async with self._changing:
            # Asked of the catalog, since another node may have just declared it.
            if await self._declarations.call(Catalog.pipeline_named, name) is not None:
                raise PipelineExists(f"pipeline {name!r} already exists")
            if len(self._by_name) >= PIPELINES_MAX:
                raise InvalidPipeline(f"there are {PIPELINES_MAX} pipelines already; delete some first")
            made = Pipeline(
                pipeline_id=self._new_id(),
                name=name,
                kind=kind,
                overrides=dict(overrides),
                is_enabled=is_enabled,
                created_ms=self._clock.now_ms(),
                rules=listed,
                owner=owner or NO_OWNER,
                requests=int(runs_now),
            )
            check_landed_once(made, self._by_name.values())
            if validate_only:
                return made
            await self._declarations.change(Catalog.add_pipeline, made)
            self._by_name[name] = made
        _logger.info("pipeline created", extra={"pipeline": name, "kind": str(kind)})
        self._notify()
        return made

    async def alter(
        self,
        name: str,
        changes: Mapping[str, str | None],
        *,
        validate_only: bool = False,
        owner: Owner | None = None,
    ) -> Pipeline:
        """Change settings durably; None resets one to its default.

        A parked pipeline is retried.
        """

        def changed(now: Pipeline) -> Pipeline:
            now.settings_class.check_names(changes)
            overrides = with_changes(now.overrides, changes)
            if "requirements" in changes and "lock" not in changes:
                # The lock belonged to the previous requirements.
                overrides.pop("lock", None)
            check_pipeline(name, now.kind, overrides)
            sealed = {key: value for key, value in now.sealed.items() if key not in changes}
            after = dataclasses.replace(now, overrides=overrides, parked="", sealed=sealed, owner=owner or now.owner)
            check_landed_once(after, self._by_name.values())
            return after

        if validate_only:
            return changed(await self.find(name))
        return await self._alter(name, changed, f"settings {', '.join(sorted(changes))}")

    async def start(self, name: str, *, owner: Owner | None = None) -> Pipeline:
        """Start a pipeline; one that was parked is retried."""
        return await self._set_enabled(name, True, owner, "started")

    async def stop(self, name: str, *, owner: Owner | None = None) -> Pipeline:
        return await self._set_enabled(name, False, owner, "stopped")

    async def _set_enabled(self, name: str, is_enabled: bool, owner: Owner | None, description: str) -> Pipeline:
        def changed(now: Pipeline) -> Pipeline:
            return dataclasses.replace(now, is_enabled=is_enabled, parked="", owner=owner or now.owner)

        return await self._alter(name, changed, description)

    async def request_run(self, name: str, *, owner: Owner | None = None) -> Pipeline:
        """Request a run of a job now, regardless of its schedule; a running job runs again afterwards."""

        def changed(now: Pipeline) -> Pipeline:
            settings = now.settings
            if not isinstance(settings, JobSettings):
                raise InvalidPipeline(
                    f"pipeline {name!r} is of the kind {now.kind}, which runs continuously; only jobs are triggered"
                )
            if settings.continuous:
                raise InvalidPipeline(f"job {name!r} is continuous and has one run without end; start it")
            return dataclasses.replace(
                now, requests=now.requests + 1, is_enabled=True, parked="", owner=owner or now.owner
            )

        return await self._alter(name, changed, "run requested")

    async def runs(self, pipeline: Pipeline, *, limit: int = RUNS_KEPT) -> list[JobRun]:
        return await self._declarations.call(Catalog.job_runs, pipeline.pipeline_id, limit=limit)

    async def begin_run(self, run: JobRun) -> bool:
        return await self._declarations.call(Catalog.begin_job_run, run)

    async def update_run(self, before: JobRun, after: JobRun) -> bool:
        return await self._declarations.call(Catalog.update_job_run, before, after)

    async def lock_requirements(self, pipeline: Pipeline, lock: str) -> Pipeline:
        """Store the resolved requirements of a job, unless they have changed meanwhile."""

        def changed(now: Pipeline) -> Pipeline:
            if now.overrides.get("requirements") != pipeline.overrides.get("requirements"):
                return now
            return dataclasses.replace(now, overrides={**now.overrides, "lock": lock})

        return await self._alter(pipeline.name, changed, "requirements resolved")

    async def park(self, pipeline: Pipeline, reason: str) -> Pipeline:
        """Record that a pipeline failed repeatedly, so that it is not run until it is started or changed.

        One that was changed or stopped meanwhile stays as it is.
        """

        def parked(now: Pipeline) -> Pipeline:
            return dataclasses.replace(now, parked=reason[:TEXT_LENGTH_MAX]) if now == pipeline else now

        return await self._alter(pipeline.name, parked, "parked")

    async def change_rules(
        self,
        name: str,
        rules: Iterable[Rule] = (),
        *,
        deleted: Iterable[str] = (),
        validate_only: bool = False,
        owner: Owner | None = None,
    ) -> Pipeline:
        """Add or replace rules by name and delete others, durably and atomically.

        A parked pipeline is retried.
        """
        put = {rule.name: rule for rule in rules}
        left_out = frozenset(deleted)

        def changed(now: Pipeline) -> Pipeline:
            known = {rule.name: rule for rule in now.rules}
            for missing in sorted(left_out - known.keys()):
                raise UnknownPipeline(f"pipeline {name!r} has no rule {missing!r}")
            merged = {**{key: rule for key, rule in known.items() if key not in left_out}, **put}
            after = tuple(merged[key] for key in sorted(merged))
            check_rules(now.kind, after)
            return dataclasses.replace(now, rules=after, parked="", owner=owner or now.owner)

        if validate_only:
            return changed(await self.find(name))
        return await self._alter(name, changed, f"{len(put)} rules put, {len(left_out)} removed")

    @finishing
    async def delete(self, name: str) -> Pipeline:
        async with self._changing:
            pipeline = await self._read(name)
            await self._delete(Catalog.delete_pipeline, pipeline)
        _logger.info("pipeline deleted", extra={"pipeline": name})
        self._notify()
        return pipeline

    @finishing
    async def _alter(self, name: str, change: Callable[[Pipeline], Pipeline], description: str) -> Pipeline:
        async with self._changing:
            pipeline = await self._read(name)
            stored = await self._declarations.change(Catalog.alter_pipeline, pipeline.pipeline_id, change)
            is_new = self._by_name.get(name) != stored
            self._by_name[name] = stored
        if is_new:
            _logger.info("pipeline changed", extra={"pipeline": name, "change": description})
            self._notify()
        return stored

    async def _read(self, name: str) -> Pipeline:
        pipeline = await self._declarations.call(Catalog.pipeline_named, name)
        if pipeline is None:
            raise self._unknown_error(name)
        return pipeline
