"""Jobs, users' own Spark programs: when they run, their code, and the runs that the catalog keeps."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta, tzinfo
from enum import StrEnum
from hashlib import sha256
from typing import Any, Final
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from millstream.core.errors import InvalidSetting

ONCE: Final = "once"
SKIP: Final = "skip"
ALL: Final = "all"
MISSED: Final = (ONCE, SKIP, ALL)
"""The reaction to missed times: one run for all of them, none, or one for each."""

_YEARS_MAX: Final = 9
"""A period in which every date of the calendar occurs, including 29 February."""
_MONTHS: Final = {
    name: at
    for at, name in enumerate(["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"], 1)
}
_DAYS: Final = {name: at for at, name in enumerate(["sun", "mon", "tue", "wed", "thu", "fri", "sat"])}
_SHORT: Final = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}


@dataclass(frozen=True, slots=True)
class Cron:
    """The times of a cron expression: minute, hour, day of the month, month, day of the week."""

    minutes: frozenset[int]
    hours: frozenset[int]
    days: frozenset[int]
    months: frozenset[int]
    weekdays: frozenset[int]
    """0 is Sunday."""
    either_day: bool
    """Whether a day has to match only one of `days` and `weekdays`, as in cron when both are restricted."""
    zone: tzinfo

    @classmethod
    def parse(cls, text: str, zone: str = "UTC") -> Cron:
        """Parse an expression; raise `InvalidSetting` with the field that is wrong."""
        fields = _SHORT.get(text.strip().lower(), text).split()
        if len(fields) != 5:
            raise InvalidSetting(
                f"cron must have five fields (minute hour day month weekday) such as `0 3 * * *`, or @hourly, @daily, "
                f"@weekly, @monthly; this one has {len(fields)}: {text!r}"
            )
        weekdays = _field("weekday", fields[4], 0, 7, _DAYS)
        made = cls(
            minutes=_field("minute", fields[0], 0, 59),
            hours=_field("hour", fields[1], 0, 23),
            days=_field("day", fields[2], 1, 31),
            months=_field("month", fields[3], 1, 12, _MONTHS),
            weekdays=frozenset(day % 7 for day in weekdays),
            either_day=not fields[2].startswith("*") and not fields[4].startswith("*"),
            zone=_zone(zone),
        )
        if made.next_ms(0) is None:
            raise InvalidSetting(f"cron {text!r} names a date that does not exist")
        return made

    def next_ms(self, after_ms: int) -> int | None:
        """Return the first time after another one, in milliseconds; None if the next years have none."""
        local = datetime.fromtimestamp(after_ms / 1000, UTC).astimezone(self.zone).replace(tzinfo=None)
        day = local.replace(hour=0, minute=0, second=0, microsecond=0)
        last = day + timedelta(days=_YEARS_MAX * 366)
        while day <= last:
            if day.month in self.months and self._has_day(day):
                for hour in sorted(self.hours):
                    for minute in sorted(self.minutes):
                        # A time that the change to summer time skips becomes the first time after the gap.
                        at = day.replace(hour=hour, minute=minute, tzinfo=self.zone)
                        at_ms = round(at.timestamp() * 1000)
                        if at_ms > after_ms:
                            return at_ms
            day += timedelta(days=1)
        return None

    def _has_day(self, day: datetime) -> bool:
        in_month, in_week = day.day in self.days, day.isoweekday() % 7 in self.weekdays
        return (in_month or in_week) if self.either_day else (in_month and in_week)


def _zone(name: str) -> tzinfo:
    try:
        return UTC if name == "UTC" else ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError):
        raise InvalidSetting(f"timezone {name!r} is unknown; use a name such as Europe/Berlin, or UTC") from None


def _field(name: str, text: str, low: int, high: int, names: Mapping[str, int] | None = None) -> frozenset[int]:
    values: set[int] = set()
    for part in text.lower().split(","):
        whole, slash, step_text = part.partition("/")
        step = _number(name, step_text, 1, high, {}) if slash else 1
        first, dash, last = whole.partition("-")
        if whole == "*":
            start, end = low, high
        else:
            start = _number(name, first, low, high, names or {})
            end = _number(name, last, low, high, names or {}) if dash else (high if slash else start)
        if end < start:
            raise InvalidSetting(
                f"the {name} of a cron expression has the range {whole!r}, which ends before it begins"
            )
        values.update(range(start, end + 1, step))
    return frozenset(values)


def _number(name: str, text: str, low: int, high: int, names: Mapping[str, int]) -> int:
    if text in names:
        return names[text]
    if not text.isdecimal() or not low <= int(text) <= high:
        raise InvalidSetting(f"the {name} of a cron expression must be between {low} and {high}, not {text!r}")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When runs are due; without an interval and without a cron expression, only on request."""

    every_ms: int = 0
    cron: Cron | None = None
    missed: str = ONCE

    @property
    def is_empty(self) -> bool:
        """Whether it runs only on request."""
        return not self.every_ms and self.cron is None

    def due_ms(self, last_ms: int | None, *, created_ms: int, now_ms: int) -> int | None:
        """Return the time of the next run, which may be past; None if no run is scheduled.

        `last_ms` is the time for which the last run was, not the time at which it began.
        """
        if self.is_empty:
            return None
        if last_ms is None and self.every_ms:
            # The first run is due at once.
            return min(created_ms, now_ms)
        before_ms = created_ms if last_ms is None else last_ms
        due_ms = self._next_after(before_ms)
        if due_ms is None or due_ms > now_ms or self.missed == ALL:
            return due_ms
        latest_ms, next_ms = self._surrounding_times(due_ms, now_ms)
        if self.missed == ONCE or next_ms is None:
            return latest_ms
        # A time that has only just passed is not missed.
        return latest_ms if now_ms - latest_ms < _LATE_MS else next_ms

    def _next_after(self, time_ms: int) -> int | None:
        return self.cron.next_ms(time_ms) if self.cron is not None else time_ms + self.every_ms

    def _surrounding_times(self, due_ms: int, now_ms: int) -> tuple[int, int | None]:
        """Return the last time up to now, and the next one, given a time that is past."""
        if self.cron is None:
            latest_ms = due_ms + (now_ms - due_ms) // self.every_ms * self.every_ms
            return latest_ms, latest_ms + self.every_ms
        latest_ms, next_ms = due_ms, self.cron.next_ms(due_ms)
        if next_ms is not None and next_ms <= now_ms:
            # Look back from now in growing steps, rather than forward through what may be years.
            back_ms = 60_000
            while (start_ms := self.cron.next_ms(now_ms - back_ms)) is None or start_ms > now_ms:
                back_ms *= 2
            latest_ms, next_ms = start_ms, self.cron.next_ms(start_ms)
            while next_ms is not None and next_ms <= now_ms:
                latest_ms, next_ms = next_ms, self.cron.next_ms(next_ms)
        return latest_ms, next_ms


