"""A short trial of subscriptions: workers misbehave, leaders are killed, and every message is accounted for."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.model.subscription import AT_LEAST_ONCE, EXACTLY_ONCE
from millstream.testing.etcd_server import EtcdServer
from millstream.testing.postgres_server import PostgresServer
from millstream.testing.server import Server
from millstream.testing.server_group import ServerGroup
from millstream.testing.subscription_trial import Plan, SubscriptionTrial

CLUSTER = {"lease-ms": 2000, "leader-balance-ms": 1000, "subscriptions-partitions": 3}


async def test_one_node_is_killed_while_it_delivers(tmp_path: Path) -> None:
    plan = Plan(seed=11, load_s=5.0, kills=2, messages_per_s=60.0, workers=2, down_s=(0.0, 0.5), drain_s_max=60.0)
    plan.stop_share = 0.0
    with Server(tmp_path / "data", settings={"subscriptions-partitions": 3}) as server:
        outcome = await SubscriptionTrial({1: server}, plan, print).run()
    assert outcome.ok, "\n".join([outcome.account, *outcome.findings, server.log_tail()])


@pytest.mark.trial
async def test_leaders_of_messages_and_of_states_are_killed_while_they_deliver(
    tmp_path: Path, etcd: EtcdServer, postgres: PostgresServer
) -> None:
    """The first kill takes a leader of the topic, the second one of `__subscriptions`."""
    plan = Plan(
        seed=12,
        load_s=5.0,
        kills=2,
        messages_per_s=60.0,
        workers=2,
        replication=3,
        promises=(AT_LEAST_ONCE, EXACTLY_ONCE),
        drain_s_max=60.0,
        stop_share=0.0,
    )
    with ServerGroup(tmp_path, etcd.url, postgres.new_database(), settings=CLUSTER) as group:
        outcome = await SubscriptionTrial(group.nodes, plan, print).run()
        logs = [node.log_tail() for node in group]
    assert outcome.ok, "\n".join([outcome.account, *outcome.findings, *logs])
