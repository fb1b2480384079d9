"""Settings as Kafka's tools show them: value, type, source and synonyms."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from millstream.broker.cluster.broker_settings import ALL_NODES, TOPIC_DEFAULTS, BrokerSettings
from millstream.broker.cluster.broker_settings import DECLARED as DYNAMIC
from millstream.broker.cluster.declared_state import DeclaredGroups
from millstream.broker.cluster.membership import Node
from millstream.broker.cluster.topics import Topics
from millstream.core.config import Config, ListenerConfig
from millstream.core.group import DECLARED
from millstream.core.setting import Setting, settings_of, value_text, without_password
from millstream.core.subscription import Subscription, SubscriptionSettings
from millstream.core.topic import Topic, TopicSettings

SOURCE_TOPIC: Final = 1
SOURCE_BROKER: Final = 2
SOURCE_ALL_BROKERS: Final = 3
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
        "connections-per-address-max": "max.connections.per.ip",
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

_BROKER_NAMES: Final[Mapping[str, str]] = MappingProxyType({topic: name for name, topic in TOPIC_DEFAULTS.items()})
"""Settings of topics whose default is a setting of Kafka's brokers, and its name."""

_THROTTLE: Final = "replication is not throttled"
_CLEANER: Final = "compaction runs in one separate process and has only topic settings"
_MISSING: Final[Mapping[str, str]] = MappingProxyType(
    {
        "log.retention.hours": "set log.retention.ms",
        "log.retention.minutes": "set log.retention.ms",
        "log.roll.hours": "set log.roll.ms",
        "log.flush.interval.messages": "set flush on topics, or default-flush in the node's configuration",
        "log.flush.interval.ms": "set flush on topics, or default-flush in the node's configuration",
        "advertised.listeners": "set advertise in the node's configuration, and restart it",
        "listeners": "set kafka, or add [[listeners]], in the node's configuration, and restart it",
        "leader.replication.throttled.rate": _THROTTLE,
        "follower.replication.throttled.rate": _THROTTLE,
        "replica.alter.log.dirs.io.max.bytes.per.second": "a node has one data folder",
        "log.cleaner.backoff.ms": _CLEANER,
        "log.cleaner.dedupe.buffer.size": _CLEANER,
        "log.cleaner.io.buffer.size": _CLEANER,
        "log.cleaner.io.max.bytes.per.second": _CLEANER,
        "log.cleaner.threads": _CLEANER,
        "num.io.threads": "a node runs in one event loop",
        "num.network.threads": "a node runs in one event loop",
    }
)
"""Settings of Kafka's brokers that can be changed at run time there, and the alternative here."""


@dataclass(frozen=True, slots=True)
class Synonym:
    """One of the places that a value can come from."""

    name: str
    value: str | None
    """None for a secret."""
    source: int


@dataclass(frozen=True, slots=True)
class SettingView:
    """A setting in effect. `synonyms` starts with the source of its value."""

    declared: Setting
    synonyms: tuple[Synonym, ...]
    read_only: bool

    @property
    def value(self) -> str | None:
        """The effective value; None for a secret."""
        return self.synonyms[0].value

    @property
    def source(self) -> int:
        """The source of the effective value."""
        return self.synonyms[0].source

    @property
    def type_id(self) -> int:
        """The type as Kafka numbers it."""
        return _LIST_TYPE if is_list(self.declared) else _TYPES[self.declared.kind]


def is_list(declared: Setting) -> bool:
    """Whether a setting takes several values at once, separated by commas."""
    return any("," in choice for choice in declared.choices)


def topic_settings(topics: Topics, topic: Topic) -> Iterator[SettingView]:
    """Yield every setting of a topic: its own value, that of running nodes, the node's default, or the built-in one."""
    static, in_force = topics.static_defaults_for(topic.replication), topics.settings_of(topic)
    node_names = {attribute: declared.name for attribute, declared in settings_of(Config)}
    for attribute, declared in settings_of(TopicSettings):
        synonyms = []
        if declared.name in topic.overrides:
            synonyms.append(Synonym(declared.name, topic.overrides[declared.name], SOURCE_TOPIC))
        if declared.name in _BROKER_NAMES and not topic.is_internal:
            synonyms += _changed_while_running(topics.broker_settings, _BROKER_NAMES[declared.name])
        node_value = getattr(static, attribute)
        if node_value != declared.default:
            node_name = node_names.get(_NODE_DEFAULT_PREFIX + attribute, declared.name)
            synonyms.append(Synonym(node_name, value_text(node_value), SOURCE_NODE))
        synonyms.append(Synonym(declared.name, value_text(declared.default), SOURCE_DEFAULT))
        value = value_text(getattr(in_force, attribute))
        if declared.name not in topic.overrides and value != synonyms[0].value:
            # It follows from another setting of the topic.
            synonyms.insert(0, Synonym(declared.name, value, SOURCE_TOPIC))
        yield SettingView(declared, tuple(synonyms), read_only=False)


def _changed_while_running(settings: BrokerSettings, name: str) -> list[Synonym]:
    """Return the run-time settings of this node, and of all nodes."""
    values = ((settings.own.get(name), SOURCE_BROKER), (settings.of(ALL_NODES).get(name), SOURCE_ALL_BROKERS))
    return [Synonym(name, value, source) for value, source in values if value is not None]


