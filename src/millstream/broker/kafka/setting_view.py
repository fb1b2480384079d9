"""Settings as Kafka's tools show them: value, type, where the value comes from, and what it would be otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from millstream.broker.cluster.group_settings import DeclaredGroups
from millstream.broker.cluster.topics import Topics
from millstream.core.config import Config
from millstream.core.group import DECLARED
from millstream.core.setting import Setting, settings_of
from millstream.core.subscription import Subscription, SubscriptionSettings
from millstream.core.topic import Topic, TopicSettings

SOURCE_TOPIC: Final = 1
SOURCE_NODE: Final = 4
SOURCE_DEFAULT: Final = 5
SOURCE_GROUP: Final = 8

_TYPES: Final[dict[type, int]] = {bool: 1, str: 2, int: 5, float: 6}
_LIST_TYPE: Final = 7
_NODE_DEFAULT_PREFIX: Final = "default_"

_KAFKA_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "auto-create-topics": "auto.create.topics.enable",
        "connection-idle-ms": "connections.max.idle.ms",
        "connections-max": "max.connections",
        "data": "log.dirs",
        "default-partitions": "num.partitions",
        "default-replication": "default.replication.factor",
        "default-retention-ms": "log.retention.ms",
        "fetch-bytes-max": "fetch.max.bytes",
        "group-consumer-heartbeat-ms": "group.consumer.heartbeat.interval.ms",
        "group-consumer-session-ms": "group.consumer.session.timeout.ms",
        "group-initial-delay-ms": "group.initial.rebalance.delay.ms",
        "group-members-max": "group.max.size",
        "group-session-max-ms": "group.max.session.timeout.ms",
        "group-session-min-ms": "group.min.session.timeout.ms",
        "node-id": "node.id",
        "offsets-partitions": "offsets.topic.num.partitions",
        "producer-expiry-ms": "producer.id.expiration.ms",
        "rack": "broker.rack",
        "replica-fetch-bytes": "replica.fetch.response.max.bytes",
        "replica-fetch-wait-ms": "replica.fetch.wait.max.ms",
        "replica-lag-ms": "replica.lag.time.max.ms",
        "request-bytes-max": "socket.request.max.bytes",
        "retention-check-ms": "log.retention.check.interval.ms",
        "transaction-timeout-max-ms": "transaction.max.timeout.ms",
        "transactional-id-expiry-ms": "transactional.id.expiration.ms",
        "transactions-partitions": "transaction.state.log.num.partitions",
        "unclean-leader-election": "unclean.leader.election.enable",
    }
)
"""Settings of a node that Kafka's brokers have too, in the same unit, under another name."""

_KAFKA_TOPIC_DEFAULTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "cleanup.policy": "log.cleanup.policy",
        "compression.type": "compression.type",
        "max.message.bytes": "message.max.bytes",
        "message.timestamp.after.max.ms": "log.message.timestamp.after.max.ms",
        "message.timestamp.before.max.ms": "log.message.timestamp.before.max.ms",
        "message.timestamp.type": "log.message.timestamp.type",
        "min.insync.replicas": "min.insync.replicas",
        "retention.bytes": "log.retention.bytes",
        "segment.bytes": "log.segment.bytes",
        "segment.ms": "log.roll.ms",
    }
)
"""Settings of topics whose default is a setting of Kafka's brokers."""


@dataclass(frozen=True, slots=True)
class Synonym:
    """One of the places that a value can come from."""

    name: str
    value: str | None
    """None for a secret."""
    source: int


@dataclass(frozen=True, slots=True)
class SettingView:
    """One setting in effect. `synonyms` starts with the source of its value."""

    declared: Setting
    synonyms: tuple[Synonym, ...]
    read_only: bool

    @property
    def value(self) -> str | None:
        """The value that holds; None for a secret."""
        return self.synonyms[0].value

    @property
    def source(self) -> int:
        """Where the value that holds comes from."""
        return self.synonyms[0].source

    @property
    def type_id(self) -> int:
        """The type as Kafka numbers it."""
        return _LIST_TYPE if is_list(self.declared) else _TYPES[self.declared.kind]


def is_list(declared: Setting) -> bool:
    """Whether a setting takes several values at once, separated by commas."""
    return any("," in choice for choice in declared.choices)


