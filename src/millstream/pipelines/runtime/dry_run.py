"""The process of a dry run that a page of the console has asked for: `python -m millstream.pipelines.runtime.dry_run`.

The first line of standard input is the order, one line of standard output the response. It ends when standard input
does. It signs in as the user who asked, with a read-only token; nothing is written or committed.
"""

from __future__ import annotations

import os
import sys
import threading
from typing import Any, Final

import msgspec

from millstream.core.errors import InvalidPipeline, MillstreamError
from millstream.core.pipeline import Pipeline, PipelineKind
from millstream.pipelines.source.access import NO_ACCESS, Access, parse_access

MEMORY: Final = "1g"


class DryRunOrder(msgspec.Struct, frozen=True, kw_only=True):
    pipeline: Pipeline
    kafka: str
    lake: str
    access: dict[str, str] = {}
    """Options of the source with the credentials; a token is given by the name of its file."""


class DryRunResponse(msgspec.Struct, frozen=True, kw_only=True):
    """The result of the dry run, or why it failed."""

    document: dict[str, Any] = {}
    failed: str = ""


def land_sample(pipeline: Pipeline, brokers: str, access: Access, lake: str, scratch: str) -> dict[str, Any]:
    """Decode the newest messages as landing would, without Spark."""
    from millstream.pipelines.jobs.job import JobContext
    from millstream.pipelines.jobs.land.job import make_job

    without_spark: Any = None
    context = JobContext(spark=without_spark, brokers=brokers, access=access, lake=lake, folder=scratch)
    job = make_job(pipeline, context)
    try:
        return {"topics": [result.as_document() for result in job.dry_run()]}
    finally:
        job.close()


def transform_sample(
    pipeline: Pipeline,
    brokers: str,
    access: Access,
    scratch: str,
    *,
    master: str = "",
    memory: str = MEMORY,
    ends_with_java: bool = False,
) -> dict[str, Any]:
    """Start Spark, and process the newest messages as a transform would."""
    from millstream.pipelines.jobs.job import JobContext
    from millstream.pipelines.jobs.transform.dry_run import dry_run
    from millstream.pipelines.runtime.spark_session import open_session

    log = os.path.join(scratch, "spark.log")
    name = "millstream dry run"
    spark = open_session(master, memory=memory, settings={}, log=log, ends_with_java=ends_with_java, name=name)
    return dry_run(pipeline, JobContext(spark=spark, brokers=brokers, access=access, lake=scratch, folder=scratch))


def try_order(order: DryRunOrder, scratch: str) -> DryRunResponse:
    from millstream.pipelines.jobs.error_reason import reason_of

    pipeline = order.pipeline
    access = parse_access(order.access) if order.access else NO_ACCESS
    try:
        if pipeline.kind is PipelineKind.LAND:
            document = land_sample(pipeline, order.kafka, access, order.lake, scratch)
        elif pipeline.kind is PipelineKind.TRANSFORM:
            document = transform_sample(pipeline, order.kafka, access, scratch, ends_with_java=True)
        else:
            raise InvalidPipeline(f"pipelines of kind {pipeline.kind} have no dry run")
    except MillstreamError as error:
        return DryRunResponse(failed=str(error))
    except Exception as error:
        return DryRunResponse(failed=reason_of(error))
    return DryRunResponse(document=document)


def main() -> None:
    """Read the order, try it, and write the response."""
    from millstream.pipelines.runtime.driver import exit_now
    from millstream.pipelines.runtime.spark_session import make_scratch, remove_scratch

    responses = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=DryRunOrder)

    def watch() -> None:
        sys.stdin.buffer.read()
        exit_now()

    threading.Thread(target=watch, name="watch the gateway", daemon=True).start()
    try:
        response = try_order(order, make_scratch())
    finally:
        remove_scratch()
    responses.write(msgspec.json.encode(response) + b"\n")
    responses.flush()
    exit_now()


if __name__ == "__main__":
    main()
