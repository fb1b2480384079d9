"""The summary of `millstream cluster status` when something is wrong."""

from __future__ import annotations

import dataclasses
import socket

import pytest

from millstream.cli import cluster
from millstream.cli.cluster import _shortened
from millstream.cli.cluster_up import first_port
from millstream.client.admin.cluster_status import ClusterNode, ClusterStatus, UnhealthyPartition
from millstream_testing.command import call_command


def test_only_problems_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    troubled = UnhealthyPartition(topic="orders", partition=0, leader=None, replicas=(1,), in_sync=())
    cluster_status = ClusterStatus(
        cluster_id="c", controller=1, nodes=[], partitions=1, troubled=[troubled], behind=[], warnings=[]
    )
    monkeypatch.setattr(cluster, "call_broker", lambda _common, _work: cluster_status)
    outcome = call_command(["cluster", "status"])
    assert outcome.code == 1
    assert "not everything is in sync: 1 partition without a leader or with a replica out of sync" in outcome.err


def test_the_lag_of_an_unreachable_node_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    here = ClusterNode(
        id=1, address="a:1", rack=None, state="ready", version="1", leads=1, replicas=1, behind=7, reasons=()
    )
    away = dataclasses.replace(here, id=2, state="away", behind=117240)
    cluster_status = ClusterStatus(
        cluster_id="c", controller=1, nodes=[here, away], partitions=1, troubled=[], behind=[], warnings=[]
    )
    monkeypatch.setattr(cluster, "call_broker", lambda _common, _work: cluster_status)
    shown = [line.split() for line in call_command(["cluster", "status"]).out.splitlines() if line]
    assert [line[-1] for line in shown if line[0] in ("1", "2")] == ["7", "-"]


def test_a_long_list_of_topics_in_a_plan_is_shortened() -> None:
    assert _shortened("a, b to 3") == "a, b to 3"
    assert _shortened("2") == "2"
    assert _shortened(", ".join("abcdefg") + " to 3") == "a, b, c, d, e and 2 more topics to 3"


def test_nodes_get_other_ports_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert first_port("--kafka-port-base", port, 1) == 0
    assert f"port {port} is in use, so the nodes get other ports; --kafka-port-base" in capsys.readouterr().err
