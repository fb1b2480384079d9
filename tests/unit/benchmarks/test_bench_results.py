"""Medians, ratios, verdicts, tables and charts of made-up results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import cases, plots, report
from benchmarks.cases import ALWAYS, LATENCY, OS, PRODUCE, Case
from benchmarks.latency import ACKNOWLEDGED, END_TO_END
from benchmarks.results import Results
from benchmarks.subject import BARE, CONSUMED, DISCARD, KAFKA, LIMIT, MILLSTREAM, PRODUCED, in_order
from benchmarks.verdict import targets


def flow(mb_per_s: float, user_s: float = 0.2, memory_mb: float = 100) -> dict[str, float]:
    return {
        "MB/s": mb_per_s,
        "messages/s": mb_per_s * 1000,
        "user CPU s/GB": user_s,
        "system CPU s/GB": 0.4,
        "user CPU s/M messages": user_s,
        "system CPU s/M messages": 0.4,
        "client CPU s/GB": 0.5,
        "memory MB": memory_mb,
        "children's memory MB": 30,
    }


def latency(p99_ms: float) -> dict[str, float]:
    return {"p50 ms": p99_ms / 2, "p99 ms": p99_ms, "p99.9 ms": p99_ms * 2, "max ms": p99_ms * 3}


@pytest.fixture
def results() -> Results:
    """Results that just meet every target, in two lines and at one fixed rate."""
    made = Results()
    for case in (Case(), Case(flush=OS)):
        for subject, rate in ((LIMIT, 1000), (MILLSTREAM, 900), (KAFKA, 500), (BARE, 600), ("nats", 400)):
            for round_rate in (rate, rate * 1.1, rate * 0.5):
                made.add(case, subject, case.durability, {PRODUCED: flow(round_rate), CONSUMED: flow(round_rate)})
    for subject, p99 in ((LIMIT, 1.0), (MILLSTREAM, 2.0), (KAFKA, 3.0)):
        fixed = Case(kind=LATENCY, rate_per_s=1000)
        made.add(fixed, subject, fixed.durability, {ACKNOWLEDGED: latency(p99), END_TO_END: latency(p99)})
    return made


def test_a_value_is_the_median_of_the_rounds(results: Results) -> None:
    line = next(results.lines(PRODUCED))
    assert line.value(MILLSTREAM, "MB/s") == 900
    assert line.peak(MILLSTREAM, "MB/s") == pytest.approx(990)
    assert line.value("nobody", "MB/s") is None
    assert line.ratio("MB/s", MILLSTREAM, LIMIT) == pytest.approx(0.9)


def test_servers_are_compared_within_a_round() -> None:
    """A machine that is twice as fast in one round is so for both servers."""
    made = Results()
    for rate in (100, 200, 400):
        made.add(Case(), LIMIT, "", {PRODUCED: flow(rate)})
        made.add(Case(), MILLSTREAM, "", {PRODUCED: flow(rate * 0.8)})
    made.add(Case(), KAFKA, "", {PRODUCED: flow(80)})
    line = next(made.lines(PRODUCED))
    assert line.ratio("MB/s", MILLSTREAM, LIMIT) == pytest.approx(0.8)
    # Kafka was measured in one round only, so there are no rounds to compare.
    assert line.ratio("MB/s", MILLSTREAM, KAFKA) == pytest.approx(2)


def test_all_targets_are_met(results: Results) -> None:
    verdicts = {target.metric: target.reached for target in targets(results)}
    measured = {what: reached for what, reached in verdicts.items() if reached is not None}
    assert set(measured.values()) == {True}
    assert "p99 end to end at 1,000/s, Apache Kafka / Millstream" in measured
    assert "consume, relative to nats" in measured
    assert verdicts["100 in flight, relative to Apache Kafka"] is None


def test_a_missed_target_names_the_worst_line(results: Results) -> None:
    worst = Case(flush=OS, partitions=100)
    results.add(worst, LIMIT, worst.durability, {PRODUCED: flow(1000)})
    results.add(worst, MILLSTREAM, worst.durability, {PRODUCED: flow(300, user_s=0.9, memory_mb=250)})
    missed = {target.metric: target for target in targets(results) if target.reached is False}
    assert set(missed) == {
        "produce at 1 KiB, relative to the limit",
        "produce at 1 KiB, user CPU per GB",
        "memory under load",
    }
    assert {target.where for target in missed.values()} == {worst.name}
    assert missed["produce at 1 KiB, relative to the limit"].measured == "2 of 3 lines; lowest 30%"
    assert missed["produce at 1 KiB, user CPU per GB"].measured == "2 of 3 lines; highest 0.90 s"
    assert "250 MB" in missed["memory under load"].measured


def test_small_messages_are_not_compared_with_the_limit(results: Results) -> None:
    small = Case(size_bytes=100)
    results.add(small, LIMIT, small.durability, {PRODUCED: flow(1000)})
    results.add(small, MILLSTREAM, small.durability, {PRODUCED: flow(300)})
    assert targets(results)[0].reached is True


def test_results_survive_a_round_trip_through_the_file(results: Results) -> None:
    fixed = Case(kind=LATENCY, rate_per_s=50_000)
    results.add(fixed, MILLSTREAM, fixed.durability, {ACKNOWLEDGED: latency(float("inf"))})
    written = json.dumps(results.as_json(), allow_nan=False)
    again = Results.from_json(json.loads(written))
    assert again.as_json() == results.as_json()
    assert report.summary(again, fixed).endswith("acknowledged p99 ms: millstream never")


def test_tables_have_a_cell_for_each_column(results: Results) -> None:
    made = [table for table in report.tables(results) if table.rows]
    assert {len(row) - len(table.header) for table in made for row in table.rows} == {0}
    produced = next(table for table in made if table.title.startswith("Maximum produce rate"))
    assert produced.rows[0][0] == Case().name
    assert "900 (0.90)" in produced.rows[0]
    assert "90%" in produced.rows[0]
    durable = next(table for table in made if table.title.startswith("Durability"))
    assert durable.rows[0] == [LIMIT, "fsync before ack", "not measured", "page cache"]
    assert produced.markdown().splitlines()[2].startswith("| line |")


def test_charts_are_drawn(results: Results, tmp_path: Path) -> None:
    drawn = plots.draw(results, tmp_path)
    assert len(drawn) == 5
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_servers_are_in_a_fixed_order() -> None:
    assert in_order([DISCARD, "redis", KAFKA, "nats", LIMIT, LIMIT, MILLSTREAM, BARE]) == [
        LIMIT,
        MILLSTREAM,
        KAFKA,
        BARE,
        "nats",
        "redis",
        DISCARD,
    ]


def test_an_axis_is_cut_before_an_outlier_hides_the_rest() -> None:
    assert plots.axis_end([1, 2, 3, 1000]) == 3
    assert plots.axis_end([1, 2, 3]) == 3
    assert plots.axis_end([0, 0]) == 1


def test_each_factor_is_varied_alone() -> None:
    chosen = [case for case in cases.default() if case.kind == PRODUCE]
    assert len({case.name for case in cases.default()}) == len(cases.default())
    for base in (Case(flush=ALWAYS), Case(flush=OS)):
        expected = [
            replace(base, size_bytes=100),
            replace(base, keyed=True),
            *(replace(base, partitions=partitions) for partitions in cases.PARTITIONS),
            replace(base, producers=10),
            replace(base, acks="1"),
        ]
        assert set(expected) <= set(chosen)
    assert {case.flush for case in chosen} == set(cases.FLUSHES)


def test_the_full_product_has_every_combination() -> None:
    everything = cases.everything()
    assert len([case for case in everything if case.kind == PRODUCE]) == 3 * 2 * 2 * 3 * 2 * 2
    assert len({case.name for case in everything}) == len(everything)


def test_lines_are_selected_by_words() -> None:
    names = [case.name for case in cases.chosen(cases.default(), ["latency"])]
    assert len(names) == 6
    assert all("keyed" in case.name for case in cases.chosen(cases.default(), ["keyed"]))
    assert len(cases.chosen(cases.default(), ["latency", "start"])) == 7
    assert cases.chosen(cases.default(), []) == cases.default()
