"""Features: what ApiVersions reports, and how UpdateFeatures refuses changes."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from millstream.broker.kafka.apis.api_versions import (
    CONSUMER_GROUP_HEARTBEAT_KEY,
    END_TXN_KEY,
    ApiVersions,
    ServedApi,
    epoch_of,
    features_of,
)
from millstream.broker.kafka.apis.update_features import UpdateFeatures
from millstream.protocol.messages import codec
from millstream_testing.api_requests import send_frame, send_request

REFUSED = ErrorCode.invalid_update_version
NEWEST: Any = importlib.import_module("kio.schema.update_features.v2.request")


class Other:
    def __init__(self, key: int) -> None:
        self.key = key
        self.versions = (0, 1)


def reported(version: int, *keys: int) -> Any:
    served: list[ServedApi] = [Other(key) for key in keys]
    software = {"client_software_name": "x", "client_software_version": "1"} if version >= 3 else {}
    return send_frame(ApiVersions(served), codec.load_request_class(18, version)(**software))


async def test_the_levels_are_reported_as_clients_read_them() -> None:
    response = reported(4)
    assert {feature.name: (feature.min_version, feature.max_version) for feature in response.supported_features} == {
        "metadata.version": (25, 25),
    }
    assert [
        (feature.name, feature.min_version_level, feature.max_version_level) for feature in response.finalized_features
    ] == [("metadata.version", 25, 25)]
    assert response.finalized_features_epoch == 25


async def test_transaction_version_2_is_reported_once_it_is_served() -> None:
    response = reported(4, END_TXN_KEY)
    assert ("transaction.version", 0, 2) in {
        (feature.name, feature.min_version, feature.max_version) for feature in response.supported_features
    }
    # A Java producer uses it because of this report.
    assert {feature.name: feature.max_version_level for feature in response.finalized_features}[
        "transaction.version"
    ] == 2


async def test_the_group_version_is_reported_once_it_is_served() -> None:
    response = reported(4, CONSUMER_GROUP_HEARTBEAT_KEY)
    assert ("group.version", 0, 1) in {
        (feature.name, feature.min_version, feature.max_version) for feature in response.supported_features
    }
    assert {feature.name: feature.max_version_level for feature in response.finalized_features}["group.version"] == 1
    assert response.finalized_features_epoch == 26


async def test_older_clients_get_no_features_that_may_be_disabled() -> None:
    response = reported(3, CONSUMER_GROUP_HEARTBEAT_KEY)
    assert [feature.name for feature in response.supported_features] == ["metadata.version"]
    assert {feature.name for feature in response.finalized_features} == {"metadata.version", "group.version"}
    for version in range(3):
        assert not hasattr(reported(version), "finalized_features")


def test_the_epoch_grows_with_every_level() -> None:
    features = list(features_of({CONSUMER_GROUP_HEARTBEAT_KEY}))
    for at, feature in enumerate(features):
        raised = [*features[:at], feature._replace(level=feature.level + 1), *features[at + 1 :]]
        assert epoch_of(raised) > epoch_of(features)


def update(version: int, *requested: tuple[str, int]) -> Any:
    module = importlib.import_module(f"kio.schema.update_features.v{version}.request")
    kind = {"allow_downgrade": True} if version == 0 else {"upgrade_type": 2}
    updates = tuple(module.FeatureUpdateKey(feature=name, max_version_level=level, **kind) for name, level in requested)
    return module.UpdateFeaturesRequest(feature_updates=updates)


def update_api() -> UpdateFeatures:
    return UpdateFeatures([Other(CONSUMER_GROUP_HEARTBEAT_KEY), Other(END_TXN_KEY)])


@pytest.mark.parametrize("version", range(3))
async def test_the_current_level_is_accepted(version: int) -> None:
    response = await send_request(update_api(), update(version, ("metadata.version", 25), ("group.version", 1)))
    assert (response.error_code, response.error_message) == (ErrorCode.none, None)
    if version < 2:
        assert [(result.feature, result.error_code) for result in response.results] == [
            ("metadata.version", ErrorCode.none),
            ("group.version", ErrorCode.none),
        ]


@pytest.mark.parametrize("version", range(3))
@pytest.mark.parametrize(
    ("name", "level", "says"),
    [
        ("metadata.version", 24, "levels 25 to 25"),
        ("metadata.version", 26, "levels 25 to 25"),
        ("group.version", 0, "fixed by the release"),
        ("transaction.version", 1, "fixed by the release"),
        ("transaction.version", 3, "levels 0 to 2"),
        ("kraft.version", 1, "there is no feature 'kraft.version'"),
    ],
)
async def test_other_levels_are_refused(version: int, name: str, level: int, says: str) -> None:
    response = await send_request(update_api(), update(version, (name, level)))
    assert response.error_code is REFUSED
    assert says in response.error_message
    if version < 2:
        assert response.results == ()


@pytest.mark.parametrize("version", range(3))
async def test_one_refused_update_refuses_all(version: int) -> None:
    requested = (("metadata.version", 25), ("kraft.version", 1))
    assert (await send_request(update_api(), update(version, *requested))).error_code is REFUSED
    twice = (("group.version", 1), ("group.version", 1))
    assert (await send_request(update_api(), update(version, *twice))).error_code is ErrorCode.invalid_request


async def test_an_unknown_upgrade_type_is_refused() -> None:
    versioned = NEWEST.UpdateFeaturesRequest(
        feature_updates=(NEWEST.FeatureUpdateKey(feature="metadata.version", max_version_level=25, upgrade_type=9),)
    )
    assert (await send_request(update_api(), versioned)).error_code is REFUSED