_LATE_MS: Final = 60_000
"""How late a run may begin before its time counts as missed."""


ENTRY: Final = "run"
"""The function that a job's code defines."""
CODE_LENGTH_MAX: Final = 512 * 1024
RUNS_KEPT: Final = 100
"""How many runs of a job are remembered."""
ERROR_LENGTH_MAX: Final = 8192
FUNCTIONS_MAX: Final = 100
_MEMORY: Final = re.compile(r"(\d{1,6})([kmg])\Z", re.IGNORECASE)
_UNIT: Final = {"k": 2**10, "m": 2**20, "g": 2**30}


class RunState(StrEnum):
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRun:
    """A run of a job, with all attempts at it."""

    pipeline_id: UUID
    number: int
    """Counted from 1."""
    state: RunState
    scheduled_ms: int
    """The time for which it was due."""
    started_ms: int
    ended_ms: int = 0
    attempt: int = 1
    node: int = -1
    code_hash: str = ""
    """The hash of the code and its packages."""
    version: int = 0
    """The version of the pipeline's declaration."""
    request: int = 0
    """How many runs had been asked for when it began."""
    error: str = ""
    progress: dict[str, Any] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return self.state is not RunState.RUNNING


def code_hash(code: str, lock: str) -> str:
    """Return a short name for code together with the packages it runs with."""
    return sha256(f"{sha256(code.encode()).hexdigest()}\n{lock}".encode()).hexdigest()[:16]


