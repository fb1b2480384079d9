from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from millstream.gateway.metrics import render_metrics


def described(name: str, kind: str, samples: list[Any]) -> dict[str, Any]:
    return {"name": name, "kind": kind, "help": f"About {name}.", "samples": samples, "is_truncated": False}


def parsed(*metrics: dict[str, Any]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text, _ = render_metrics(metrics, "")
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def test_counters_and_gauges_keep_their_names_and_labels() -> None:
    metrics = parsed(
        described("requests_total", "counter", [[3, {"api": "Produce"}], [4, {"api": "Fetch"}]]),
        described("connections", "gauge", [[2, {}]]),
    )
    assert metrics == {
        ("requests_total", (("api", "Produce"),)): 3,
        ("requests_total", (("api", "Fetch"),)): 4,
        ("connections", ()): 2,
    }


def test_labels_with_special_characters_survive() -> None:
    label = 'a "quoted" \\ name\nwith a break'
    assert parsed(described("x", "gauge", [[1, {"group": label}]])) == {("x", (("group", label),)): 1}


def test_histograms_have_cumulative_buckets_up_to_infinity() -> None:
    value = {"bounds": [0.5, 1.0], "cumulative": [1, 3], "observations": 4, "total": 6.5}
    assert parsed(described("latency_seconds", "histogram", [[value, {"api": "Fetch"}]])) == {
        ("latency_seconds_bucket", (("api", "Fetch"), ("le", "0.5"))): 1,
        ("latency_seconds_bucket", (("api", "Fetch"), ("le", "1.0"))): 3,
        ("latency_seconds_bucket", (("api", "Fetch"), ("le", "+Inf"))): 4,
        ("latency_seconds_count", (("api", "Fetch"),)): 4,
        ("latency_seconds_sum", (("api", "Fetch"),)): 6.5,
    }


def test_a_metric_without_samples_is_still_declared() -> None:
    text, content_type = render_metrics([described("nothing_total", "counter", [])], "")
    assert b"# TYPE nothing_total counter" in text
    assert content_type.startswith("text/plain")
