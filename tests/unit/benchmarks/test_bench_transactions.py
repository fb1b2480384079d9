"""How the transaction benchmark evaluates its numbers."""

from __future__ import annotations

from typing import Any, cast

from benchmarks import transactions
from benchmarks.reader import COMMITTED, UNCOMMITTED
from benchmarks.subject import KAFKA, MILLSTREAM, Numbers
from benchmarks.transactions import CONSUME, EACH_100_MS, EACH_SECOND, PLAIN, PRODUCE, Rounds


def rounds(*rates: float, cpu: float = 1.0) -> list[Numbers]:
    return [{"MB/s": rate, "user CPU s/GB": cpu / 2, "system CPU s/GB": cpu / 2} for rate in rates]


def server(**lines: list[Numbers]) -> Rounds:
    return {
        PLAIN: lines.get("plain", rounds(100, 200, 400)),
        EACH_100_MS: lines.get("often", rounds(50, 100, 200)),
        EACH_SECOND: lines.get("second", rounds(90, 180, 360)),
        UNCOMMITTED: lines.get("all", rounds(1000, 1000, 1000)),
        COMMITTED: lines.get("committed", rounds(990, 990, 990)),
    }


def test_ratios_are_taken_within_a_round() -> None:
    of, to = rounds(10, 90, 400), rounds(20, 100, 400)
    assert transactions.ratio(of, to, transactions.rate) == 0.9
    assert transactions.ratio(of, (), transactions.rate) is None


def test_a_reached_target_is_reported() -> None:
    goals = transactions.targets({MILLSTREAM: server()})
    assert [goal.reached for goal in goals] == [True, True, None, None, None]
    goals = transactions.targets({MILLSTREAM: server(), KAFKA: server()})
    assert [goal.reached for goal in goals] == [True] * 5


def test_a_missed_target_is_reported() -> None:
    slow = server(second=rounds(70, 140, 280), committed=rounds(900, 900, 900))
    goals = transactions.targets({MILLSTREAM: slow, KAFKA: server()})
    assert [goal.reached for goal in goals] == [False, False, True, False, False]
    assert goals[0].measured == "0.70 times, CPU 1.00 times"


def test_the_first_server_alternates_between_rounds() -> None:
    brokers = cast("Any", ["a", "b"])
    orders: list[list[Any]] = [list(transactions._order(PRODUCE, brokers, turn)) for turn in range(4)]
    assert {order[0] for order in orders} == {(PLAIN, "a"), (PLAIN, "b"), (EACH_SECOND, "a"), (EACH_SECOND, "b")}
    assert all(len(set(order)) == len(PRODUCE) * 2 for order in orders)


def test_every_line_is_in_a_table() -> None:
    results = {MILLSTREAM: server(), KAFKA: server()}
    shown = [row[:2] for table in transactions._tables(results) for row in table.rows]
    assert shown == [[name, line] for lines in (PRODUCE, CONSUME) for name in results for line in lines]
    assert next(iter(transactions._tables(results))).rows[1][2:] == ["100", "0.50", "200", "1.00", "1.00"]
