"""The short form of `make chaos-cluster`: real processes, links through relays, without special rights."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream_testing.cluster_faults import KINDS
from millstream_testing.cluster_network import RelayNetwork
from millstream_testing.cluster_trial import ClusterTrial, Plan

CHEAP = ("kill", "pause", "cut", "cut-from-etcd", "cut-from-all", "clock", "stop")


@pytest.mark.trial
def test_nothing_acknowledged_is_lost_through_one_fault_of_each_cheap_kind(tmp_path: Path) -> None:
    plan = Plan(
        kinds={kind: KINDS[kind][1] for kind in CHEAP},
        each_once=True,
        partitions=2,
        producers=2,
        lease_ms=1000,
        replica_lag_ms=1500,
        load_s=(0.0, 0.2),
        check_every=100,
    )
    lines: list[str] = []
    with ClusterTrial(tmp_path, RelayNetwork(plan.nodes), plan, lines.append) as trial:
        outcome = trial.run()
    reported = f"seed {plan.seed}\n{outcome.findings()}\n" + "\n".join(lines)
    assert outcome.ok, reported
    assert outcome.faults == len(CHEAP), reported
    assert outcome.report.acknowledged > 0
