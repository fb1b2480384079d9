"""`millstream pipeline backfill` and `requarantine`: process the past again, in this process."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Annotated
from uuid import NAMESPACE_OID, uuid5

import typer

from millstream.cli.connection import ask
from millstream.cli.options import DEFAULT_BROKERS, DEFAULT_TIMEOUT_S, AsJson, Brokers, TimeoutSeconds
from millstream.cli.pipeline_options import Name
from millstream.cli.pipeline_run import ByHand, Folder, Master, Memory, look_up, refuse_without_spark
from millstream.core.errors import InvalidPipeline
from millstream.core.pipeline import Pipeline, PipelineKind

Since = Annotated[
    str,
    typer.Option(
        "--since",
        metavar="TIME|AGE",
        help="The first messages by their timestamps: a time (2026-01-31T12:00:00Z), an age (7d) or start.",
        show_default=False,
    ),
]
Until = Annotated[
    str | None,
    typer.Option(
        "--until", metavar="TIME|AGE", help="The end, exclusive: a time or an age. Default: now.", show_default=False
    ),
]

_DIGEST_CHARACTERS = 8


def backfill(
    name: Name,
    since: Since,
    until: Until = None,
    master: Master = "",
    memory: Memory = "1g",
    folder: Folder = None,
    as_json: AsJson = False,
    brokers: Brokers = DEFAULT_BROKERS,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """Process stored messages of a range of time as a pipeline does, beside it; repeating it changes nothing."""
    from millstream.pipelines.jobs.job import TimeWindow

    window = TimeWindow(_time_ms(since, flag="--since"), _time_ms(until or "0s", flag="--until"))
    if window.since_ms >= window.until_ms:
        raise typer.BadParameter("--since must be before --until")
    refuse_without_spark()
    declared, places = ask(brokers, timeout, lambda client: look_up(client, name, None, brokers))
    if declared.kind is PipelineKind.ROUTE:
        raise InvalidPipeline(f"pipeline {name!r} routes messages; a backfill is for land and transform")
    past = _past_of(declared, f"{since} {until}" if until is not None else since)
    by_hand = ByHand(past, places, brokers, is_declared=False, lake=None, folder=folder, window=window)
    by_hand.run(master, memory, once=True, as_json=as_json)


def requarantine(
    name: Name,
    master: Master = "",
    memory: Memory = "1g",
    as_json: AsJson = False,
    brokers: Brokers = DEFAULT_BROKERS,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """Decode the quarantined messages of a stopped landing pipeline again, and land those that fit now."""
    refuse_without_spark()
    from millstream.pipelines.jobs.land.backfill import make_requarantine

    declared, places = ask(brokers, timeout, lambda client: look_up(client, name, None, brokers))
    if declared.kind is not PipelineKind.LAND:
        raise InvalidPipeline(f"pipeline {name!r} does not land messages, so it has no quarantine")
    jobs = {PipelineKind.LAND: make_requarantine}
    by_hand = ByHand(declared, places, brokers, is_declared=True, lake=None, folder=None, jobs=jobs)
    by_hand.run(master, memory, once=True, as_json=as_json)


def _past_of(pipeline: Pipeline, when: str) -> Pipeline:
    """Return a separate pipeline for a backfill; the same command continues it."""
    identity = uuid5(NAMESPACE_OID, f"millstream backfill {pipeline.pipeline_id} {pipeline.version} {when}")
    name = f"{pipeline.name[:150]}-backfill-{identity.hex[:_DIGEST_CHARACTERS]}"
    return replace(pipeline, pipeline_id=identity, name=name)


def _time_ms(text: str, *, flag: str) -> int:
    from millstream.client.admin.position import Kind, parse_position

    position = parse_position(text, now_ms=time.time_ns() // 1_000_000)
    if position.kind is Kind.START:
        return 0
    if position.kind is not Kind.TIME:
        raise typer.BadParameter(f"{flag} takes a time, such as 2026-01-31T12:00:00Z, or an age, such as 7d")
    return position.value
