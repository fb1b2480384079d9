from __future__ import annotations

import asyncio
import gc
import socket
import ssl
import threading
import time
import warnings
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from millstream import __version__
from millstream.cli import broker_check
from millstream.cli.doctor import Severity
from millstream.cli.exit_code import ExitCode
from millstream.client.admin.cluster_status import DamagedOffsets
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.cluster_metadata import ClusterMetadata
from millstream_testing.security import Certificates


@pytest.fixture
async def gateway() -> AsyncIterator[str]:
    async def respond(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readline()
        writer.write(b"HTTP/1.1 503 x\r\n\r\n" if b"/readyz" in line else b"nonsense\r\n")
        writer.close()

    server = await asyncio.start_server(respond, "127.0.0.1", 0)
    yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    server.close()
    await server.wait_closed()


def status(**changes: Any) -> dict[str, Any]:
    return {
        "node_id": 1,
        "version": __version__,
        "reasons": [],
        "warnings": [],
        "now_ms": time.time_ns() // 1_000_000,
        "http": "127.0.0.1:1",
        **changes,
    }


async def test_an_unreachable_broker_is_the_only_finding() -> None:
    (finding,) = await broker_check.check_broker("127.0.0.1:1", 1.0)
    assert (finding.severity, finding.exit_code) == (Severity.PROBLEM, ExitCode.UNREACHABLE)
    assert "millstream serve" in finding.advice


def test_differing_versions_are_a_warning() -> None:
    assert broker_check._check_versions([status()]).severity is Severity.OK
    findings = broker_check._check_versions([status(), status(node_id=2, version="9.9.9")])
    assert (findings.severity, "node 2 runs 9.9.9" in findings.detail) == (Severity.WARNING, True)


def test_a_broker_that_is_not_ready_is_a_problem() -> None:
    (finding,) = broker_check._check_readiness({1: status(), 1001: status()})
    assert (finding.severity, finding.detail) == (Severity.OK, "nodes 1, 1001 are ready")
    full, silent = broker_check._check_readiness({1: status(reasons=["orders-0: the disk is full"]), 1001: {}})
    assert (full.severity, "the disk is full" in full.detail) == (Severity.PROBLEM, True)
    assert (silent.severity, silent.detail) == (Severity.PROBLEM, "node 1001 does not respond")
    away = "node 1001 of this machine is not running"
    (finding,) = broker_check._check_readiness({1: status(reasons=[away]), 2001: status(reasons=[away])})
    assert (finding.severity, away in finding.detail) == (Severity.PROBLEM, True)


def test_clock_skew_is_a_warning() -> None:
    assert broker_check._check_clock(status()).severity is Severity.OK
    finding = broker_check._check_clock(status(now_ms=status()["now_ms"] - 60_000))
    assert finding.severity is Severity.WARNING
    assert "-60" in finding.detail or "-59.9" in finding.detail


def test_partitions_without_a_leader_are_a_problem() -> None:
    def metadata(leader_id: int, in_sync: tuple[int, ...] = (1, 2)) -> ClusterMetadata:
        partition = SimpleNamespace(partition=0, leader_id=leader_id, replicas=(1, 2), in_sync=in_sync)
        topic = SimpleNamespace(name="orders", partitions={0: partition})
        return cast("ClusterMetadata", SimpleNamespace(topics={"orders": topic}))

    assert [finding.severity for finding in broker_check._check_leaders(metadata(1), {})] == [Severity.OK]
    (finding,) = broker_check._check_leaders(metadata(-1), {})
    assert (finding.severity, "orders-0" in finding.detail) == (Severity.PROBLEM, True)
    (finding,) = broker_check._check_leaders(metadata(1, in_sync=(1,)), {"orders": 1})
    assert (finding.severity, "orders-0" in finding.detail) == (Severity.WARNING, True)
    (finding,) = broker_check._check_leaders(metadata(1, in_sync=(1,)), {"orders": 2})
    assert (finding.severity, finding.exit_code) == (Severity.PROBLEM, ExitCode.FAILED)
    assert "orders-0" in finding.detail
    assert "acks=all is refused" in finding.detail


def test_a_node_that_is_down_is_a_problem() -> None:
    partition = SimpleNamespace(partition=0, leader_id=1, replicas=(1, 2), in_sync=(1,))
    topics = {"orders": SimpleNamespace(name="orders", partitions={0: partition})}
    metadata = cast("ClusterMetadata", SimpleNamespace(topics=topics, nodes={1: None}))
    (finding,) = broker_check._check_nodes(broker_check._missing_nodes(metadata))
    assert (finding.severity, finding.detail) == (Severity.PROBLEM, "node 2 is down")


async def test_an_endpoint_that_fails_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"node": 1, "state": "down", "last_error": "the endpoint cannot be reached"}
    described = [{"name": "hook", "push": [row]}, {"name": "billing"}]
    monkeypatch.setattr(SubscriptionClient, "describe", AsyncMock(return_value=described))
    (finding,) = await broker_check.check_push(cast("Client", None))
    assert (finding.severity, finding.check) == (Severity.WARNING, "push")
    assert finding.detail == "Push of subscription hook is down (node 1): the endpoint cannot be reached"
    row["state"] = "up"
    (finding,) = await broker_check.check_push(cast("Client", None))
    assert (finding.severity, finding.detail) == (Severity.OK, "1 endpoint, none failing")


