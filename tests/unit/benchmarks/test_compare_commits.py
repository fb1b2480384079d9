"""Comparing two versions: which source is measured, what counts as cost, and when a line is worse."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.compare_commits import CheckoutServer, costs, find_source, ratio
from benchmarks.requests import IN_FLIGHT, ONE_BY_ONE
from benchmarks.subject import PRODUCED

ROUNDS = (1.0, 1.1, 0.9, 1.05, 0.95, 1.0)


@pytest.mark.parametrize(("factor", "verdict"), [(1.3, "worse"), (0.8, "better"), (1.0, "same")])
def test_a_line_is_worse_if_the_whole_interval_is_above_one(factor: float, verdict: str) -> None:
    noise = (1.02, 0.99, 1.0, 0.98, 1.01, 1.0)
    estimate = ratio(ROUNDS, [before * factor * deviation for before, deviation in zip(ROUNDS, noise, strict=True)])
    assert estimate.low <= estimate.mean <= estimate.high
    assert estimate.mean == pytest.approx(factor, rel=0.02)
    assert estimate.verdict == verdict


def test_a_difference_below_the_variation_of_the_rounds_counts_as_equal() -> None:
    after = [before * factor for before, factor in zip(ROUNDS, (1.2, 0.85, 1.1, 0.9, 1.15, 0.95), strict=True)]
    assert ratio(ROUNDS, after).verdict == "same"
    assert ratio((1.0, 1.0), (1.1, 1.2)).verdict == "same", "two rounds prove little"


def test_the_cost_is_the_cpu_time_of_the_server() -> None:
    produced = {PRODUCED: {"user CPU s/GB": 0.25, "system CPU s/GB": 0.5, "client CPU s/GB": 9.0}}
    assert list(costs(produced)) == [("produce, s/GB", 0.75)]
    asked = {ONE_BY_ONE: {"CPU µs/request": 80.0}, IN_FLIGHT: {"CPU µs/request": 40.0}}
    assert list(costs(asked)) == [(f"{ONE_BY_ONE}, µs/request", 80.0), (f"{IN_FLIGHT}, µs/request", 40.0)]


def test_a_server_runs_the_source_of_its_own_checkout(tmp_path: Path) -> None:
    source = tmp_path / "src"
    (source / "millstream").mkdir(parents=True)
    assert find_source(str(tmp_path), tmp_path / "unpacked") == source
    assert CheckoutServer(tmp_path / "data", source).environment()["PYTHONPATH"] == str(source)
    unpacked = find_source("HEAD", tmp_path / "unpacked")
    assert (unpacked / "millstream" / "__init__.py").is_file()
