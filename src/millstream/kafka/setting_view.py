"""Settings as Kafka's tools show them: value, type, where the value comes from, and what it would be otherwise."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from millstream.cluster.group_settings import DeclaredGroups
from millstream.cluster.topics import Topics
from millstream.config import Config
from millstream.model.group import DECLARED
from millstream.model.setting import Setting, settings_of
from millstream.model.subscription import Subscription, SubscriptionSettings
from millstream.model.topic import Topic, TopicSettings

SOURCE_TOPIC: Final = 1
SOURCE_NODE: Final = 4
SOURCE_DEFAULT: Final = 5
SOURCE_GROUP: Final = 8

_TYPES: Final[dict[type, int]] = {bool: 1, str: 2, int: 5, float: 6}
_LIST_TYPE: Final = 7
_NODE_DEFAULT_PREFIX: Final = "default_"


@dataclass(frozen=True, slots=True)
class Synonym:
    """One of the places that a value can come from."""

    name: str
    value: str | None
    """None for a secret."""
    source: int


@dataclass(frozen=True, slots=True)
class SettingView:
    """One setting as it holds. `synonyms` begins with the place that its value comes from."""

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
    """Every setting of a topic: what its owner set, else the node's default, else the built-in one."""
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


def node_settings(config: Config) -> Iterator[SettingView]:
    """Every setting of this node."""
    for attribute, declared in settings_of(Config):
        value = getattr(config, attribute)
        synonyms = [Synonym(declared.name, _text(declared.default), SOURCE_DEFAULT)]
        if value != declared.default:
            synonyms.insert(0, Synonym(declared.name, _text(value), SOURCE_NODE))
        yield SettingView(declared, tuple(synonyms), read_only=declared.needs_restart)


def consumer_group_settings(groups: DeclaredGroups, group_id: str) -> Iterator[SettingView]:
    """Every setting of a consumer group: what was set for it, else the node's, else the built-in default."""
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
