"""`millstream audit`: account for every message of the subscriptions with a ledger."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Final
from uuid import NAMESPACE_OID, uuid5

import typer

from millstream.cli.connection import call_broker, complete_subscriptions
from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.cli.options import COMMON, Common, flag
from millstream.cli.output import counted, one_line, print_json, print_line, print_note, print_table
from millstream.cli.pipeline_options import Lake
from millstream.cli.pipeline_run import Master, Memory, Stages, refuse_without_packages, signed_in
from millstream.core.errors import MillstreamError
from millstream.core.pipeline import Pipeline, PipelineKind

if TYPE_CHECKING:
    from millstream.client.admin.pipelines import PipelineStorage
    from millstream.client.receipt_book import Finding, ReceiptCheck
    from millstream.pipelines.jobs.ledger.audit import AuditReport
    from millstream.protocol.wire.client import Client

SMALL_BYTES: Final = 16 * 1024 * 1024
"""A ledger up to this size is audited without Spark, in this process."""
SHOWN_MAX: Final = 50
"""How many findings are printed as text; JSON has all of them."""


def audit(
    since: Annotated[
        str | None,
        flag("--since", "TIME", "Only messages published at this time or later, or within an age such as 24h."),
    ] = None,
    subscription: Annotated[
        list[str] | None,
        flag(
            "--subscription", "NAME", "Only this subscription; may be repeated.", autocompletion=complete_subscriptions
        ),
    ] = None,
    receipts: Annotated[
        list[str] | None,
        flag("--receipts", "FILE", "Also check the receipts that a publisher has stored; may be repeated."),
    ] = None,
    lake: Lake = None,
    master: Master = "",
    memory: Memory = "1g",
    common: Common = COMMON,
) -> None:
    """Account for every message. Exits with 0 only if none is missing; needs Spark, and subscriptions with --ledger."""
    refuse_without_packages()
    since_ms = None if since is None else _since_ms(since)
    place = find_lake(common, lake)
    report = _run(place, common.brokers, subscription, since_ms, master=master, memory=memory)
    checked, findings = _check_receipts(receipts or [], common)
    adds_up = report.adds_up and not any(finding.is_fault for _, finding in findings)
    if common.as_json:
        listed_findings = [{"file": file, **_receipt(finding)} for file, finding in findings]
        document = {**report.as_document(), "adds_up": adds_up}
        print_json({**document, "receipts": listed_findings, "receipts_checked": checked})
    else:
        _print_report(report, findings, checked, adds_up=adds_up)
    if not adds_up:
        raise typer.Exit(ExitCode.FAILED)


def _since_ms(text: str) -> int:
    from millstream.client.admin.position import parse_position

    time_ms = parse_position(text).lookup_timestamp
    if time_ms is None or time_ms < 0:
        raise typer.BadParameter(f"--since takes a time or an age, as in 2026-11-15T00:00 or 24h, not {text!r}")
    return time_ms


def find_lake(common: Common, location: str | None) -> tuple[str, Pipeline | None]:
    """Return the location of the ledger's table: the given one, or else that of its pipeline."""

    async def operation(client: Client) -> tuple[Pipeline | None, PipelineStorage]:
        from millstream.client.admin.pipelines import ledger_pipeline, storage_of

        return await ledger_pipeline(client), await storage_of(client)

    if location is not None:
        return (location if "://" in location else os.path.abspath(location)), None
    pipeline, places = call_broker(common, operation)
    lake = (pipeline.overrides.get("lake") if pipeline is not None else None) or places.lake
    if lake.startswith(places.data) and not os.path.isdir(places.data):
        raise CommandFailed(f"the node stores its tables in {lake}, which is not on this machine; pass --lake")
    return lake, pipeline


def _run(
    place: tuple[str, Pipeline | None],
    brokers: str,
    names: list[str] | None,
    since_ms: int | None,
    *,
    master: str,
    memory: str,
) -> AuditReport:
    from millstream.pipelines.jobs.error_reason import reason_of
    from millstream.pipelines.jobs.job import JobContext
    from millstream.pipelines.jobs.ledger.audit import LocalTasks
    from millstream.pipelines.jobs.ledger.job import LedgerJob
    from millstream.pipelines.runtime.spark_session import open_session

    started = time.monotonic()
    lake, declared = place
    pipeline = declared or Pipeline(
        pipeline_id=uuid5(NAMESPACE_OID, "millstream audit"), name="audit", kind=PipelineKind.LEDGER
    )
    with signed_in(brokers) as (scratch, _, access), Stages("audit") as stages:
        try:
            # A small ledger is read in less time than Spark takes to start.
            without_spark: Any = None
            context = JobContext(spark=without_spark, brokers=brokers, access=access, lake=lake, folder=scratch)
            job = LedgerJob(pipeline, context, LocalTasks())
            if master or job.size_bytes() > SMALL_BYTES:
                stages.show("starting Spark …")
                spark = open_session(master, memory=memory, settings={}, log=os.path.join(scratch, "spark.log"))
                job = LedgerJob(pipeline, replace(context, spark=spark))
            stages.show("accounting for every message …")
            report = job.audit(names, since_ms)
            report.seconds = time.monotonic() - started
            return report
        except MillstreamError:
            raise
        except Exception as error:
            raise CommandFailed(reason_of(error)) from error


