"""Settings of nodes that are changed while they run: declared in the catalog, published like topics, held in memory.

A scope is the id of a node, or `ALL_NODES`. The settings of a node take precedence over those of all nodes, and both
over the node's own configuration. Most of them are defaults of topic settings.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from millstream.core.config import Config
from millstream.core.errors import InvalidRequest, InvalidSetting
from millstream.core.setting import Setting
from millstream.core.topic import TopicSettings

_logger = logging.getLogger(__name__)

ALL_NODES: Final = ""

TOPIC_DEFAULTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "compression.type": "compression.type",
        "log.cleanup.policy": "cleanup.policy",
        "log.message.timestamp.after.max.ms": "message.timestamp.after.max.ms",
        "log.message.timestamp.before.max.ms": "message.timestamp.before.max.ms",
        "log.message.timestamp.type": "message.timestamp.type",
        "log.retention.bytes": "retention.bytes",
        "log.retention.ms": "retention.ms",
        "log.roll.ms": "segment.ms",
        "log.segment.bytes": "segment.bytes",
        "message.max.bytes": "max.message.bytes",
        "min.insync.replicas": "min.insync.replicas",
        "unclean.leader.election.enable": "unclean.leader.election.enable",
    }
)
"""Settings of Kafka's brokers that are the default of a topic's setting."""

CONNECTIONS_MAX: Final = "max.connections"

CONNECTIONS_PER_ADDRESS_MAX: Final = "max.connections.per.ip"

_OF_NODES: Final = {
    CONNECTIONS_MAX: "connections-max",
    CONNECTIONS_PER_ADDRESS_MAX: "connections-per-address-max",
}
"""Settings of nodes that can be changed while they run, by Kafka's name."""

_OF_THE_CLUSTER: Final = frozenset({"min.insync.replicas", "unclean.leader.election.enable"})
"""The controller uses these, whichever node leads."""


def _declared() -> dict[str, Setting]:
    topics = TopicSettings.declared()
    settings = {name: dataclasses.replace(topics[of_topic], name=name) for name, of_topic in TOPIC_DEFAULTS.items()}
    nodes = Config.declared()
    settings.update({name: dataclasses.replace(nodes[of_node][1], name=name) for name, of_node in _OF_NODES.items()})
    return settings


DECLARED: Final[Mapping[str, Setting]] = MappingProxyType(_declared())
"""Every setting that can be changed while a node runs, by Kafka's name."""


def check_changes(scope: str, changes: Mapping[str, str | None]) -> None:
    """Raise for an invalid value, or a setting that one node alone cannot have; all names are in `DECLARED`."""
    for name, text in changes.items():
        if scope != ALL_NODES and name in _OF_THE_CLUSTER:
            raise InvalidRequest(
                f"{name} applies to the whole cluster, because the controller uses it; set it as the default of all "
                "nodes (kafka-configs.sh --entity-default), or on topics"
            )
        if text is not None:
            DECLARED[name].parse(text)


class BrokerSettings:
    """The settings of all nodes and of each of them, as this node last read them."""

    def __init__(self, config: Config) -> None:
        self._me = str(config.node_id)
        self._static = {
            CONNECTIONS_MAX: config.connections_max,
            CONNECTIONS_PER_ADDRESS_MAX: config.connections_per_address_max,
        }
        self._by_scope: Mapping[str, Mapping[str, str]] = {}
        self._listeners: list[Callable[[], None]] = []

    def of(self, scope: str) -> Mapping[str, str]:
        return self._by_scope.get(scope, {})

    @property
    def own(self) -> Mapping[str, str]:
        return self.of(self._me)

    @property
    def topic_defaults(self) -> dict[str, str]:
        """Return the defaults of topic settings on this node, by their names."""
        defaults: dict[str, str] = {}
        for name, text in self._effective.items():
            if name in TOPIC_DEFAULTS:
                defaults[TOPIC_DEFAULTS[name]] = text
        return defaults

    @property
    def connections_max(self) -> int:
        return self._number(CONNECTIONS_MAX)

    @property
    def connections_per_address_max(self) -> int:
        return self._number(CONNECTIONS_PER_ADDRESS_MAX)

    def _number(self, name: str) -> int:
        text = self._effective.get(name)
        return self._static[name] if text is None else int(text)

    @property
    def _effective(self) -> dict[str, str]:
        effective: dict[str, str] = {}
        for name, text in {**self.of(ALL_NODES), **self.own}.items():
            try:
                DECLARED[name].parse(text)
            except (KeyError, InvalidSetting):
                # Written by a newer version.
                _logger.error("a node setting cannot be read and is ignored", extra={"setting": name})
            else:
                effective[name] = text
        return effective

    def apply(self, by_scope: Mapping[str, Mapping[str, str]]) -> None:
        """Apply all current settings, and notify the listeners if they changed."""
        before, self._by_scope = self._by_scope, {scope: dict(settings) for scope, settings in by_scope.items()}
        if before != self._by_scope:
            for listener in self._listeners:
                listener()

    def on_change(self, listener: Callable[[], None]) -> None:
        self._listeners.append(listener)
