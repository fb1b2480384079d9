from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
from kio.schema.describe_cluster.v2.request import DescribeClusterRequest
from kio.schema.find_coordinator.v6.request import FindCoordinatorRequest
from kio.static.primitive import i8

from millstream import __version__
from millstream.protocol.wire.client import Client
from millstream_testing.command import CommandLine, call_command, run_command
from millstream_testing.security import Certificates
from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

StartServer = Callable[..., Server]
FREE = ("--kafka", "127.0.0.1:0", "--http", "127.0.0.1:0")
DEADLINE_S = 60.0


def gateways(server: Server) -> list[psutil.Process]:
    return [child for child in psutil.Process(server.pid).children() if "millstream.gateway.process" in child.cmdline()]


def get(server: Server, path: str) -> httpx.Response:
    return httpx.get(f"http://{server.http}{path}", timeout=DEADLINE_S)


@contextmanager
def served(folder: Path, *flags: str) -> Iterator[subprocess.Popen[str]]:
    """A node whose output the test reads itself."""
    command = [sys.executable, "-m", "millstream.cli.main", "serve", "--data", "data", *FREE, *flags]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=folder, text=True, **pipes) as serve:  # type: ignore[call-overload]
        try:
            yield serve
        finally:
            serve.kill()


def first_line(serve: subprocess.Popen[str]) -> str:
    assert serve.stdout is not None
    return serve.stdout.readline()


def until_healthy(server: Server) -> None:
    """Wait for health: a node on a busy machine may still be loading when it reports that it listens."""
    wait_until(lambda: get(server, "/healthz").status_code == 200)


def test_a_terminal_gets_a_banner(tmp_path: Path) -> None:
    with served(tmp_path) as serve:
        lines = [first_line(serve) for _ in range(5)]
        serve.send_signal(signal.SIGINT)
        rest, logged = serve.communicate(timeout=DEADLINE_S)
    assert lines[0] == f"millstream {__version__} is ready\n"
    assert "connect any Kafka client here" in lines[1]
    assert "/console" in lines[2]
    assert (lines[4], rest) == ("Stop with Ctrl-C.\n", "")
    assert "info    stopping signal=SIGINT" in logged
    assert serve.returncode == 0


def test_the_banner_names_the_scheme_of_each_address(tmp_path: Path) -> None:
    certificates = Certificates(tmp_path / "certs")
    tls = ("--http-tls-cert", str(certificates.node), "--http-tls-key", str(certificates.node_key))
    for flags, scheme in (((), "http"), (tls, "https")):
        with served(tmp_path, "--registry", "127.0.0.1:0", *flags) as serve:
            lines = [first_line(serve) for _ in range(4)]
        assert lines[2].startswith(f"  http   {scheme}://127.0.0.1:")
        assert lines[3].startswith(f"  schema {scheme}://127.0.0.1:")


def test_programs_get_one_line_and_may_have_json_logs(tmp_path: Path) -> None:
    with served(tmp_path, "--json", "--log-format", "json") as serve:
        ready = json.loads(first_line(serve))
        CommandLine(ready["kafka"])("topic", "create", "logged")
        serve.send_signal(signal.SIGTERM)
        rest, logged = serve.communicate(timeout=DEADLINE_S)
    assert (sorted(ready), rest) == (["http", "kafka", "nodes"], "")
    lines = [json.loads(line) for line in logged.splitlines()]
    created = next(line for line in lines if line["message"] == "topic created")
    assert (created["topic"], created["level"]) == ("logged", "info")
    assert serve.returncode == 0


def test_a_second_signal_stops_at_once(tmp_path: Path) -> None:
    with served(tmp_path, "--json", "--shutdown-ms", "600000") as serve:
        host, _, port = json.loads(first_line(serve))["kafka"].rpartition(":")
        with socket.create_connection((host, int(port))) as held:
            # A request that never ends delays a clean stop for as long as it may.
            held.sendall((1000).to_bytes(4, "big"))
            wait_until(lambda: any(c.raddr for c in psutil.Process(serve.pid).net_connections()))
            serve.send_signal(signal.SIGTERM)
            assert serve.stderr is not None
            while "stopping" not in serve.stderr.readline():
                pass
            serve.send_signal(signal.SIGTERM)
            assert serve.wait(DEADLINE_S) == 130


