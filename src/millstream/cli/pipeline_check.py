"""Checks of the pipelines: which are not run, which fail for long, and which leave much aside."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from millstream.cli.finding import Finding, ok, warning
from millstream.cli.output import counted
from millstream.client.admin.pipelines import PipelineClient
from millstream.core.errors import MillstreamError
from millstream.protocol.wire.client import Client

FAILING_S_MAX: Final = 300.0
"""Something outside that is away for so long is worth a look."""
QUARANTINED_SHARE_MAX: Final = 0.01
_SHOWN_MAX: Final = 5
_PARKED_METRIC: Final = "millstream_pipeline_parked"


async def check_pipelines(client: Client, status: Mapping[str, Any]) -> list[Finding]:
    """Look at all pipelines, if some are declared; `status` is what a node tells of itself."""
    if not any(one["name"] == _PARKED_METRIC for one in status.get("metrics", [])):
        return []
    try:
        told = await PipelineClient(client).describe()
    except MillstreamError as error:
        return [warning("pipelines", f"the pipelines cannot be asked: {error}", "look at the broker's log")]
    return findings_of(told, now_ms=time.time() * 1000)


def findings_of(told: Sequence[Mapping[str, Any]], *, now_ms: float) -> list[Finding]:
    """What is to be said about pipelines, as clients are told of them."""
    parked = [_parked(one) for one in told if one["state"] == "parked"]
    failing = [_failing(one, since_ms) for one in told if (since_ms := _failing_ms(one, now_ms))]
    aside = [_quarantined(one) for one in told if _is_much_quarantined(one)]
    found = [*parked[:_SHOWN_MAX], *_waiting(told), *failing[:_SHOWN_MAX], *aside[:_SHOWN_MAX]]
    return found or [ok("pipelines", f"{counted(len(told), 'pipeline')}, none of them in trouble")]


def _parked(told: Mapping[str, Any]) -> Finding:
    name = told["name"]
    return warning(
        "pipelines",
        f"pipeline {name} is parked and not run any more: {_first_line(told['parked'])}",
        f"millstream pipeline describe {name} tells all of it; put it right, and it is tried again when its settings "
        f"or rules are changed, or by: millstream pipeline start {name}",
    )


def _waiting(told: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Those that nobody runs, by what they wait for: most often it is the same for all."""
    by_reason: dict[str, list[str]] = {}
    for one in told:
        if one["state"] == "waiting":
            by_reason.setdefault((one["report"] or {}).get("last_error", ""), []).append(one["name"])
    for reason, names in list(by_reason.items())[:_SHOWN_MAX]:
        shown = ", ".join(names[:_SHOWN_MAX]) + (", …" if len(names) > _SHOWN_MAX else "")
        yield warning(
            "pipelines",
            f"{counted(len(names), 'pipeline')} ({shown}) {'waits' if len(names) == 1 else 'wait'}: "
            f"{_first_line(reason) or 'no node runs pipelines'}",
            "see to what is missing, and it goes on by itself; nodes with pipelines-enabled on and Spark installed "
            "run pipelines",
        )


def _failing_ms(told: Mapping[str, Any], now_ms: float) -> int:
    """Since when a pipeline fails, if that is for long."""
    since_ms = int((told["report"] or {}).get("failing_ms", 0))
    is_tried = told["state"] in ("retrying", "starting")
    return since_ms if is_tried and since_ms and now_ms - since_ms > FAILING_S_MAX * 1000 else 0


def _failing(told: Mapping[str, Any], since_ms: int) -> Finding:
    name, minutes = told["name"], (time.time() * 1000 - since_ms) / 60_000
    return warning(
        "pipelines",
        f"pipeline {name} has failed for {minutes:.0f} minutes: {_first_line(told['report']['last_error'])}",
        f"it goes on by itself when that is over; millstream pipeline describe {name} tells more",
    )


def _is_much_quarantined(told: Mapping[str, Any]) -> bool:
    report = told["report"] or {}
    return _left_aside(report) > QUARANTINED_SHARE_MAX * int(report.get("rows", 0))


def _left_aside(report: Mapping[str, Any]) -> int:
    return int(report.get("counts", {}).get("quarantined", 0))


def _quarantined(told: Mapping[str, Any]) -> Finding:
    name, report = told["name"], told["report"]
    return warning(
        "pipelines",
        f"pipeline {name} put {_left_aside(report):,} of {report['rows']:,} messages into quarantine",
        "the column `reason` of the table with the ending __quarantine says why, message by message",
    )


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]