def check_code(code: str, *, file_name: str = "job.py") -> None:
    """Raise `InvalidSetting` unless this is Python that defines the function to call."""
    try:
        tree = ast.parse(code, filename=file_name)
    except (SyntaxError, ValueError) as error:
        raise InvalidSetting(f"the code is not Python: {error}") from None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == ENTRY:
            arguments = node.args
            positional = len(arguments.posonlyargs) + len(arguments.args)
            if arguments.vararg is None and not positional - len(arguments.defaults) <= 2 <= positional:
                raise InvalidSetting(
                    f"line {node.lineno}: {ENTRY} has to take two arguments: {ENTRY}(spark, millstream)"
                )
            return
        if isinstance(node, ast.AsyncFunctionDef) and node.name == ENTRY:
            raise InvalidSetting(f"line {node.lineno}: {ENTRY} must not be async")
    raise InvalidSetting(f"the code defines no function {ENTRY}: begin with `def {ENTRY}(spark, millstream):`")


def parse_functions(text: str, code: Mapping[str, str]) -> dict[str, str]:
    """Parse `prices:vat, prices:net` into the module of each function; raise `InvalidSetting` if it is invalid.

    `code` has the source of modules by name; the others are in packages.
    """
    modules: dict[str, str] = {}
    for reference in filter(None, map(str.strip, text.split(","))):
        module, colon, name = reference.partition(":")
        if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
            raise InvalidSetting(f"a function must be named as module:function, not {reference!r}")
        if name in modules:
            raise InvalidSetting(f"two functions are called {name!r}; the statement could not distinguish them")
        modules[name] = module
        if module in code:
            _check_function(code[module], module, name)
    if len(modules) > FUNCTIONS_MAX:
        raise InvalidSetting(f"a statement has at most {FUNCTIONS_MAX} functions, not {len(modules)}")
    unused = sorted(set(code) - set(modules.values()))
    if unused:
        raise InvalidSetting(
            f"module {unused[0]!r} has code, but none of its functions is listed; remove the code or list a function"
        )
    return modules


def _check_function(code: str, module: str, name: str) -> None:
    try:
        tree = ast.parse(code, filename=f"{module}.py")
    except (SyntaxError, ValueError) as error:
        raise InvalidSetting(f"{module}.py is not Python: {error}") from None
    for node in tree.body:
        if isinstance(node, ast.AsyncFunctionDef) and node.name == name:
            raise InvalidSetting(f"{module}.py, line {node.lineno}: {name} must not be async")
        if isinstance(node, ast.FunctionDef) and node.name == name:
            if node.returns is None and not node.decorator_list:
                raise InvalidSetting(
                    f"{module}.py, line {node.lineno}: declare what {name} returns, such as `def {name}(…) -> float`, "
                    'or decorate it with @udf("double") of pyspark.sql.functions'
                )
            return
        if isinstance(node, ast.Assign) and any(getattr(target, "id", None) == name for target in node.targets):
            return
    raise InvalidSetting(f"{module}.py defines no function {name!r}")


def parse_memory(text: str, *, name: str) -> int:
    """Parse an amount of memory as Spark writes it, such as 512m or 2g, into bytes."""
    match = _MEMORY.match(text.strip())
    if match is None or not int(match[1]):
        raise InvalidSetting(f"{name} must be an amount of memory such as 512m or 2g, not {text!r}")
    return int(match[1]) * _UNIT[match[2].lower()]
