"""A short trial of subscriptions: workers and leaders are killed, and every message is accounted for."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream_testing.cluster_network import RelayNetwork
from millstream_testing.planted_serve import BUGS, planted
from millstream_testing.queue_trial import Outcome
from millstream_testing.subscription_trial import SETTINGS, Plan, SubscriptionTrial
from millstream_testing.trial_cluster import TrialCluster, TrialSingleNode


def short(seed: int, **more: object) -> Plan:
    plan = Plan(seed=seed, faults=2, messages_per_s=60.0, worker_faults=(1, 1), worker_kinds={"worker-kill-soon": 1})
    plan.node_kinds = {"kill": 1}
    plan.worker_processes = {"own": 1, "explicit": 1}
    plan.load_s = (0.5, 1.0)
    plan.node_lease_s = 0.5
    plan.variants = ("plain", "ordered")
    for name, value in more.items():
        setattr(plan, name, value)
    return plan


async def run(folder: Path, cluster: TrialCluster, plan: Plan) -> Outcome:
    with cluster:
        outcome = await SubscriptionTrial(folder, cluster, plan, print).run()
        print(outcome.summary, *outcome.findings, cluster.logs(), sep="\n")
    return outcome


@pytest.mark.trial
async def test_one_node_and_workers_are_killed_during_delivery(tmp_path: Path) -> None:
    outcome = await run(tmp_path, TrialSingleNode(tmp_path, settings=SETTINGS), short(11))
    assert outcome.ok


@pytest.mark.trial
async def test_nodes_of_a_cluster_are_killed_and_isolated_during_delivery(tmp_path: Path) -> None:
    settings = SETTINGS | {"lease-ms": 2000, "replica-lag-ms": 3000}
    cluster = TrialCluster(tmp_path, RelayNetwork(3), nodes=3, settings=settings)
    plan = short(12, faults=4, node_kinds={"kill": 1, "cut-from-all": 1}, node_lease_s=2.0)
    outcome = await run(tmp_path, cluster, plan)
    assert outcome.ok


@pytest.mark.trial
@pytest.mark.parametrize("bug", sorted(BUGS))
async def test_a_planted_bug_is_found(tmp_path: Path, bug: str) -> None:
    cluster = TrialSingleNode(tmp_path, settings=SETTINGS, program=planted(bug))
    plan = short(13, faults=4, load_s=(1.0, 2.0), delayed_share=0.2, drain_s_max=20.0)
    outcome = await run(tmp_path, cluster, plan)
    assert not outcome.ok
