"""The configuration of a node: the sources of its values, and which it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream.cli.machine import broker_config
from millstream.core import config
from millstream.core.config import Config, memory_bytes
from millstream.core.errors import InvalidSetting


def test_environment_variables_are_applied_and_misspelled_ones_refused() -> None:
    assert Config.load(environment={"MILLSTREAM_NODE_ID": "4", "PATH": "/bin"}).node_id == 4
    with pytest.raises(InvalidSetting, match=r"MILLSTREAM_DEFAULT_FLUHS, .*; did you mean 'default-flush'"):
        Config.load(environment={"MILLSTREAM_DEFAULT_FLUHS": "os"})
    with pytest.raises(InvalidSetting, match=r"MILLSTREAM_XYZZY, which is not a setting of a node$"):
        Config.load(environment={"MILLSTREAM_XYZZY": "1"})


@pytest.mark.parametrize(
    "variable",
    [
        "MILLSTREAM_BROKERS",
        "MILLSTREAM_TIMEOUT",
        "MILLSTREAM_TRACEBACK",
        "MILLSTREAM_PROFILE",
        "MILLSTREAM_PROFILES",
        "MILLSTREAM_SERVICE_HOST",
        "MILLSTREAM_SERVICE_PORT_KAFKA",
        "MILLSTREAM_PORT",
        "MILLSTREAM_PORT_9092_TCP_ADDR",
        "MILLSTREAM_KAFKA_PORT_9092_TCP",
    ],
)
def test_variables_of_commands_and_of_kubernetes_are_ignored(variable: str) -> None:
    assert Config.load(environment={variable: "tcp://10.0.0.1:9092"}) == Config()


def test_a_misspelled_name_in_the_file_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    (tmp_path / "node.toml").write_text("node-di = 5\n")
    with pytest.raises(InvalidSetting, match="unknown setting 'node-di'; did you mean 'node-id'"):
        Config.load(environment={}, file=tmp_path / "node.toml")


def test_the_memory_of_a_node_is_the_smallest_limit_above_it(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/system.slice/millstream.service\n")
    service = tmp_path / "system.slice" / "millstream.service"
    service.mkdir(parents=True)
    machine = memory_bytes(tmp_path, own)
    (service / "memory.max").write_text("max\n")
    assert memory_bytes(tmp_path, own) == machine
    (tmp_path / "system.slice" / "memory.max").write_text("2000\n")
    assert memory_bytes(tmp_path, own) == 2000
    (service / "memory.max").write_text("1000\n")
    assert memory_bytes(tmp_path, own) == 1000
    (tmp_path / "memory.max").write_text("500\n")
    assert memory_bytes(tmp_path, own / "missing") == 500


@pytest.mark.parametrize(
    ("gigabytes", "memory", "is_kept"),
    [(2, "1g", False), (3.8, "1g", True), (3.8, "2g", False), (8, "2g", True), (8, "3g", False), (8, "much", False)],
)
def test_a_spare_driver_is_kept_where_there_is_memory_for_it(
    monkeypatch: pytest.MonkeyPatch, gigabytes: float, memory: str, is_kept: bool
) -> None:
    monkeypatch.setattr(config, "memory_bytes", lambda: int(gigabytes * 1e9))
    assert Config(pipelines_memory=memory).keeps_spare is is_kept
    assert Config(pipelines_memory=memory, pipelines_spare="on").keeps_spare
    assert not Config(pipelines_memory=memory, pipelines_spare="off").keeps_spare


@pytest.mark.parametrize(
    ("lake", "is_local"), [("", True), ("/data/lake", True), ("/shared/lake", False), ("s3://bucket/lake", False)]
)
def test_tables_in_the_data_folder_of_a_cluster_node_are_its_own(lake: str, is_local: bool) -> None:
    alone = Config(data="/data", pipelines_lake=lake)
    clustered = alone.replace(etcd="http://127.0.0.1:2379", catalog="postgresql://h/d")
    cores = broker_config(clustered.replace(cores="2"), "/data/node-1", 0, runs_pipelines=True)
    other_core = broker_config(clustered.replace(cores="2"), "/data/node-2", 1, runs_pipelines=False)
    answers = [config.has_private_lake for config in (alone, clustered, cores, other_core)]
    assert answers == [False, is_local, is_local, None]


def test_a_cluster_does_not_share_an_sqlite_catalog() -> None:
    with pytest.raises(InvalidSetting, match=r"catalog must be a PostgreSQL database"):
        Config.load(flags={"etcd": "http://127.0.0.1:2379", "catalog": "sqlite:///x.db"})


def test_a_range_of_ports_has_room_for_every_process() -> None:
    def load(kafka: str, cores: int) -> str:
        return Config.load(environment={}, flags={"kafka": kafka, "cores": str(cores)}).kafka

    assert load("[::1]:9092-9095", 4) == "[::1]:9092"
    assert load("127.0.0.1:9092-9095", 1) == "127.0.0.1:9092"
    for kafka, ports in (("127.0.0.1:9092-9094", 3), ("127.0.0.1:9092-9000", 0)):
        with pytest.raises(InvalidSetting, match=f"has {ports} ports, and cores 4 needs 4"):
            load(kafka, 4)
    with pytest.raises(InvalidSetting, match="kafka must be HOST:PORT"):
        load("127.0.0.1:9092-", 1)


def test_a_listener_with_tls_uses_the_nodes_certificate_wherever_that_is_set(tmp_path: Path) -> None:
    file = tmp_path / "millstream.toml"
    file.write_text('[[listeners]]\nname = "lan"\naddress = "127.0.0.1:0"\ntls = true\n')
    files = {"tls-cert": "node.pem", "tls-key": "node.key"}
    by_flags = Config.load(file=file, environment={}, flags=files)
    by_environment = Config.load(
        file=file, environment={"MILLSTREAM_TLS_CERT": "node.pem", "MILLSTREAM_TLS_KEY": "node.key"}
    )
    for loaded in (by_flags, by_environment):
        lan = loaded.all_listeners[1]
        assert (lan.tls_cert, lan.tls_key) == ("node.pem", "node.key")
    with pytest.raises(InvalidSetting, match=r"listener 'lan' has tls = true, but neither it nor the node"):
        Config.load(file=file, environment={})
    file.write_text('[[listeners]]\nname = "lan"\naddress = "127.0.0.1:0"\ntls = "no"\n')
    with pytest.raises(InvalidSetting, match="must be true or false"):
        Config.load(file=file, environment={}, flags=files)