@pytest.mark.parametrize("flag", ["kafka", "http"])
def test_a_port_in_use_names_the_flag(tmp_path: Path, flag: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        other = {"kafka": "http", "http": "kafka"}[flag]
        refused = run_command(
            ["serve", "--data", "data", f"--{flag}", address, f"--{other}", "127.0.0.1:0"], cwd=tmp_path
        )
    assert (refused.code, refused.out) == (5, "")
    assert f"--{flag} HOST:PORT" in refused.err
    assert address in refused.err
    assert "Traceback" not in refused.err


def test_a_folder_in_use_is_a_conflict(start_server: StartServer) -> None:
    server = start_server()
    refused = run_command(["serve", "--data", str(server.data), *FREE], cwd=server.data.parent)
    assert (refused.code, refused.out) == (5, "")
    assert refused.err.splitlines()[-1].startswith("millstream: ")
    assert "Traceback" not in refused.err


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        (("--node-id", "one"), "node-id must be a whole number, not 'one'"),
        (("--log-level", "loud"), "log-level must be one of debug, info, warning, error, not 'loud'"),
        (("--no-such-flag",), "--no-such-flag"),
        (("--data", ""), "data cannot be empty"),
        (("--data", " "), "data cannot be empty"),
        (
            ("--group-session-min-ms", "9000", "--group-session-max-ms", "8000"),
            "group-session-min-ms (9000) is larger than group-session-max-ms (8000)",
        ),
        (("--group-consumer-heartbeat-ms", "60000"), "is larger than group-consumer-session-ms (45000)"),
    ],
)
def test_an_invalid_setting_is_a_usage_error(tmp_path: Path, arguments: tuple[str, ...], output: str) -> None:
    refused = call_command(["serve", "--data", str(tmp_path), *FREE, *arguments])
    assert (refused.code, refused.out) == (2, "")
    assert output in refused.err


def test_a_missing_config_file_is_not_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = call_command(["serve", "--data", str(tmp_path / "file"), *FREE])
    assert (refused.code, refused.err) == (2, f"millstream: data must be a folder, and {tmp_path}/file is not one\n")
    refused = call_command(["serve", "--data", str(tmp_path), *FREE, "--config", "missing.toml"])
    assert (refused.code, refused.out, refused.err) == (3, "", "millstream: config file missing.toml does not exist\n")


def test_an_invalid_address_is_a_usage_error(tmp_path: Path) -> None:
    refused = run_command(["serve", "--data", "data", "--kafka", "9092"], cwd=tmp_path)
    assert (refused.code, refused.out) == (2, "")
    assert "kafka must be HOST:PORT" in refused.err


def test_an_unknown_variable_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLSTREAM_NODE_IDD", "4")
    refused = call_command(["serve", "--data", str(tmp_path), *FREE])
    assert (refused.code, refused.out) == (2, "")
    assert "MILLSTREAM_NODE_IDD, which is not a setting of a node; did you mean 'node-id'?" in refused.err


def test_a_stop_that_cannot_be_marked_as_clean_fails(tmp_path: Path) -> None:
    with served(tmp_path, "--json") as serve:
        first_line(serve)
        (tmp_path / "data" / "clean-stop" / "in-the-way").mkdir(parents=True)
        serve.send_signal(signal.SIGTERM)
        _, logged = serve.communicate(timeout=DEADLINE_S)
    assert serve.returncode == 1
    assert "millstream: the node has stopped, but not cleanly" in logged


