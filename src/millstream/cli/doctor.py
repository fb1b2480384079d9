"""`millstream doctor`: diagnose a data folder or a running broker, with advice."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from millstream.cli.exit_code import ExitCode
from millstream.cli.options import DEFAULT_BROKERS, DEFAULT_TIMEOUT_S, AsJson, TimeoutSeconds, default_brokers, flag
from millstream.cli.output import counted, print_json, print_line, sized
from millstream.core.config import Config


class Severity(Enum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. `advice` says what to do, and is empty if there is nothing to do."""

    check: str
    severity: Severity
    detail: str
    advice: str = ""
    exit_code: ExitCode = ExitCode.FAILED


def passed(check: str, detail: str) -> Finding:
    return Finding(check, Severity.OK, detail)


def warning(check: str, detail: str, advice: str) -> Finding:
    """Return a finding that an operator should know about."""
    return Finding(check, Severity.WARNING, detail, advice)


def problem(check: str, detail: str, advice: str, exit_code: ExitCode = ExitCode.FAILED) -> Finding:
    return Finding(check, Severity.PROBLEM, detail, advice, exit_code)


FREE_BYTES_LOW = 100 * 1024 * 1024
FREE_SHARE_LOW = 0.05


def check_space(total: int, free: int, *, where: str = "") -> Finding:
    detail = f"{where}{sized(free)} of {sized(total)} are free"
    if free < FREE_BYTES_LOW:
        advice = "free space now, or lower the retention of topics: a broker with a full disk refuses writes"
        return problem("space", detail, advice)
    if free < total * FREE_SHARE_LOW:
        return warning("space", detail, "free space, or lower the retention of topics, before the disk is full")
    return passed("space", detail)


_MARKS = {"ok": "ok     ", "warning": "WARNING", "problem": "PROBLEM"}


def doctor(
    data: Annotated[
        Path | None, flag("--data", "DIR", "Check this data folder. Default: ./millstream-data, if it exists.")
    ] = None,
    brokers: Annotated[
        str | None,
        flag(
            "--brokers",
            "HOST:PORT[,...]",
            "Check this broker. Default: MILLSTREAM_BROKERS, else the profile's brokers, else "
            f"{DEFAULT_BROKERS}; none if --data is given.",
        ),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Skip reading every byte of the data folder; check only its state.")
    ] = False,
    as_json: AsJson = False,
    timeout: TimeoutSeconds = DEFAULT_TIMEOUT_S,
) -> None:
    """Check a data folder, a running broker, or both.

    Nothing is changed. A data folder can be checked only while its broker is stopped; otherwise check the broker. Exits
    with 0 if there are no problems (warnings do not count), 1 if there are, 3 if the folder does not exist, 4 if no
    broker responds.
    """
    findings: list[Finding] = []
    folder = data if data is not None else Path(Config.load().data)
    if data is not None or folder.is_dir():
        from millstream.cli.folder_check import check_folder

        findings += check_folder(folder, deep=not quick, show_progress=not as_json)
    if brokers is not None or data is None:
        from millstream.cli.broker_check import check_broker

        findings += asyncio.run(check_broker(brokers or default_brokers(), timeout))
    problems = sum(finding.severity.value == "problem" for finding in findings)
    if as_json:
        listed = [
            {
                "check": finding.check,
                "severity": finding.severity.value,
                "detail": finding.detail,
                "advice": finding.advice,
            }
            for finding in findings
        ]
        print_json({"healthy": problems == 0, "findings": listed})
    else:
        _print(findings, problems)
    raise typer.Exit(_exit_code(findings, problems))


def _print(findings: list[Finding], problems: int) -> None:
    for finding in findings:
        print_line(f"{_MARKS[finding.severity.value]}  {finding.check}: {finding.detail}")
        if finding.advice:
            print_line(f"         -> {finding.advice}")
    print_line()
    print_line(_verdict(findings, problems))


def _verdict(findings: list[Finding], problems: int) -> str:
    if problems:
        return f"{counted(problems, 'problem')} found."
    warnings = sum(finding.severity.value == "warning" for finding in findings)
    return f"No problems found; {counted(warnings, 'warning')}." if warnings else "No problems found."


def _exit_code(findings: list[Finding], problems: int) -> ExitCode:
    """Return the code of the problem if there is only one kind, otherwise the general one."""
    if not problems:
        return ExitCode.OK
    kinds = {finding.exit_code for finding in findings if finding.severity.value == "problem"}
    return kinds.pop() if len(kinds) == 1 else ExitCode.FAILED
