"""The summary of `millstream cluster status` when something is wrong."""

from __future__ import annotations

import dataclasses

import pytest

from millstream.cli import cluster
from millstream.client.admin.cluster_status import ClusterNode, ClusterStatus, TroubledPartition
from millstream_testing.command import call_command


def test_only_problems_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    troubled = TroubledPartition(topic="orders", partition=0, leader=None, replicas=(1,), in_sync=())
    found = ClusterStatus(
        cluster_id="c", controller=1, nodes=[], partitions=1, troubled=[troubled], behind=[], warnings=[]
    )
    monkeypatch.setattr(cluster, "call_broker", lambda _common, _work: found)
    outcome = call_command(["cluster", "status"])
    assert outcome.code == 1
    assert "not everything is in sync: 1 partition without a leader or with a replica out of sync" in outcome.err


def test_the_lag_of_an_unreachable_node_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ClusterNode(
        id=1, address="a:1", rack=None, state="ready", version="1", leads=1, replicas=1, behind=7, reasons=()
    )
    away = dataclasses.replace(here, id=2, state="away", behind=117240)
    found = ClusterStatus(
        cluster_id="c", controller=1, nodes=[here, away], partitions=1, troubled=[], behind=[], warnings=[]
    )
    monkeypatch.setattr(cluster, "call_broker", lambda _common, _work: found)
    shown = [line.split() for line in call_command(["cluster", "status"]).out.splitlines() if line]
    assert [line[-1] for line in shown if line[0] in ("1", "2")] == ["7", "-"]