def test_a_node_on_all_addresses_advertises_the_one_the_client_used(start_server: StartServer) -> None:
    server = start_server(kafka="0.0.0.0:0", insecure="true")
    port = int(server.kafka.rpartition(":")[2])

    async def reported(host: str) -> set[tuple[str, int]]:
        async with Client.connect(f"{host}:{port}") as client:
            request = DescribeClusterRequest(
                include_cluster_authorized_operations=False, endpoint_type=i8(1), include_fenced_brokers=False
            )
            described = (await client.send(None, request)).brokers
            coordinator = await client.send(None, FindCoordinatorRequest(key_type=i8(0), coordinator_keys=("g",)))
            nodes = (await client.metadata()).nodes.values()
            return {(node.host, node.port) for node in (*nodes, *described, *coordinator.coordinators)}

    for host in ("127.0.0.1", "127.0.0.2"):
        assert asyncio.run(reported(host)) == {(host, port)}
    topic = httpx.post(f"http://{server.http}/v1/topics", json={"topic": "t"}, timeout=60)
    assert topic.status_code == 201, "the gateway reaches its node, too"


@pytest.mark.parametrize(
    "flags",
    [
        ("--advertise", "0.0.0.0:9092"),
        (
            "--kafka",
            "0.0.0.0:0",
            "--insecure",
            "true",
            "--etcd",
            "127.0.0.1:1",
            "--catalog",
            "postgresql://127.0.0.1:1/x",
        ),
    ],
)
def test_serve_refuses_to_advertise_an_unusable_address(tmp_path: Path, flags: tuple[str, ...]) -> None:
    refused = call_command(["serve", "--data", str(tmp_path), *FREE, *flags])
    assert (refused.code, "--advertise" in refused.err) == (2, True)


@pytest.mark.parametrize(("folders", "before", "now"), [(["node-1", "node-1001"], 2, 1), (["."], 1, 2)])
def test_a_member_of_a_cluster_keeps_its_number_of_processes(
    tmp_path: Path, folders: list[str], before: int, now: int
) -> None:
    for folder in folders:
        (tmp_path / folder / "partitions").mkdir(parents=True)
    stores = ["--etcd", "http://127.0.0.1:1", "--catalog", "postgresql://127.0.0.1:1/x"]
    refused = call_command(["serve", "--data", str(tmp_path), *FREE, *stores, "--cores", str(now)])
    assert (refused.code, f"--cores {before} as before" in refused.err) == (5, True), refused.err
    assert sorted(path.parent.relative_to(tmp_path).as_posix() for path in tmp_path.glob("**/partitions")) == folders


@pytest.mark.parametrize(
    ("flags", "advice"),
    [
        (["--kafka", "0.0.0.0:0"], "--auth required"),
        (["--http", "0.0.0.0:0"], "--auth required"),
        (["--http", "0.0.0.0:0", "--auth", "required"], "--http-tls-cert"),
    ],
)
@pytest.mark.parametrize("insecure", [False, True])
def test_an_unauthenticated_public_address_is_refused_without_insecure(
    tmp_path: Path, flags: list[str], advice: str, insecure: bool
) -> None:
    given_flags = ["--insecure"] if insecure else []
    # With --insecure, the address that cannot be advertised is refused instead, so that no node is left running.
    ended = call_command(["serve", "--data", str(tmp_path), *FREE, *flags, *given_flags, "--advertise", "0.0.0.0:1"])
    assert ended.code == 2
    assert (advice in ended.err and "pass --insecure" in ended.err) is not insecure
    assert ("--advertise" in ended.err) is insecure