def topic_settings(topics: Topics, topic: Topic) -> Iterator[SettingView]:
    """Yield every setting of a topic: its own value, the node's default, or the built-in default."""
    node_settings, in_force = topics.settings_of(dataclasses.replace(topic, overrides={})), topics.settings_of(topic)
    node_names = {attribute: declared.name for attribute, declared in settings_of(Config)}
    for attribute, declared in settings_of(TopicSettings):
        synonyms = []
        if declared.name in topic.overrides:
            synonyms.append(Synonym(declared.name, topic.overrides[declared.name], SOURCE_TOPIC))
        node_value = getattr(node_settings, attribute)
        if node_value != declared.default:
            node_name = node_names.get(_NODE_DEFAULT_PREFIX + attribute, declared.name)
            synonyms.append(Synonym(node_name, _text(node_value), SOURCE_NODE))
        synonyms.append(Synonym(declared.name, _text(declared.default), SOURCE_DEFAULT))
        value = _text(getattr(in_force, attribute))
        if declared.name not in topic.overrides and value != synonyms[0].value:
            # It follows from another setting of the topic.
            synonyms.insert(0, Synonym(declared.name, value, SOURCE_TOPIC))
        yield SettingView(declared, tuple(synonyms), read_only=False)


def node_settings(config: Config, topic_defaults: TopicSettings) -> Iterator[SettingView]:
    """Yield every setting of this node, with the names that Kafka's tools expect."""
    for attribute, declared in settings_of(Config):
        value = getattr(config, attribute)
        synonyms = [Synonym(declared.name, _text(declared.default), SOURCE_DEFAULT)]
        if value != declared.default:
            synonyms.insert(0, Synonym(declared.name, _text(value), SOURCE_NODE))
        yield SettingView(declared, tuple(synonyms), read_only=declared.needs_restart)
        if (kafka_name := _KAFKA_NAMES.get(declared.name)) is not None:
            yield SettingView(dataclasses.replace(declared, name=kafka_name), tuple(synonyms), read_only=True)
    for attribute, declared in settings_of(TopicSettings):
        if (kafka_name := _KAFKA_TOPIC_DEFAULTS.get(declared.name)) is not None:
            value = getattr(topic_defaults, attribute)
            source = SOURCE_DEFAULT if value == declared.default else SOURCE_NODE
            synonym = Synonym(kafka_name, _text(value), source)
            yield SettingView(dataclasses.replace(declared, name=kafka_name), (synonym,), read_only=True)


def how_to_change(name: str) -> str:
    """Explain where a node setting, by our name or Kafka's, is changed; a running node does not change it."""
    own = next((own for own, kafka_name in _KAFKA_NAMES.items() if name == kafka_name), name)
    if own in Config.declared():
        return f"{name}: set {own} in the node's flags, environment or millstream.toml, and restart it"
    for topic_name, kafka_name in _KAFKA_TOPIC_DEFAULTS.items():
        if name == kafka_name:
            return f"{name}: set {topic_name} on the topics; its default is built in"
    return f"{name}: a node has no such setting"


def consumer_group_settings(groups: DeclaredGroups, group_id: str) -> Iterator[SettingView]:
    """Yield every setting of a consumer group: its own value, the node's, or the built-in default."""
    own = groups.overrides_of(group_id)
    for name, declared in DECLARED.items():
        synonyms = [Synonym(name, _text(declared.default), SOURCE_DEFAULT)]
        if groups.defaults[name] != declared.default:
            synonyms.insert(0, Synonym(name, _text(groups.defaults[name]), SOURCE_NODE))
        if name in own:
            synonyms.insert(0, Synonym(name, own[name], SOURCE_GROUP))
        yield SettingView(declared, tuple(synonyms), read_only=False)


def share_group_settings(subscription: Subscription | None) -> Iterator[SettingView]:
    """Every setting of a share group, which is a subscription; the defaults when it is not declared."""
    overrides = {} if subscription is None else subscription.overrides
    for _, declared in settings_of(SubscriptionSettings):
        synonyms = [Synonym(declared.name, _text(declared.default), SOURCE_DEFAULT)]
        if declared.name in overrides:
            value = None if declared.is_secret else overrides[declared.name]
            synonyms.insert(0, Synonym(declared.name, value, SOURCE_GROUP))
        yield SettingView(declared, tuple(synonyms), read_only=False)


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
