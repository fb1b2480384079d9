"""Nodes started with a mistake report it at once, and never report that they are ready."""

from __future__ import annotations

import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from millstream.cli.local_process import ReservedPort
from millstream_testing.command import CommandLine, Outcome, run_command
from millstream_testing.etcd_server import EtcdServer
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.server import Server, ServerGroup

WAIT_S = 60.0
NOBODY = "127.0.0.1:1"


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, etcd: EtcdServer, postgres: PostgresServer
) -> Iterator[ServerGroup]:
    folder = tmp_path_factory.mktemp("cluster")
    with ServerGroup(folder, etcd.url, postgres.new_database(), nodes=1) as started:
        yield started


@pytest.fixture
def settings(cluster: ServerGroup) -> dict[str, object]:
    return cluster[1].settings | {"node-id": 2}


def flags(data: Path, settings: Mapping[str, object]) -> list[str]:
    free = {"kafka": "127.0.0.1:0", "http": "127.0.0.1:0"}
    return ["serve", "--data", str(data), *(f"--{name}={value}" for name, value in (free | dict(settings)).items())]


def serve(data: Path, settings: Mapping[str, object]) -> Outcome:
    return run_command(flags(data, settings))


def with_password(url: object, password: str) -> str:
    scheme, _, rest = str(url).partition("://")
    user, _, host = rest.partition("@")
    return f"{scheme}://{user.partition(':')[0]}:{password}@{host}"


def test_a_login_refused_by_the_catalog_ends_the_start(tmp_path: Path, settings: dict[str, object]) -> None:
    wrong = serve(tmp_path / "data", settings | {"catalog": with_password(settings["catalog"], "wrong")})
    assert (wrong.code, "password authentication failed" in wrong.err, "away" in wrong.err) == (2, True, False)
    missing = serve(tmp_path / "data", settings | {"catalog": str(settings["catalog"]) + "_not_there"})
    assert (missing.code, "does not exist" in missing.err, "--catalog" in missing.err) == (2, True, True)


def test_an_unreachable_etcd_ends_the_start_after_a_while(tmp_path: Path, settings: dict[str, object]) -> None:
    ended = serve(tmp_path / "data", settings | {"etcd": f"http://{NOBODY}", "etcd-wait-ms": 1})
    assert ended.code == 4
    assert f"no response from etcd at {NOBODY}" in ended.err
    assert "--etcd-wait-ms" in ended.err


def test_a_catalog_of_another_cluster_is_refused(tmp_path: Path, settings: dict[str, object]) -> None:
    other = serve(tmp_path / "data", settings | {"cluster": "other"})
    assert (other.code, f"--cluster {settings['cluster']}" in other.err) == (5, True)


def test_a_node_id_in_use_is_reported_with_its_holder(
    tmp_path: Path, cluster: ServerGroup, settings: dict[str, object]
) -> None:
    twin = serve(tmp_path / "data", settings | {"node-id": 1})
    assert (twin.code, f"is already running at {cluster[1].kafka}" in twin.err) == (5, True)


def test_a_folder_of_another_node_or_cluster_is_refused(cluster: ServerGroup, settings: dict[str, object]) -> None:
    other_node = serve(cluster[1].data, settings)
    assert (other_node.code, "pass --node-id 1" in other_node.err) == (5, True)
    other_cluster = serve(cluster[1].data, settings | {"node-id": 1, "cluster": "other"})
    assert (other_cluster.code, f"--cluster {settings['cluster']}" in other_cluster.err) == (5, True)


def test_a_node_that_etcd_does_not_know_any_more_exits_at_once(
    cluster: ServerGroup, settings: dict[str, object]
) -> None:
    with EtcdServer() as empty:
        forgotten = serve(cluster[1].data, settings | {"node-id": 1, "etcd": empty.url})
    assert (forgotten.code, "node 1 was part of a cluster" in forgotten.err) == (1, True)


def get(address: str, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{address}{path}") as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def await_response(address: str, path: str, text: str) -> tuple[int, str]:
    deadline = time.monotonic() + WAIT_S
    while text not in (found := get(address, path))[1]:
        assert time.monotonic() < deadline, found
        time.sleep(0.05)
    return found


def test_a_first_start_waits_for_the_catalog_and_reports_it(tmp_path: Path, settings: dict[str, object]) -> None:
    held = ReservedPort()
    http = held.address
    options: dict[str, Any] = settings | {"http": http, "catalog": f"postgresql://nobody@{NOBODY}/none"}
    server = Server(tmp_path / "data", settings=options)
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(server.command(), stdout=log, stderr=log)
    try:
        for path in ("/readyz", "/healthz"):
            code, output = await_response(http, path, "waits for the catalog")
            assert (code, "Connection refused" in output) == (503, True)
        assert "is ready" not in (tmp_path / "log").read_text()
    finally:
        process.terminate()
        assert process.wait(WAIT_S) == 0


def test_a_later_start_proceeds_without_the_catalog_and_health_reports_it(cluster: ServerGroup) -> None:
    node = cluster[1]
    node.stop()
    right = node.settings["catalog"]
    node.settings["catalog"] = f"postgresql://nobody@{NOBODY}/none"
    try:
        node.start()
        code, output = await_response(node.http, "/readyz", "the catalog has been unavailable since")
        assert code == 200, output
        command = CommandLine(node.kafka)
        for arguments in (("topic", "create", "new"), ("publish", "missing", "hello")):
            reported = command(*arguments, "--timeout", 5)
            assert (reported.code, len(reported.err.splitlines()), "catalog" in reported.err) == (6, 1, True), (
                reported.err
            )
        assert node.stop() == 0
    finally:
        node.settings["catalog"] = right
        node.kill()
        node.start()