def test_a_slow_response_is_a_warning() -> None:
    assert broker_check._check_response("b", 0.01).severity is Severity.OK
    assert broker_check._check_response("b", 3.0).severity is Severity.WARNING


async def test_a_gateway_that_responds_is_fine_even_if_not_ready(gateway: str) -> None:
    assert (await broker_check._check_http(status(http=gateway))).severity is Severity.OK
    assert await broker_check._get_status(gateway, "/other") == 0


async def test_an_unreachable_gateway_is_a_problem() -> None:
    finding = await broker_check._check_http(status())
    assert (finding.severity, "does not respond" in finding.detail) == (Severity.PROBLEM, True)


async def test_a_gateway_on_all_addresses_is_shown_at_that_of_the_broker(gateway: str) -> None:
    everywhere = status(http=gateway.replace("127.0.0.1", "0.0.0.0"))
    finding = await broker_check._check_http(everywhere, host="127.0.0.1")
    assert (finding.severity, finding.detail) == (Severity.OK, f"the gateway at {gateway} responds")


async def test_a_silent_gateway_is_reported(gateway: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_check, "_HTTP_S", 0.0)
    finding = await broker_check._check_http(status(http=gateway))
    assert finding.detail.endswith("does not respond: no response in time")


def test_the_check_does_not_wait_for_the_tls_shutdown_of_the_gateway(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certs")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates.node, certificates.node_key)
    asked = threading.Event()

    def respond_then_stall() -> None:
        connection, _ = listening.accept()
        with context.wrap_socket(connection, server_side=True) as encrypted:
            encrypted.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            asked.wait(60)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        peer = threading.Thread(target=respond_then_stall)
        peer.start()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always", ResourceWarning)
            url = f"https://127.0.0.1:{listening.getsockname()[1]}"
            assert asyncio.run(broker_check._get_status(url, "/readyz")) == 200
            gc.collect()
        asked.set()
        peer.join()
    assert [str(warning.message) for warning in warned] == []


def test_lost_offsets_are_problems_with_a_remedy() -> None:
    assert [finding.severity for finding in broker_check._check_damage([])] == [Severity.OK]
    findings = list(broker_check._check_damage([("", DamagedOffsets("orders", 0, 3, at)) for at in range(10, 17)]))
    assert {finding.severity for finding in findings} == {Severity.PROBLEM}
    assert findings[0].detail == "orders-0: the disk lost the offsets 3 to 9"
    assert "group reset GROUP --topic orders --partition 0 --to 10" in findings[0].advice
    assert (len(findings), findings[-1].detail) == (6, "2 more ranges that the disk lost")


def test_lost_offsets_that_another_replica_may_have_are_a_warning() -> None:
    (finding,) = broker_check._check_damage([("node 2: ", DamagedOffsets("orders", 0, 3, 10, True))])
    assert (finding.severity, finding.detail) == (
        Severity.WARNING,
        "node 2: orders-0: the disk lost the offsets 3 to 9",
    )
    assert "fetched from another replica" in finding.advice


def test_a_backlog_beyond_the_retention_is_a_warning() -> None:
    def reported(value: float) -> dict[str, Any]:
        samples = [[value, {"topic": "orders", "partition": "0"}], [1.0, {"topic": "orders", "partition": "1"}]]
        return status(metrics=[{"name": "millstream_log_held_bytes", "samples": samples}])

    assert list(broker_check._check_retained([status()])) == []
    (finding,) = broker_check._check_retained([reported(12345.0)])
    assert finding.severity is Severity.WARNING
    assert finding.detail.startswith("topic orders keeps 12,346 bytes past")


def test_advice_about_lost_transaction_states_is_not_about_groups() -> None:
    (finding,) = broker_check._check_damage([("", DamagedOffsets("__transaction_state", 0, 3, 4))])
    assert "millstream transaction list --hanging" in finding.advice
    assert "group reset" not in finding.advice
