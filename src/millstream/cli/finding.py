"""What a check found: that something is well, or what is wrong and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from millstream.cli.exit_code import ExitCode


class Severity(Enum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """The outcome of one check. `advice` says what to do, and is empty when nothing is."""

    check: str
    severity: Severity
    detail: str
    advice: str = ""
    exit_code: ExitCode = ExitCode.FAILED


def ok(check: str, detail: str) -> Finding:
    """All is well."""
    return Finding(check, Severity.OK, detail)


def warning(check: str, detail: str, advice: str) -> Finding:
    """Something to know about."""
    return Finding(check, Severity.WARNING, detail, advice)


def problem(check: str, detail: str, advice: str, exit_code: ExitCode = ExitCode.FAILED) -> Finding:
    """Something that needs somebody to act."""
    return Finding(check, Severity.PROBLEM, detail, advice, exit_code)
