"""The benchmark harness itself, on the limit server."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from benchmarks import machine, reader, run
from benchmarks.cases import LATENCY, OS, REQUESTS, Case
from benchmarks.processes import Meter
from benchmarks.subjects import Limit


def test_a_run_records_its_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "TOUCHED_BYTES_MAX", 1 << 20)
    monkeypatch.setattr(reader, "KEPT_BYTES", 1 << 20)
    code = run.main(["--quick", "--subjects", "limit", "--only", "produce", "--seconds", "0.2", "--out", str(tmp_path)])
    assert code == 0
    document = json.loads((tmp_path / "bench.json").read_text())
    assert document["failures"] == []
    assert document["machine"]["cores"]
    assert {line["direction"] for line in document["lines"]} == {"produce", "consume"}
    assert all(line["subjects"]["limit"]["median"]["messages/s"] > 0 for line in document["lines"])
    assert "Maximum produce rate" in (tmp_path / "bench.md").read_text()
    assert (tmp_path / "produce.png").exists()
    assert "Targets" in capsys.readouterr().out
    assert run.main(["--show", str(tmp_path / "bench.json"), "--out", str(tmp_path / "again")]) == 0
    assert (tmp_path / "again" / "bench.json").read_bytes() == (tmp_path / "bench.json").read_bytes()


def test_fixed_rates_and_single_requests_are_measured() -> None:
    subject = Limit()
    timed = subject.measure(Case(kind=LATENCY, flush=OS, partitions=2, rate_per_s=1000), 0.3)
    for numbers in timed.values():
        assert 0 < numbers["p50 ms"] <= numbers["p99 ms"] <= numbers["p99.9 ms"] <= numbers["max ms"] < float("inf")
    alone, in_flight = subject.measure(Case(kind=REQUESTS, flush=OS, partitions=1), 0.3).values()
    assert alone["p50 ms"] > 0
    assert in_flight["requests/s"] > 0


def test_producers_with_keys_share_the_work() -> None:
    case = Case(flush="interval", keyed=True, partitions=4, producers=3, size_bytes=100)
    numbers = Limit().measure(case, 0.3)["produce"]
    assert numbers["messages/s"] > 0
    assert numbers["memory MB"] > 0


def test_each_round_starts_with_another_server() -> None:
    one, two = Limit(), Limit()
    order = [subject for _, subject in run.turns(Case(), [one, two], 2)]
    assert order == [one, two, two, one]
    assert list(run.turns(Case(kind="start"), [one], 2)) == []


def test_unknown_servers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(["--subjects", "limit,nobody"])
    assert "nobody: not one of" in capsys.readouterr().err


def test_the_file_system_is_that_of_the_nearest_mount() -> None:
    mounts = "/dev/a / ext4 rw 0 0\ntmpfs /tmp tmpfs rw 0 0\n/dev/b /tmpfoo xfs rw 0 0\n"
    assert machine.file_system("/tmp/x", mounts) == "tmpfs"
    assert machine.file_system("/tmpfoo/x", mounts) == "xfs"
    assert machine.file_system("/var", mounts) == "ext4"


def test_a_meter_measures_the_client_and_the_server() -> None:

    with Meter(os.getpid()) as meter:
        sum(range(1_000_000))
    assert meter.cpu.user_s >= 0
    assert meter.memory.peak_bytes > 1_000_000
