"""The findings of `doctor` about pipelines."""

from __future__ import annotations

from typing import Any, cast

import pytest

from millstream.cli.broker_check import check_pipelines, findings_of
from millstream.cli.doctor import Severity
from millstream.client.admin.pipelines import FAILING_S_MAX

NOW_MS = 1_700_000_000_000
NO_CLIENT = cast("Any", None)


def reported(state: str, *, parked: str = "", **report: Any) -> dict[str, Any]:
    shared = {"last_error": "", "failing_ms": 0, "rows": 1000, "counts": {}}
    return {"name": f"one-{state}", "state": state, "parked": parked, "report": {**shared, **report}}


def since(seconds: float) -> int:
    return int(NOW_MS - seconds * 1000)


@pytest.mark.parametrize(
    ("pipeline", "message"),
    [
        (reported("parked", parked="no column 'totl'\n  here"), "is parked and no longer runs: no column 'totl'"),
        (reported("waiting", last_error="pip install it"), "1 pipeline (one-waiting) waits: pip install it"),
        ({**reported("waiting"), "report": None}, "1 pipeline (one-waiting) waits: no node runs pipelines"),
        (reported("retrying", last_error="refused", failing_ms=since(FAILING_S_MAX + 1)), "minutes: refused"),
        (reported("running", counts={"quarantined": 20}), "one-running put 20 of 1,000 messages into quarantine"),
        ({**reported("running"), "local_tables": True}, "the tables of 1 pipeline (one-running) are in the data"),
        (reported("running", levels={"audit_faults": 2}), "the last audit of pipeline one-running found 2 faults"),
    ],
)
def test_a_failing_pipeline_is_a_warning(pipeline: dict[str, Any], message: str) -> None:
    (finding,) = findings_of([pipeline, reported("running")], now_ms=NOW_MS)
    assert finding.severity is Severity.WARNING
    assert message in finding.detail


def test_a_transient_failure_is_not_a_warning() -> None:
    well = [
        reported("running", last_error="it was away", counts={"quarantined": 1}),
        reported("stopped"),
        reported("starting"),
    ]
    (finding,) = findings_of([*well, reported("retrying", failing_ms=since(1))], now_ms=NOW_MS)
    assert (finding.severity, finding.detail) == (Severity.OK, "4 pipelines, all healthy")


async def test_without_declared_pipelines_no_node_is_asked() -> None:
    assert await check_pipelines(NO_CLIENT, {"metrics": [{"name": "millstream_topics", "samples": []}]}) == []
