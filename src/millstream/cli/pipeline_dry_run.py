"""`millstream pipeline run … --dry-run`: what a transform would do, without doing it."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING

from millstream.cli.exit_code import CommandFailed
from millstream.cli.output import counted, one_line, print_answer
from millstream.cli.termination import ended_in_order
from millstream.core.errors import MillstreamError
from millstream.core.pipeline import Pipeline

if TYPE_CHECKING:
    from millstream.pipelines.jobs.dry_run import DryRun


def show_dry_run(pipeline: Pipeline, brokers: str, *, master: str, memory: str, as_json: bool) -> None:
    """Start Spark, try the pipeline on the youngest messages, and tell what came out."""
    from millstream.pipelines.jobs.dry_run import dry_run
    from millstream.pipelines.jobs.job import JobContext
    from millstream.pipelines.jobs.reason import reason_of
    from millstream.pipelines.runtime.spark_session import open_session

    with ended_in_order(), tempfile.TemporaryDirectory(prefix="millstream-") as scratch:
        spark = open_session(master, memory=memory, settings={}, log=os.path.join(scratch, "spark.log"))
        context = JobContext(spark=spark, brokers=brokers, lake=scratch, folder=scratch)
        try:
            told = dry_run(pipeline, context)
        except MillstreamError:
            raise
        except Exception as error:
            raise CommandFailed(reason_of(error)) from error
    print_answer(_document(told), _text(told), as_json=as_json)


def _document(told: DryRun) -> dict[str, object]:
    return {
        "columns": {topic: dict(columns) for topic, columns in told.columns.items()},
        "output": dict(told.output),
        "has_state": told.has_state,
        "sampled": told.sampled,
        "undecoded": told.undecoded,
        "written": told.written,
        "rows": [json.loads(json.dumps(dict(row), default=str)) for row in told.rows],
        "plan": told.plan,
    }


def _text(told: DryRun) -> str:
    way = "a stream of Spark with a checkpoint" if told.has_state else "batch by batch, without a checkpoint"
    lines = [f"{one_line(topic)}: {_columns(columns)}" for topic, columns in told.columns.items()]
    lines += [f"gives: {_columns(told.output)}", f"runs as: {way}", "", told.plan, ""]
    written = f"{told.written:,}, for example:" if told.written > len(told.rows) else f"{told.written:,}:"
    lines.append(f"Of {counted(told.sampled, 'message')} it would write {written if told.rows else 'nothing.'}")
    lines += [json.dumps(dict(row), default=str, ensure_ascii=False) for row in told.rows]
    if told.undecoded:
        them = counted(told.undecoded, "message")
        lines.append(f"{them} of the sample cannot be read, or not as the columns say; `payload_error` tells why.")
    return "\n".join(lines)


def _columns(columns: Mapping[str, str]) -> str:
    return ", ".join(f"{one_line(name)} {kind}" for name, kind in columns.items())
