"""The served APIs, the protocol page and Kafka's APIs agree."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path

import kio.schema
import pytest

from millstream.broker.kafka.api import Api, PrivateApi
from millstream.broker.kafka.served_apis import ApiDependencies, ServedApis
from millstream.broker.node import Broker
from millstream.broker.security.guards import AUTHORIZE_THEMSELVES, guarded_keys
from millstream.broker.subscriptions.engine import Expiry
from millstream.core.config import Config
from millstream.protocol.messages.codec import PRIVATE_KEY_MIN, load_request_class
from millstream_testing.protocol_reference import NOT_SERVED, api_entries


@pytest.fixture
async def served(api_dependencies: ApiDependencies) -> ServedApis:
    return ServedApis(api_dependencies)


def names_of_kafka() -> Iterator[str]:
    """Every request that kio knows, by its name in Kafka."""
    for package in pkgutil.iter_modules(kio.schema.__path__):
        if not package.ispkg:
            continue
        versions = pkgutil.iter_modules(importlib.import_module(f"kio.schema.{package.name}").__path__)
        newest = max(
            (version.name for version in versions if version.name[1:].isdigit()), key=lambda name: int(name[1:])
        )
        folder = f"kio.schema.{package.name}.{newest}"
        parts = {part.name for part in pkgutil.iter_modules(importlib.import_module(folder).__path__)}
        if "request" in parts:
            yield "".join(word.capitalize() for word in package.name.split("_"))


async def test_every_documented_api_is_served_once(served: ServedApis) -> None:
    serving = sorted((api.key, type(api).__name__, *api.versions) for api in served.apis)
    assert serving == sorted(entry[:4] for entry in api_entries())
    assert len({api.key for api in served.apis}) == len(serving)


def test_every_kafka_api_is_served_or_documented_as_missing() -> None:
    serving = {entry.name for entry in api_entries() if entry.key < PRIVATE_KEY_MIN}
    missing = [name for names in NOT_SERVED.values() for name in names]
    assert len(missing) == len(set(missing))
    assert not serving & set(missing)
    assert serving | set(missing) == set(names_of_kafka())


async def test_every_api_declares_its_permissions(served: ServedApis) -> None:
    """Kafka's APIs have a guard or check by themselves; private requests cannot be defined without one."""
    for api in served.apis:
        if api.key < PRIVATE_KEY_MIN:
            assert (api.key in guarded_keys()) != (api.key in AUTHORIZE_THEMSELVES), type(api).__name__
        elif not isinstance(api, PrivateApi):
            assert type(api).__name__ in ("NodeStatus", "ClientList"), "declare what it needs, as the others do"


async def test_every_api_declares_its_changes(served: ServedApis) -> None:
    """A change that an API does not declare would be missing in the audit log."""
    for api in served.apis:
        if isinstance(api, Api | PrivateApi):
            assert hasattr(type(api), "changes"), f"{type(api).__name__} does not declare what it changes"
        else:
            assert type(api).__name__ in ("ApiVersions", "Produce", "Fetch", "OffsetCommit", "NodeStatus", "ClientList")


def test_every_served_version_has_its_messages() -> None:
    for entry in api_entries():
        # The oldest versions of Produce are advertised but refused, so they have no messages.
        oldest = 3 if entry.name == "Produce" else entry.oldest
        if entry.key < PRIVATE_KEY_MIN:
            for version in range(oldest, entry.newest + 1):
                request = load_request_class(entry.key, version)
                assert request.__name__ == f"{entry.name}Request"


async def test_a_node_stops_if_the_clean_up_of_unused_subscriptions_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dies(_expiry: Expiry) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(Expiry, "run", dies)
    broker = Broker(Config(data=str(tmp_path), kafka="127.0.0.1:0", http="127.0.0.1:0"))
    await broker.start()
    try:
        with pytest.raises(RuntimeError, match="unused subscriptions: a defect"):
            await broker.failed
    finally:
        await broker.stop()
