"""The short form of `make chaos-transactions`: programs and nodes are killed, and each effect happens exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream_testing.cluster_network import RelayNetwork
from millstream_testing.transaction_trial import SETTINGS, Plan, TransactionTrial
from millstream_testing.trial_clients import TrialFailed
from millstream_testing.trial_cluster import TrialCluster, TrialSingleNode


def run(trial: TransactionTrial, plan: Plan, lines: list[str]) -> None:
    with trial:
        try:
            outcome = trial.run()
        except TrialFailed as error:
            pytest.fail(f"seed {plan.seed}\n{error}\n{trial.describe_waiting()}\n" + "\n".join(lines))
    reported = f"seed {plan.seed}\n{outcome.findings()}\n" + "\n".join(lines)
    assert outcome.ok, reported
    assert outcome.kills >= plan.kills
    assert outcome.report.committed > 0
    assert outcome.report.visible > 0


@pytest.mark.trial
def test_each_effect_happens_once_although_a_node_and_its_programs_are_killed(tmp_path: Path) -> None:
    plan = Plan(
        kills=3,
        node_kinds={"kill": 1},
        node_share=1.0,
        worker_kinds={"worker-kill": 1},
        worker_faults=(1, 1),
        workers=1,
        load_s=(0.2, 0.5),
    )
    lines: list[str] = []
    run(TransactionTrial(tmp_path, TrialSingleNode(tmp_path, settings=SETTINGS), plan, lines.append), plan, lines)


@pytest.mark.trial
def test_each_effect_happens_once_although_nodes_of_a_cluster_are_killed(tmp_path: Path) -> None:
    plan = Plan(
        kills=2,
        node_kinds={"kill": 1},
        node_share=1.0,
        worker_kinds={"worker-kill": 1},
        worker_faults=(0, 1),
        groups=("classic", "aiokafka"),
        workers=1,
        load_s=(0.2, 0.5),
        lease_ms=1000,
        replica_lag_ms=1500,
    )
    lines: list[str] = []
    settings = SETTINGS | {"lease-ms": plan.lease_ms, "replica-lag-ms": plan.replica_lag_ms}
    cluster = TrialCluster(tmp_path, RelayNetwork(3), nodes=3, settings=settings)
    run(TransactionTrial(tmp_path, cluster, plan, lines.append), plan, lines)
