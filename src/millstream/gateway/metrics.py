"""The metrics of a node in the formats of Prometheus; no other module knows Prometheus."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector, CollectorRegistry

_COUNTER_SUFFIX = "_total"


def render_metrics(metrics: Iterable[Mapping[str, Any]], accept: str) -> tuple[bytes, str]:
    """Render a node's metrics in the format the scraper accepts; return the text and its content type."""
    encode, content_type = choose_encoder(accept)
    registry = CollectorRegistry()
    registry.register(_Snapshot(metrics))
    return encode(registry), content_type


class _Snapshot(Collector):
    """Passes the metrics of one status to the Prometheus encoder."""

    def __init__(self, metrics: Iterable[Mapping[str, Any]]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return map(_family, self._metrics)

    def describe(self) -> Iterable[Metric]:
        # Declared up front, so that registering does not collect everything once.
        return ()


def _family(described: Mapping[str, Any]) -> Metric:
    name, kind = described["name"], described["kind"]
    family = Metric(name.removesuffix(_COUNTER_SUFFIX) if kind == "counter" else name, described["help"], kind)
    for value, labels in described["samples"]:
        if kind == "histogram":
            _add_distribution(family, labels, value)
        else:
            family.add_sample(name, labels, value)
    return family


def _add_distribution(family: Metric, labels: dict[str, str], value: Mapping[str, Any]) -> None:
    for bound, count in zip(value["bounds"], value["cumulative"], strict=True):
        family.add_sample(f"{family.name}_bucket", {**labels, "le": repr(float(bound))}, count)
    family.add_sample(f"{family.name}_bucket", {**labels, "le": "+Inf"}, value["observations"])
    family.add_sample(f"{family.name}_count", labels, value["observations"])
    family.add_sample(f"{family.name}_sum", labels, value["total"])