def cluster_settings(settings: BrokerSettings) -> Iterator[SettingView]:
    """Yield the settings that were changed for all nodes at run time."""
    for name, value in sorted(settings.of(ALL_NODES).items()):
        if name in DYNAMIC:
            yield SettingView(DYNAMIC[name], (Synonym(name, value, SOURCE_ALL_BROKERS),), read_only=False)


def node_settings(
    config: Config, node: Node, topic_defaults: TopicSettings, settings: BrokerSettings
) -> Iterator[SettingView]:
    """Yield every setting of this node, with the names that Kafka's tools expect.

    `topic_defaults` are those of the node's configuration.
    """
    for attribute, declared in settings_of(Config):
        value = getattr(config, attribute)
        synonyms = [Synonym(declared.name, value_text(declared.default), SOURCE_DEFAULT)]
        if value != declared.default:
            synonyms.insert(0, Synonym(declared.name, _visible_value(declared, value), SOURCE_NODE))
        yield SettingView(declared, tuple(synonyms), read_only=True)
        if (kafka_name := _KAFKA_NAMES.get(declared.name)) is not None:
            synonyms = [*_changed_while_running(settings, kafka_name), *synonyms]
            named = dataclasses.replace(declared, name=kafka_name)
            yield SettingView(named, tuple(synonyms), read_only=kafka_name not in DYNAMIC)
    for attribute, declared in settings_of(TopicSettings):
        kafka_name = _BROKER_NAMES.get(declared.name)
        if kafka_name is not None and kafka_name not in _KAFKA_NAMES.values():
            synonyms = [Synonym(kafka_name, value_text(declared.default), SOURCE_DEFAULT)]
            if (value := getattr(topic_defaults, attribute)) != declared.default:
                synonyms.insert(0, Synonym(kafka_name, value_text(value), SOURCE_NODE))
            synonyms = [*_changed_while_running(settings, kafka_name), *synonyms]
            yield SettingView(dataclasses.replace(declared, name=kafka_name), tuple(synonyms), read_only=False)
    yield from _addresses(config, node)


def _addresses(config: Config, node: Node) -> Iterator[SettingView]:
    """Yield the listeners and advertised addresses of this node, as Kafka's brokers show them."""
    listeners, advertised = [], []
    for listener in config.all_listeners:
        address, protocol = listener.address, _security_protocol(listener)
        endpoint = node.endpoints.get(listener.name)
        if endpoint is not None and not listener.advertise:
            # The real port, if the configured one is 0.
            address = f"{address.rpartition(':')[0]}:{endpoint[1]}"
        listeners.append(f"{protocol}://{address}")
        advertised.append(f"{protocol}://{listener.advertise or address}")
    for name, value in (("listeners", ",".join(listeners)), ("advertised.listeners", ",".join(advertised))):
        declared = Setting(name=name, kind=str, default="", description=f"To change it: {_MISSING[name]}.")
        yield SettingView(declared, (Synonym(name, value, SOURCE_NODE),), read_only=True)


def _security_protocol(listener: ListenerConfig) -> str:
    transport = "SSL" if listener.tls_cert else "PLAINTEXT"
    return f"SASL_{transport}" if listener.requires_authentication else transport


def how_to_change(name: str) -> str:
    """Explain where to change a node setting that needs a restart, given by Millstream's name or Kafka's."""
    if (dynamic := _KAFKA_NAMES.get(name)) in DYNAMIC:
        return f"{name}: set {dynamic} instead, or {name} in the node's configuration, and restart it"
    own = next((own for own, kafka_name in _KAFKA_NAMES.items() if name == kafka_name), name)
    if own in Config.declared():
        return f"{name}: set {own} in the node's flags, environment or millstream.toml, and restart it"
    return f"{name}: {_MISSING.get(name, 'a node has no such setting')}"


def consumer_group_settings(groups: DeclaredGroups, group_id: str) -> Iterator[SettingView]:
    """Yield every setting of a consumer group: its own value, the node's, or the built-in default."""
    own = groups.overrides_of(group_id)
    for name, declared in DECLARED.items():
        synonyms = [Synonym(name, value_text(declared.default), SOURCE_DEFAULT)]
        if groups.defaults[name] != declared.default:
            synonyms.insert(0, Synonym(name, value_text(groups.defaults[name]), SOURCE_NODE))
        if name in own:
            synonyms.insert(0, Synonym(name, own[name], SOURCE_GROUP))
        yield SettingView(declared, tuple(synonyms), read_only=False)


def share_group_settings(subscription: Subscription | None) -> Iterator[SettingView]:
    """Yield every setting of a share group, which is a subscription; the defaults when it is not declared."""
    overrides = {} if subscription is None else subscription.shown_overrides()
    for _, declared in settings_of(SubscriptionSettings):
        synonyms = [Synonym(declared.name, value_text(declared.default), SOURCE_DEFAULT)]
        if declared.name in overrides:
            value = None if declared.is_secret else overrides[declared.name]
            synonyms.insert(0, Synonym(declared.name, value, SOURCE_GROUP))
        yield SettingView(declared, tuple(synonyms), read_only=False)


def _visible_value(declared: Setting, value: Any) -> str | None:
    """Return a value of a node's configuration; None for a secret."""
    if declared.is_secret:
        return None
    return without_password(value) if declared.is_url else value_text(value)