def test_a_flag_overrides_the_file(start_server: StartServer, tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text("node-id = 5\ndefault-partitions = 3\nauto-create-topics = true\n")
    server = start_server(config=tmp_path / "node.toml", node_id=7, auto_create_topics="false")
    millstream = CommandLine(server.kafka)
    described = millstream("topic", "create", "made", "--json")
    assert described.document["partitions"] == 3
    until_healthy(server)
    assert get(server, "/readyz").json()["node"] == 7
    assert millstream("publish", "not-made", "x").code == 3


def test_health_and_metrics_are_served_by_a_process_that_ends_with_the_broker(start_server: StartServer) -> None:
    server = start_server(forked=False)
    millstream = CommandLine(server.kafka)
    millstream("publish", "measured", "x")
    until_healthy(server)
    assert get(server, "/healthz").json()["status"] == "ok"
    assert get(server, "/readyz").status_code == 200
    metrics = get(server, "/metrics").text
    assert 'millstream_topic_records_in_total{topic="measured"} 1.0' in metrics
    assert 'millstream_high_watermark{partition="0",topic="measured"} 1.0' in metrics
    assert 'millstream_request_seconds_bucket{api="Produce",le="+Inf"} 1.0' in metrics
    docs = Path(__file__).parents[2] / "docs"
    pages = "".join((docs / name).read_text(encoding="utf-8") for name in ("operating.md", "cluster.md"))
    documented = set(re.findall(r"`((?:millstream|process)_\w+)`", pages))
    served = set(re.findall(r"^# HELP (\S+)", metrics, re.MULTILINE))
    assert documented == served, "docs/operating.md and docs/cluster.md list every metric"
    missing = get(server, "/missing")
    assert (missing.status_code, missing.headers["content-type"]) == (404, "application/problem+json")
    (gateway,) = gateways(server)
    server.kill_main()
    _, alive = psutil.wait_procs([gateway], timeout=DEADLINE_S)
    assert alive == []


def test_a_dead_gateway_is_restarted_and_stops_with_its_broker(start_server: StartServer) -> None:
    server = start_server(forked=False)
    until_healthy(server)
    (first,) = gateways(server)
    first.kill()
    # Until it is gone it may still accept a connection, and drop it.
    first.wait(DEADLINE_S)
    until_healthy(server)
    (second,) = gateways(server)
    assert second.pid != first.pid
    assert "the HTTP gateway exited; restarting it" in server.log_tail()
    assert server.stop() == 0
    assert not second.is_running()
    assert (server.data / "clean-stop").exists()


def open_to_others(folder: Path) -> list[str]:
    return [str(path) for path in (folder, *folder.rglob("*")) if path.lstat().st_mode & 0o077]


def test_the_data_folder_is_private(start_server: StartServer) -> None:
    server = start_server()
    until_healthy(server)
    httpx.post(f"http://{server.http}/v1/topics/orders/messages", content=b"hello", timeout=DEADLINE_S)
    assert (server.data / "catalog.sqlite").exists()
    assert open_to_others(server.data) == []
    server.stop()
    server.data.chmod(0o755)
    (server.data / "catalog.sqlite").chmod(0o644)
    server.start()
    assert open_to_others(server.data) == []
    assert "removed the access of other users" in server.log.read_text()


def test_the_data_folder_contains_only_documented_files(start_server: StartServer) -> None:
    page = (Path(__file__).parents[2] / "docs" / "operating.md").read_text(encoding="utf-8")
    listing = page.split("```\nmillstream-data/\n", 1)[1].split("```", 1)[0]
    known = {
        name.strip(" /") for line in listing.splitlines() for name in re.split(r"  +\S", line.strip())[0].split(",")
    }
    server = start_server()
    millstream = CommandLine(server.kafka)
    millstream("topic", "create", "orders", "--partitions", 8)
    millstream("group", "reset", "readers", "--topic", "orders", "--to", "start")
    for _ in range(2):
        for number in range(20):
            millstream("publish", "orders", number, "--key", number)
        assert {path.name for path in server.data.iterdir()} <= {name.split("/")[0] for name in known}
        files = {path.name for path in (server.data / "partitions").glob("*/*/*")}
        assert {re.sub(r"^\d{20}", "0" * 20, name) for name in files} <= {
            f"{'0' * 20}{suffix}" for suffix in (".log", ".index", ".timeindex") if suffix in " ".join(known)
        }
        server.restart()
