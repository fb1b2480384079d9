"""Reports of this node's push process: the state of each subscription's endpoint, and the counts of sent messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from millstream.core.metric import Distribution, Metric, Sample
from millstream.protocol.private.subscription_messages import PushReport, PushState


class PushBoard:
    """The last report of each subscription."""

    def __init__(self) -> None:
        self._reports: dict[str, PushReport] = {}
        self._parked: dict[str, PushState] = {}
        self.restarts = 0

    def take(self, reports: Iterable[PushReport]) -> None:
        self._reports = {report.subscription: report for report in reports}

    def park(self, reasons: Mapping[str, str]) -> None:
        """Replace the subscriptions that are not pushed from here, by name, each with the reason."""
        self._parked = {name: PushState(state="parked", last_error=reason) for name, reason in reasons.items()}

    def clear(self) -> None:
        """Drop the reports: the process has ended."""
        self._reports = {}

    def describe(self, subscription: str) -> dict[str, Any] | None:
        report = self._parked.get(subscription) or self._reports.get(subscription)
        return None if report is None else report.describe()

    def metrics(self) -> Iterable[Metric]:
        reports = list(self._reports.values())
        if not reports:
            return
        yield Metric(
            "millstream_push_endpoint_up",
            "gauge",
            "1 while an endpoint accepts messages, 0 while it is considered down.",
            [_sample(report, float(report.state != "down")) for report in reports],
        )
        yield Metric(
            "millstream_push_concurrency",
            "gauge",
            "The current limit of concurrent requests to an endpoint, which adapts to its responses.",
            [_sample(report, report.concurrency) for report in reports],
        )
        yield Metric(
            "millstream_push_in_flight",
            "gauge",
            "Messages that are being pushed.",
            [_sample(report, report.in_flight) for report in reports],
        )
        yield Metric(
            "millstream_push_requests_total",
            "counter",
            "Requests to endpoints, by outcome.",
            [sample for report in reports for sample in _by_outcome(report)],
        )
        yield Metric(
            "millstream_push_seconds",
            "histogram",
            "How long endpoints take to respond.",
            [_sample(report, _distribution(report)) for report in reports],
        )
        yield Metric(
            "millstream_push_restarts_total",
            "counter",
            "Restarts of the push process.",
            [Sample(self.restarts)],
        )


def _sample(report: PushReport, value: float | Distribution) -> Sample:
    return Sample(value, (("subscription", report.subscription),))


def _by_outcome(report: PushReport) -> Sequence[Sample]:
    counts = {
        "accepted": report.accepted,
        "refused": report.refused,
        "failed": report.failed,
        "unreachable": report.unreachable,
    }
    return [
        Sample(count, (("subscription", report.subscription), ("outcome", outcome)))
        for outcome, count in counts.items()
    ]


def _distribution(report: PushReport) -> Distribution:
    return Distribution(tuple(report.bounds), tuple(report.cumulative), report.requests, report.seconds)
