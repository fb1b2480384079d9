"""Pipelines, their rules and the runs of jobs in the catalog.

The row of a run is written before it begins, and changed by compare-and-swap.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any
from uuid import UUID

from sqlalchemy import ColumnElement, delete, insert, select, update
from sqlalchemy.engine import Connection

from millstream.broker.catalog.tables import (
    declared_of,
    in_parts,
    insert_into,
    job_runs,
    pipelines,
    routing_rules,
    row_of,
)
from millstream.core.errors import UnknownPipeline
from millstream.core.job import RUNS_KEPT, JobRun
from millstream.core.pipeline import Pipeline, Rule


def read_pipelines(connection: Connection, *conditions: ColumnElement[bool]) -> list[Pipeline]:
    """Return every pipeline that meets the conditions, by name, as it is stored."""
    # One statement, so that the rules are those of the pipelines as they are read.
    both = pipelines.outerjoin(routing_rules, pipelines.c.pipeline_id == routing_rules.c.pipeline_id)
    rule_name = routing_rules.c.name.label("rule_name")
    columns = [column for column in routing_rules.c if column.name not in ("pipeline_id", "name")]
    rows: dict[str, tuple[Any, list[Rule]]] = {}
    for row in connection.execute(select(pipelines, rule_name, *columns).select_from(both).where(*conditions)):
        _, rules = rows.setdefault(row.name, (row, []))
        if row.rule_name is not None:
            rules.append(replace(declared_of(Rule, row), name=row.rule_name))
    # Sorted here, since the order of databases differs.
    return [_pipeline(*rows[name]) for name in sorted(rows)]


def read_pipeline_named(connection: Connection, name: str) -> Pipeline | None:
    return next(iter(read_pipelines(connection, pipelines.c.name == name)), None)


def lock_pipeline(connection: Connection, pipeline_id: UUID) -> Pipeline:
    """Return the pipeline with this id, locked until the end of the transaction."""
    here = pipelines.c.pipeline_id == str(pipeline_id)
    # First the lock, then the rules: a statement that waits for a lock sees other tables as they were before.
    connection.execute(select(pipelines.c.pipeline_id).where(here).with_for_update())
    for pipeline in read_pipelines(connection, here):
        return pipeline
    raise UnknownPipeline(f"pipeline {pipeline_id} is not in the catalog")


def insert_pipeline(connection: Connection, pipeline: Pipeline) -> None:
    """Add a pipeline, whose secrets are sealed."""
    connection.execute(insert(pipelines).values(row_of(pipeline)))
    _insert_rules(connection, pipeline.pipeline_id, pipeline.rules)


def update_pipeline(connection: Connection, before: Pipeline, after: Pipeline) -> None:
    """Store the changed columns, and the rules that differ."""
    here = pipelines.c.pipeline_id == str(before.pipeline_id)
    connection.execute(update(pipelines).where(here).values(row_of(after)))
    old, new = set(before.rules), set(after.rules)
    _delete_rules(connection, before.pipeline_id, [rule.name for rule in before.rules if rule not in new])
    _insert_rules(connection, before.pipeline_id, [rule for rule in after.rules if rule not in old])


def delete_pipeline(connection: Connection, pipeline_id: UUID) -> bool:
    """Delete a pipeline with its rules and runs; return whether it existed."""
    connection.execute(delete(job_runs).where(job_runs.c.pipeline_id == str(pipeline_id)))
    connection.execute(delete(routing_rules).where(routing_rules.c.pipeline_id == str(pipeline_id)))
    return connection.execute(delete(pipelines).where(pipelines.c.pipeline_id == str(pipeline_id))).rowcount == 1


def _insert_rules(connection: Connection, pipeline_id: UUID, rules: Sequence[Rule]) -> None:
    if not rules:
        return
    rows = [{"pipeline_id": str(pipeline_id), **row_of(rule)} for rule in rules]
    connection.execute(insert(routing_rules), rows)


def _delete_rules(connection: Connection, pipeline_id: UUID, names: Sequence[str]) -> None:
    here = routing_rules.c.pipeline_id == str(pipeline_id)
    for gone in in_parts(routing_rules.c.name, names):
        connection.execute(delete(routing_rules).where(here, gone))


def _pipeline(row: Any, rules: Iterable[Rule]) -> Pipeline:
    return replace(declared_of(Pipeline, row), rules=tuple(sorted(rules, key=lambda rule: rule.name)))


def read_runs(connection: Connection, pipeline_id: UUID, limit: int) -> list[JobRun]:
    """Return the last runs of a job, the latest first."""
    query = select(job_runs).where(job_runs.c.pipeline_id == str(pipeline_id))
    return [
        declared_of(JobRun, row) for row in connection.execute(query.order_by(job_runs.c.number.desc()).limit(limit))
    ]


def begin_run(connection: Connection, run: JobRun) -> bool:
    """Store the start of a run; return False if another node has started it, or deleted the job."""
    row = row_of(run)
    # The lock keeps the job from being deleted meanwhile, which would leave its run behind.
    declared = select(pipelines.c.pipeline_id).where(pipelines.c.pipeline_id == row["pipeline_id"])
    if connection.execute(declared.with_for_update()).first() is None:
        return False
    # Not by the count of rows: PostgreSQL's driver does not report it for an insert.
    inserted = insert_into(connection, job_runs).values(row).on_conflict_do_nothing().returning(job_runs.c.number)
    begun = connection.execute(inserted).first() is not None
    here = job_runs.c.pipeline_id == row["pipeline_id"]
    connection.execute(delete(job_runs).where(here, job_runs.c.number <= run.number - RUNS_KEPT))
    return begun


def update_run(connection: Connection, before: JobRun, after: JobRun) -> bool:
    """Store the progress of a run; return False if another node has made another attempt at it."""
    changed = {name: value for name, value in row_of(after).items() if name not in ("pipeline_id", "number")}
    same = (
        job_runs.c.pipeline_id == str(before.pipeline_id),
        job_runs.c.number == before.number,
        job_runs.c.attempt == before.attempt,
        job_runs.c.node == before.node,
        job_runs.c.state == str(before.state),
    )
    return connection.execute(update(job_runs).where(*same).values(changed)).rowcount == 1
