"""The summary of `millstream cluster status` when something is wrong."""

from __future__ import annotations

import pytest

from millstream.cli import cluster
from millstream.client.admin.cluster_status import ClusterStatus, PartitionView
from millstream_testing.command import call_command


def test_only_what_is_wrong_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    troubled = PartitionView(topic="orders", partition=0, leader=None, replicas=(1,), in_sync=())
    found = ClusterStatus(
        cluster_id="c", controller=1, nodes=[], partitions=1, troubled=[troubled], behind=[], warnings=[]
    )
    monkeypatch.setattr(cluster, "ask", lambda _common, _work: found)
    outcome = call_command(["cluster", "status"])
    assert outcome.code == 1
    assert "not everything is in sync: 1 partition without a leader or with a replica out of sync" in outcome.err