def _check_receipts(files: list[str], common: Common) -> tuple[int, list[tuple[str, Finding]]]:
    """Return the number of receipts that were checked, and the findings, with the files."""
    checked = 0
    findings: list[tuple[str, Finding]] = []
    for file in files:
        if not os.path.isfile(file):
            raise CommandFailed(f"there is no file {file!r} with receipts", ExitCode.USAGE)

        async def operation(client: Client, file: str = file) -> ReceiptCheck:
            from millstream.client.receipt_book import check_book

            return await check_book(client, file)

        book = call_broker(common, operation)
        checked += book.receipts
        findings += [(file, finding) for finding in book.findings]
    return checked, findings


def _receipt(finding: Finding) -> dict[str, Any]:
    receipt = finding.receipt
    return {
        "id": receipt.id,
        "topic": receipt.topic,
        "partition": receipt.partition,
        "offset": receipt.offset,
        "kind": finding.kind,
        "problem": finding.problem,
    }


def _print_report(report: AuditReport, receipts: list[tuple[str, Finding]], checked: int, *, adds_up: bool) -> None:
    from millstream.pipelines.jobs.ledger.audit import COUNTS as COUNTED

    names = ("subscription", "topic", *(name for name in COUNTED if name != "dropped"))
    if report.rows:
        rows = [{**row, "subscription": _subscription_label(row)} for row in report.rows]
        print_table([name.replace("_", "-") for name in names], [[row[name] for name in names] for row in rows])
    elif not report.damage:
        print_note("The ledger has no events: create or update subscriptions with --ledger.")
    lines = [_describe_finding(finding) for finding in report.findings]
    lines += [
        f"ledger table, {damaged_range.kind}: {one_line(damaged_range.path)}: {damaged_range.problem}"
        for damaged_range in report.damage
    ]
    lines += [f"receipt in {one_line(file)}, {receipt.kind}: {one_line(str(receipt))}" for file, receipt in receipts]
    for line in lines[:SHOWN_MAX]:
        print_line(line)
    if len(lines) > SHOWN_MAX:
        print_line(f"… and {len(lines) - SHOWN_MAX:,} more; --json has all of them.")
    total = counted(sum(row["published"] for row in report.rows), "message")
    if checked:
        wrong = sum(receipt.is_fault for _, receipt in receipts)
        print_line(f"{counted(checked, 'receipt')} checked; {wrong:,} do not match the log.")
    print_line(
        f"{_verdict(report, adds_up=adds_up)} {total} accounted for in {report.seconds:.1f} s; "
        f"seal {report.seal[:16] or '-'}"
    )


def _verdict(report: AuditReport, *, adds_up: bool) -> str:
    if adds_up:
        return "Everything adds up."
    if not report.is_counted:
        return "The ledger's table is damaged and cannot be read, so the counts are unknown."
    if report.damage:
        return "The ledger's table is damaged; its damaged files do not count, and their messages may show as lost."
    return "The counts do not add up."


def _subscription_label(row: dict[str, Any]) -> str:
    """Return the name of a subscription; deleted ones, which may share a name, are distinguished."""
    return f"{row['subscription']} (deleted)" if row["deleted"] else str(row["subscription"])


def _describe_finding(finding: dict[str, Any]) -> str:
    if "subscription" not in finding:
        return f"{finding['kind']}: {one_line(finding['detail'])}"
    last = "" if finding["end"] - finding["start"] <= 1 else f" to {finding['end'] - 1}"
    place = f"{one_line(finding['topic'])}/{finding['partition']}"
    where = f"{place}@{finding['start']}{last}" if finding["end"] > finding["start"] else place
    return f"{finding['kind']}: {where} in {one_line(finding['subscription'])}: {one_line(finding['detail'])}"
