"""The deployment examples use existing settings with valid values."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millstream.broker.security.listeners import Listeners
from millstream.core.config import Config
from millstream.core.setting import without_password

DEPLOY = Path(__file__).parents[2] / "deploy"
ASSIGNED = re.compile(r"^ *(MILLSTREAM_\w+)(?:: *|=)(\S+)$", re.MULTILINE)


def settings_in(text: str) -> list[dict[str, str]]:
    """The settings of each node; those before the first node apply to all."""
    services = text.partition("\nvolumes:\n")[0]
    shared, *nodes = re.split(r"^  node-\d:$", services, flags=re.MULTILINE)
    return [dict(ASSIGNED.findall(shared)) | dict(ASSIGNED.findall(node)) for node in nodes or [""]]


def test_the_service_starts_a_node_of_a_cluster() -> None:
    config = Config.load(environment={}, file=DEPLOY / "systemd" / "millstream.toml")
    assert config.in_cluster
    Listeners(config).check()
    assert config.etcd.startswith("https://")
    assert "sslmode=verify-full" in config.catalog
    # Passwords are in separate files.
    assert all(without_password(url) == url for url in (config.etcd, config.catalog))
    assert all((config.etcd_password_file, config.catalog_password_file, config.secrets_key_file))
    unit = (DEPLOY / "systemd" / "millstream.service").read_text()
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(stop_s) * 1000 > config.leave_ms + config.shutdown_ms
    # Only the data and the compiled code are writable.
    folders = {f"{kind}Directory": "millstream" for kind in ("State", "Cache")}
    assert folders.items() <= dict(re.findall(r"^(\w+)=(\S+)$", unit, re.MULTILINE)).items()
    assert config.data.startswith("/var/lib/millstream/")
    assert "NUMBA_CACHE_DIR=/var/cache/millstream\n" in unit


def test_the_composed_nodes_differ_where_they_must() -> None:
    environments = settings_in((DEPLOY / "compose" / "compose.yaml").read_text())
    nodes = [Config.load(environment=environment, file=None) for environment in environments]
    assert len(nodes) == 3
    for node in nodes:
        Listeners(node).check()
    for name in ("node_id", "rack", "kafka", "http", "advertise"):
        assert len({getattr(node, name) for node in nodes}) == len(nodes), name
    for name in ("etcd", "catalog", "cluster"):
        assert len({getattr(node, name) for node in nodes}) == 1, name
    assert all(node.advertise.rpartition(":")[2] == node.kafka.rpartition(":")[2] for node in nodes)


def test_alerts_use_documented_metrics() -> None:
    rules = (DEPLOY / "prometheus" / "millstream.rules.yml").read_text()
    dashboard = (DEPLOY / "grafana" / "millstream.json").read_text()
    pages = "".join(page.read_text() for page in (DEPLOY.parent / "docs").glob("*.md"))
    used = {name.removesuffix("_bucket") for name in re.findall(r"millstream_\w+", rules + dashboard)}
    assert used
    assert [name for name in sorted(used) if f"`{name}`" not in pages] == []


@pytest.mark.parametrize(
    # JSON has no comments.
    "path",
    sorted(path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".json"),
    ids=lambda path: path.name,
)
def test_every_example_describes_itself(path: Path) -> None:
    assert path.read_text().startswith("# ")
