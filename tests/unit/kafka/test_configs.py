"""DescribeConfigs and IncrementalAlterConfigs."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from millstream.broker.cluster.broker_settings import DECLARED as DYNAMIC
from millstream.broker.cluster.declared_state import DeclaredGroups
from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.apis.describe_configs import NODE_RESOURCE, TOPIC_RESOURCE, DescribeConfigs
from millstream.broker.kafka.apis.incremental_alter_configs import (
    APPEND,
    DELETE,
    SET,
    SUBTRACT,
    IncrementalAlterConfigs,
)
from millstream.core.config import Config, ListenerConfig
from millstream.core.topic import CONSUMER_OFFSETS, TopicSettings
from millstream_testing.api_requests import send_in_version, send_request

DESCRIBE: Any = importlib.import_module("kio.schema.describe_configs.v4.request")
ALTER: Any = importlib.import_module("kio.schema.incremental_alter_configs.v1.request")


class TestDescribeConfigs:
    @pytest.fixture
    async def api(
        self, topics: Topics, membership: Membership, config: Config, groups: DeclaredGroups
    ) -> DescribeConfigs:
        await topics.create("orders", overrides={"segment.ms": "1000"})
        return DescribeConfigs(topics, membership, config, groups)

    def describe(self, kind: int, name: str, keys: tuple[str, ...] | None = None, *, everything: bool = False) -> Any:
        resource = DESCRIBE.DescribeConfigsResource(resource_type=kind, resource_name=name, configuration_keys=keys)
        return DESCRIBE.DescribeConfigsRequest(
            resources=(resource,), include_synonyms=everything, include_documentation=everything
        )

    @pytest.mark.parametrize("version", range(1, 5))
    async def test_topics_report_the_source_of_their_settings(self, api: DescribeConfigs, version: int) -> None:
        (result,) = (
            await send_in_version(api, version, self.describe(TOPIC_RESOURCE, "orders", everything=True))
        ).results
        assert (result.error_code, result.resource_type, result.resource_name) == (ErrorCode.none, 2, "orders")
        configs = {config.name: config for config in result.configs}
        assert set(configs) == set(TopicSettings.declared())
        own, of_node, built_in = configs["segment.ms"], configs["retention.ms"], configs["flush"]
        assert (own.value, own.config_source) == ("1000", 1)
        assert (of_node.value, of_node.config_source) == ("3600000", 4)
        assert (built_in.value, built_in.config_source) == ("always", 5)
        assert [(synonym.name, synonym.value, synonym.source) for synonym in own.synonyms] == [
            ("segment.ms", "1000", 1),
            ("segment.ms", "3600000", 5),
        ]
        assert [(synonym.name, synonym.value, synonym.source) for synonym in of_node.synonyms] == [
            ("default-retention-ms", "3600000", 4),
            ("retention.ms", "604800000", 5),
        ]
        assert not any(config.read_only or config.is_sensitive for config in result.configs)
        if version >= 3:
            assert (own.config_type, built_in.config_type, configs["cleanup.policy"].config_type) == (5, 2, 7)
            assert own.documentation == TopicSettings.declared()["segment.ms"].description

    async def test_only_requested_settings_are_reported(self, api: DescribeConfigs) -> None:
        versioned = self.describe(TOPIC_RESOURCE, "orders", ("flush", "no.such"))
        (result,) = (await send_request(api, versioned)).results
        (flush,) = result.configs
        assert (flush.name, flush.synonyms, flush.documentation) == ("flush", (), None)
        (result,) = (await send_request(api, self.describe(TOPIC_RESOURCE, "orders", ()))).results
        assert len(result.configs) == len(TopicSettings.declared())

    async def test_the_node_reports_its_settings(self, api: DescribeConfigs) -> None:
        (result,) = (await send_request(api, self.describe(NODE_RESOURCE, "5", everything=True))).results
        configs = {config.name: config for config in result.configs}
        assert set(configs) > set(Config.declared())
        assert len(configs) == len(result.configs)
        assert {config.name for config in result.configs if not config.read_only} == set(DYNAMIC)
        # Also under the names that Kafka's tools look for.
        kafka = {"node.id": "5", "num.partitions": "2", "log.retention.ms": "3600000", "min.insync.replicas": "1"}
        assert {name: configs[name].value for name in kafka} == kafka
        assert configs["node.id"].synonyms[0].name == "node-id"
        assert (configs["node-id"].value, configs["node-id"].config_source) == ("5", 4)
        assert (configs["auto-create-topics"].value, configs["auto-create-topics"].config_type) == ("true", 1)
        assert configs["auto-create-topics"].config_source == 5
        assert configs["connections-max"].documentation

    async def test_the_node_reports_its_addresses_as_kafka_does(
        self, topics: Topics, membership: Membership, config: Config, groups: DeclaredGroups
    ) -> None:
        secured = ListenerConfig(
            name="tls", address="0.0.0.0:9094", advertise="node-5:9094", auth="required", tls_cert="c", tls_key="k"
        )
        api = DescribeConfigs(topics, membership, config.replace(kafka="127.0.0.1:9092", listeners=(secured,)), groups)
        names = ("advertised.listeners", "listeners")
        (result,) = (await send_request(api, self.describe(NODE_RESOURCE, "5", names))).results
        assert {config.name: (config.value, config.config_source, config.read_only) for config in result.configs} == {
            "listeners": ("PLAINTEXT://127.0.0.1:9092,SASL_SSL://0.0.0.0:9094", 4, True),
            "advertised.listeners": ("PLAINTEXT://127.0.0.1:9092,SASL_SSL://node-5:9094", 4, True),
        }

    async def test_the_node_reports_no_password(
        self, topics: Topics, membership: Membership, config: Config, groups: DeclaredGroups
    ) -> None:
        secret = config.replace(
            etcd="https://node:p4ss@word@etcd-1:2379,https://etcd-2:2379",
            catalog="postgresql://node:p4ss/word@db:5432/catalog?sslmode=verify-full&password=p4ssword",
            pipelines_spark="spark.hadoop.fs.s3a.secret.key=p4ssword",
        )
        api = DescribeConfigs(topics, membership, secret, groups)
        (result,) = (await send_request(api, self.describe(NODE_RESOURCE, "5", everything=True))).results
        configs = {config.name: config for config in result.configs}
        assert "p4ss" not in str(result) + repr(secret)
        assert configs["etcd"].value == "https://node:***@etcd-1:2379,https://etcd-2:2379"
        assert configs["catalog"].value == "postgresql://node:***@db:5432/catalog?sslmode=verify-full&password=***"
        assert (configs["pipelines-spark"].value, configs["pipelines-spark"].is_sensitive) == (None, True)

    async def test_dynamic_node_settings_are_reported_with_their_source(
        self, api: DescribeConfigs, topics: Topics
    ) -> None:
        (result,) = (await send_request(api, self.describe(NODE_RESOURCE, ""))).results
        assert (result.error_code, result.configs) == (ErrorCode.none, ())
        await topics.alter_broker("", {"log.retention.ms": "1111", "log.segment.bytes": "2097152"})
        await topics.alter_broker("5", {"log.retention.ms": "2222"})
        retention = [("log.retention.ms", "2222", 2), ("log.retention.ms", "1111", 3)]
        for kind, name, key, synonyms in (
            (NODE_RESOURCE, "", "log.retention.ms", retention[1:]),
            (
                NODE_RESOURCE,
                "5",
                "log.retention.ms",
                [*retention, ("default-retention-ms", "3600000", 4), ("default-retention-ms", "604800000", 5)],
            ),
            (
                TOPIC_RESOURCE,
                "orders",
                "retention.ms",
                [*retention, ("default-retention-ms", "3600000", 4), ("retention.ms", "604800000", 5)],
            ),
            (
                TOPIC_RESOURCE,
                "orders",
                "segment.bytes",
                [("log.segment.bytes", "2097152", 3), ("segment.bytes", "1073741824", 5)],
            ),
        ):
            (result,) = (await send_request(api, self.describe(kind, name, (key,), everything=True))).results
            (shown,) = result.configs
            assert [(synonym.name, synonym.value, synonym.source) for synonym in shown.synonyms] == synonyms
            assert (shown.value, shown.config_source, shown.read_only) == (synonyms[0][1], synonyms[0][2], False)

    @pytest.mark.parametrize(
        ("kind", "name", "code"),
        [
            (TOPIC_RESOURCE, "nope", ErrorCode.unknown_topic_or_partition),
            (TOPIC_RESOURCE, "bad name", ErrorCode.invalid_topic_exception),
            (NODE_RESOURCE, "6", ErrorCode.invalid_request),
            (NODE_RESOURCE, "x", ErrorCode.invalid_request),
            (8, "5", ErrorCode.invalid_request),
            (99, "x", ErrorCode.invalid_request),
        ],
    )
    async def test_resources_without_settings_are_reported(
        self, api: DescribeConfigs, kind: int, name: str, code: ErrorCode
    ) -> None:
        (result,) = (await send_request(api, self.describe(kind, name))).results
        assert (result.error_code, result.configs, result.resource_name) == (code, (), name)
        assert result.error_message


class TestIncrementalAlterConfigs:
    @pytest.fixture
    async def api(self, topics: Topics, groups: DeclaredGroups) -> IncrementalAlterConfigs:
        await topics.create("orders", overrides={"segment.ms": "1000"})
        return IncrementalAlterConfigs(topics, groups)

    def alter(
        self, *changes: tuple[str, int, str | None], kind: int = TOPIC_RESOURCE, name: str = "orders", **flags: bool
    ) -> Any:
        configs = tuple(
            ALTER.AlterableConfig(name=key, config_operation=operation, value=value)
            for key, operation, value in changes
        )
        resource = ALTER.AlterConfigsResource(resource_type=kind, resource_name=name, configs=configs)
        return ALTER.IncrementalAlterConfigsRequest(
            resources=(resource,), validate_only=flags.get("validate_only", False)
        )

    def overrides(self, topics: Topics) -> dict[str, str]:
        topic = topics.get("orders")
        assert topic is not None
        return dict(topic.overrides)

    @pytest.mark.parametrize("version", [0, 1])
    async def test_settings_are_set_and_unset(self, api: IncrementalAlterConfigs, topics: Topics, version: int) -> None:
        changes = (("retention.ms", SET, "77"), ("segment.ms", DELETE, None))
        (result,) = (await send_in_version(api, version, self.alter(*changes, validate_only=True))).responses
        assert result.error_code is ErrorCode.none
        assert self.overrides(topics) == {"segment.ms": "1000"}
        (result,) = (await send_in_version(api, version, self.alter(*changes))).responses
        assert (result.error_code, result.resource_name, result.resource_type) == (ErrorCode.none, "orders", 2)
        assert self.overrides(topics) == {"retention.ms": "77"}
        assert topics.partition("orders", 0).log.settings.retention_ms == 77

    @pytest.mark.parametrize(
        ("change", "code", "says"),
        [
            (("retention.ms", SET, "soon"), ErrorCode.invalid_config, "whole number"),
            (("retention.ms", SET, None), ErrorCode.invalid_request, "no value"),
            (("no.such", SET, "1"), ErrorCode.invalid_config, "known are"),
            (("retention.ms", APPEND, "1"), ErrorCode.invalid_config, "cannot be appended to"),
            (("retention.ms", SUBTRACT, "1"), ErrorCode.invalid_config, "cannot be subtracted from"),
            (("retention.ms", 9, "1"), ErrorCode.invalid_request, "operation 9"),
            (("cleanup.policy", APPEND, "shred"), ErrorCode.invalid_config, "cleanup.policy"),
            (("cleanup.policy", SUBTRACT, "delete"), ErrorCode.invalid_config, "cleanup.policy"),
        ],
    )
    async def test_invalid_changes_are_reported(
        self,
        api: IncrementalAlterConfigs,
        topics: Topics,
        change: tuple[str, int, str | None],
        code: ErrorCode,
        says: str,
    ) -> None:
        (result,) = (await send_request(api, self.alter(("flush", SET, "os"), change))).responses
        assert result.error_code is code
        assert says in result.error_message
        # The changes of a topic are applied all or none.
        assert self.overrides(topics) == {"segment.ms": "1000"}

    async def test_unsetting_an_unset_setting_succeeds(self, api: IncrementalAlterConfigs, topics: Topics) -> None:
        (result,) = (await send_request(api, self.alter(("no.such", DELETE, None), ("flush", DELETE, None)))).responses
        assert result.error_code is ErrorCode.none
        assert self.overrides(topics) == {"segment.ms": "1000"}

    async def test_appending_an_existing_list_item_succeeds(self, api: IncrementalAlterConfigs, topics: Topics) -> None:
        (result,) = (await send_request(api, self.alter(("cleanup.policy", APPEND, "delete")))).responses
        assert result.error_code is ErrorCode.none
        assert self.overrides(topics)["cleanup.policy"] == "delete"

    async def test_a_setting_or_topic_named_twice_is_refused(
        self, api: IncrementalAlterConfigs, topics: Topics
    ) -> None:
        twice = self.alter(("flush", SET, "os"), ("flush", SET, "always"))
        (result,) = (await send_request(api, twice)).responses
        assert result.error_code is ErrorCode.invalid_request
        resources = self.alter(("flush", SET, "os")).resources
        both = ALTER.IncrementalAlterConfigsRequest(resources=resources + resources, validate_only=False)
        assert {response.error_code for response in (await send_request(api, both)).responses} == {
            ErrorCode.invalid_request
        }
        assert self.overrides(topics) == {"segment.ms": "1000"}

    @pytest.mark.parametrize("name", ["5", ""])
    async def test_a_refused_node_setting_says_where_to_change_it(
        self, api: IncrementalAlterConfigs, topics: Topics, name: str
    ) -> None:
        names = (
            "log.retention.ms",
            "num.partitions",
            "default-retention-ms",
            "log.cleaner.threads",
            "listeners",
            "no.such",
        )
        versioned = self.alter(*((name, SET, "1") for name in names), kind=NODE_RESOURCE, name=name)
        (node,) = (await send_request(api, versioned)).responses
        assert node.error_code is ErrorCode.invalid_request
        for way in (
            "num.partitions: set default-partitions in the node's flags",
            "default-retention-ms: set log.retention.ms instead",
            "log.cleaner.threads: compaction runs in one separate process",
            "listeners: set kafka, or add [[listeners]]",
            "no.such: a node has no such setting",
        ):
            assert way in node.error_message
        assert topics.broker_settings.of(name) == {}

    @pytest.mark.parametrize("name", ["5", ""])
    async def test_unsetting_node_settings_of_kafka_succeeds(
        self, api: IncrementalAlterConfigs, topics: Topics, name: str
    ) -> None:
        # kafka-reassign-partitions --verify and --cancel do this to every node.
        throttles = ("leader.replication.throttled.rate", "follower.replication.throttled.rate", "no.such")
        changes = [(throttle, DELETE, "") for throttle in throttles]
        (unset,) = (await send_request(api, self.alter(*changes, kind=NODE_RESOURCE, name=name))).responses
        assert unset.error_code is ErrorCode.none
        changes.append(("log.segment.bytes", SET, "2000000"))
        (mixed,) = (await send_request(api, self.alter(*changes, kind=NODE_RESOURCE, name=name))).responses
        assert mixed.error_code is ErrorCode.none
        assert topics.broker_settings.of(name) == {"log.segment.bytes": "2000000"}

    async def test_topics_inherit_node_settings_unless_they_override_them(
        self, api: IncrementalAlterConfigs, topics: Topics
    ) -> None:
        await topics.create("own", overrides={"retention.ms": "5"})
        await topics.create(CONSUMER_OFFSETS, internal=True)

        def retention(name: str) -> int:
            return topics.partition(name, 0).log.settings.retention_ms

        for scope, operation, value, followed in (
            ("", SET, "70", 70),
            ("5", SET, "80", 80),
            ("", SET, "75", 80),
            ("5", DELETE, None, 75),
            ("", DELETE, None, 3_600_000),
        ):
            versioned = self.alter(("log.retention.ms", operation, value), kind=NODE_RESOURCE, name=scope)
            (response,) = (await send_request(api, versioned)).responses
            assert response.error_code is ErrorCode.none
            await topics.create(f"later-{followed}-{scope}")
            assert (retention("orders"), retention(f"later-{followed}-{scope}")) == (followed, followed)
            assert (retention("own"), retention(CONSUMER_OFFSETS)) == (5, 3_600_000)

    @pytest.mark.parametrize(
        ("scope", "change", "code", "says"),
        [
            ("", ("log.retention.ms", SET, "soon"), ErrorCode.invalid_request, "log.retention.ms"),
            ("", ("log.retention.ms", SET, None), ErrorCode.invalid_request, "no value"),
            ("", ("log.segment.bytes", SET, "1"), ErrorCode.invalid_request, "log.segment.bytes must be at least"),
            ("", ("max.connections", APPEND, "1"), ErrorCode.invalid_config, "cannot be appended to"),
            ("6", ("log.retention.ms", SET, "1"), ErrorCode.invalid_request, "the nodes are 5"),
            ("5", ("min.insync.replicas", SET, "1"), ErrorCode.invalid_request, "applies to the whole cluster"),
        ],
    )
    async def test_invalid_node_settings_are_reported(
        self,
        api: IncrementalAlterConfigs,
        topics: Topics,
        scope: str,
        change: tuple[str, int, str | None],
        code: ErrorCode,
        says: str,
    ) -> None:
        (response,) = (await send_request(api, self.alter(change, kind=NODE_RESOURCE, name=scope))).responses
        assert response.error_code is code
        assert says in response.error_message
        assert topics.broker_settings.of(scope) == {}

    async def test_a_cluster_wide_list_is_appended_to_and_validation_changes_nothing(
        self, api: IncrementalAlterConfigs, topics: Topics
    ) -> None:
        change = self.alter(("log.cleanup.policy", APPEND, "compact"), kind=NODE_RESOURCE, name="", validate_only=True)
        (response,) = (await send_request(api, change)).responses
        assert (response.error_code, topics.broker_settings.of("")) == (ErrorCode.none, {})
        await send_request(api, self.alter(("log.cleanup.policy", APPEND, "compact"), kind=NODE_RESOURCE, name=""))
        assert topics.partition("orders", 0).log.settings.cleanup_policy == "delete,compact"

    async def test_resources_that_cannot_be_altered_are_refused(self, api: IncrementalAlterConfigs) -> None:
        change = ("connections-max", SET, "5")
        (node,) = (await send_request(api, self.alter(change, kind=NODE_RESOURCE, name="5"))).responses
        (logger,) = (await send_request(api, self.alter(change, kind=8, name="5"))).responses
        (no_one,) = (await send_request(api, self.alter(("flush", SET, "os"), name="nope"))).responses
        assert node.error_code is logger.error_code is ErrorCode.invalid_request
        assert "connections-max: set max.connections instead" in node.error_message
        assert no_one.error_code is ErrorCode.unknown_topic_or_partition
        (misnamed,) = (await send_request(api, self.alter(("flush", SET, "os"), name="no/slash"))).responses
        assert misnamed.error_code is ErrorCode.invalid_topic_exception
