"""AlterConfigs, which replaces all settings, and ListConfigResources, which lists resources with settings."""

from __future__ import annotations

import dataclasses
import importlib
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from millstream.broker.cluster.declared_state import DeclaredGroups
from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.apis.alter_configs import AlterConfigs
from millstream.broker.kafka.apis.describe_configs import NODE_RESOURCE, TOPIC_RESOURCE
from millstream.broker.kafka.apis.list_config_resources import ListConfigResources
from millstream.protocol.messages.codec import load_request_class
from millstream_testing.api_requests import send_in_version, send_request

MESSAGES: Any = importlib.import_module("kio.schema.alter_configs.v2.request")
LIST: Any = importlib.import_module("kio.schema.list_config_resources.v1.request")


def alter(
    *configs: tuple[str, str | None], kind: int = TOPIC_RESOURCE, name: str = "orders", check: bool = False
) -> Any:
    resource = MESSAGES.AlterConfigsResource(
        resource_type=kind,
        resource_name=name,
        configs=tuple(MESSAGES.AlterableConfig(name=key, value=value) for key, value in configs),
    )
    return MESSAGES.AlterConfigsRequest(resources=(resource,), validate_only=check)


class TestAlterConfigs:
    @pytest.fixture
    async def api(self, topics: Topics) -> AlterConfigs:
        await topics.create("orders", overrides={"segment.ms": "1000", "millstream.owner": "me"})
        return AlterConfigs(topics)

    def overrides(self, topics: Topics) -> dict[str, str]:
        topic = topics.get("orders")
        assert topic is not None
        return dict(topic.overrides)

    @pytest.mark.parametrize("version", range(3))
    async def test_unnamed_settings_return_to_their_default(
        self, api: AlterConfigs, topics: Topics, version: int
    ) -> None:
        before = self.overrides(topics)
        changes = (("retention.ms", "77"), ("millstream.owner", "you"))
        (response,) = (await send_in_version(api, version, alter(*changes, check=True))).responses
        assert (response.error_code, response.error_message) == (ErrorCode.none, None)
        assert self.overrides(topics) == before
        (response,) = (await send_in_version(api, version, alter(*changes))).responses
        assert (response.error_code, response.resource_type, response.resource_name) == (ErrorCode.none, 2, "orders")
        assert self.overrides(topics) == dict(changes)
        settings = topics.partition("orders", 0).log.settings
        assert (settings.retention_ms, settings.segment_ms) == (77, 3600_000)
        await send_in_version(api, version, alter())
        assert self.overrides(topics) == {}

    @pytest.mark.parametrize(
        ("asked", "code", "says"),
        [
            (alter(("retention.ms", "soon")), ErrorCode.invalid_config, "whole number"),
            (alter(("retention.ms", None)), ErrorCode.invalid_config, "no value"),
            (alter(("no.such", "1")), ErrorCode.invalid_config, "known are"),
            (alter(("local.retention.ms", "1")), ErrorCode.invalid_config, "a setting of Kafka that"),
            (alter(("flush", "os"), ("flush", "os")), ErrorCode.invalid_request, "more than once"),
            (alter(name="nope"), ErrorCode.unknown_topic_or_partition, "nope"),
            (alter(name="no/slash"), ErrorCode.invalid_topic_exception, "no/slash"),
            (alter(("node.id", "7"), kind=NODE_RESOURCE, name="5"), ErrorCode.invalid_request, "restart"),
            (alter(kind=16, name="x"), ErrorCode.invalid_request, "has no settings"),
        ],
    )
    async def test_invalid_settings_are_reported(
        self, api: AlterConfigs, topics: Topics, asked: Any, code: ErrorCode, says: str
    ) -> None:
        before = self.overrides(topics)
        (response,) = (await send_request(api, asked)).responses
        assert response.error_code is code
        assert says in response.error_message
        assert self.overrides(topics) == before

    async def test_the_settings_of_a_copy_are_changed_at_its_source(
        self, api: AlterConfigs, topics: Topics, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        before = self.overrides(topics)
        copy = dataclasses.replace(topics.all()[0], mirror="paris")
        monkeypatch.setattr(topics, "get", lambda _name: copy)
        (response,) = (await send_request(api, alter(("retention.ms", "77")))).responses
        assert response.error_code is ErrorCode.policy_violation
        assert "copy of mirror 'paris'" in response.error_message
        assert [dict(topic.overrides) for topic in topics.all()] == [before]

    async def test_node_settings_are_replaced(self, api: AlterConfigs, topics: Topics) -> None:
        for settings in ({"log.retention.ms": "5", "max.connections": "7"}, {"log.retention.bytes": "6"}):
            (response,) = (await send_request(api, alter(*settings.items(), kind=NODE_RESOURCE, name=""))).responses
            assert (response.error_code, topics.broker_settings.of("")) == (ErrorCode.none, settings)
            assert topics.broker_settings.connections_max == int(settings.get("max.connections", "10000"))

    async def test_a_topic_named_twice_is_refused(self, api: AlterConfigs) -> None:
        twice = MESSAGES.AlterConfigsRequest(resources=alter().resources * 2, validate_only=False)
        assert {response.error_code for response in (await send_request(api, twice)).responses} == {
            ErrorCode.invalid_request
        }


class TestListConfigResources:
    @pytest.fixture
    async def api(self, topics: Topics, membership: Membership, groups: DeclaredGroups) -> ListConfigResources:
        await topics.create("orders")
        await topics.create("bills")
        return ListConfigResources(topics, membership, groups)

    async def list(self, api: ListConfigResources, *kinds: int) -> list[tuple[int, str]]:
        response = await send_request(api, LIST.ListConfigResourcesRequest(resource_types=kinds))
        assert response.error_code is ErrorCode.none
        return [(resource.resource_type, resource.resource_name) for resource in response.config_resources]

    async def test_topics_and_nodes_have_settings(self, api: ListConfigResources) -> None:
        assert await self.list(api) == [(2, "bills"), (2, "orders"), (4, "5")]
        assert await self.list(api, 4) == [(4, "5")]
        assert await self.list(api, 8, 16, 32) == []

    async def test_an_unknown_type_is_refused(self, api: ListConfigResources) -> None:
        response = await send_request(api, LIST.ListConfigResourcesRequest(resource_types=(2, 3)))
        assert (response.error_code, response.config_resources) == (ErrorCode.unsupported_version, ())

    async def test_version_0_is_about_client_metrics(self, api: ListConfigResources) -> None:
        response = await send_request(api, load_request_class(74, 0)())
        assert (response.error_code, response.config_resources) == (ErrorCode.none, ())
