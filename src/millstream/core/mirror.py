"""Mirrors: topics copied from another cluster, with their offsets, groups and queues."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Final, TypeVar
from uuid import UUID

from millstream.core.errors import InvalidMirror, InvalidRegex, InvalidTopicName
from millstream.core.regex import compile_regex
from millstream.core.setting import (
    HIDDEN,
    SealedValue,
    Settings,
    hide_secrets,
    parse_address,
    seal_problem,
    setting,
)
from millstream.core.topic import Topic, check_topic_name

NAME_LENGTH_MAX: Final = 200
ALL_TOPICS: Final = ".*"
SOURCE: Final = "from"
_CONNECTION: Final = (SOURCE, "tls", "tls.ca", "sasl.mechanism")
CREDENTIALS: Final = ("tls", "tls.ca", "user", "password", "token", "sasl.mechanism")
"""The settings that say how to connect to the source."""
EPOCH_STEP: Final = 1000
"""How far a failover raises the leader epoch: more than the old source can in elections before it follows."""

NAMED_MAX: Final = 5
"""How many topics, groups or rules a note names."""

V = TypeVar("V")
TopicOffsets = Mapping[str, Mapping[int, int]]
"""An offset of each partition, by topic."""


@dataclass(frozen=True, kw_only=True)
class MirrorSettings(Settings):
    holder: ClassVar = "a mirror"

    source: str = setting(SOURCE, "", "The brokers of the source, HOST:PORT, separated by commas.")
    topics: str = setting(
        "topics",
        ALL_TOPICS,
        "A regular expression (RE2): topics whose whole name matches it are mirrored. The dead letter topics "
        "of mirrored subscriptions are mirrored with them.",
    )
    exclude: str = setting("exclude", "", "A regular expression for names of topics that are not mirrored.")
    rename: str = setting(
        "rename",
        "",
        "A prefix for the names of the copies. A renamed copy has its own topic id and cannot be reversed.",
        length_max=100,
    )
    replication: int = setting(
        "replication",
        0,
        "The number of replicas of each copy, limited by the number of nodes; 0 uses that of the original or "
        "`default-replication` here, whichever is larger.",
        minimum=0,
        maximum=32,
    )
    rate: int = setting(
        "rate",
        0,
        "The maximum number of bytes per second that each node fetches from the source; 0 means no limit.",
        minimum=0,
    )
    groups: bool = setting("groups", True, "Whether the committed offsets of consumer groups are mirrored.")
    subscriptions: bool = setting(
        "subscriptions",
        True,
        "Whether subscriptions and the state of each of their messages are mirrored; the source has to be Millstream.",
    )
    returning: bool = setting(
        "returning",
        False,
        "Whether to mirror topics whose records originally came from this cluster, after the source has failed them "
        "over.",
    )
    deletions: bool = setting(
        "deletions",
        False,
        "Whether a topic or subscription that is deleted on the source is also deleted on this cluster.",
    )
    schemas: bool = setting(
        "schemas",
        False,
        "Whether the schema registry is mirrored; this cluster's has to be empty, and the source has to be Millstream.",
    )
    acls: bool = setting(
        "acls",
        False,
        "Whether access rules are mirrored (users and passwords are not); clients of this cluster must authenticate, "
        "and it must have no access rules.",
    )
    tls: bool = setting("tls", False, "Whether connections to the source use TLS.")
    tls_ca: str = setting(
        "tls.ca", "", "The certificate authority of the source in PEM; empty trusts those that the machine trusts."
    )
    user: str = setting("user", "", "The user to sign in as at the source.")
    password: str = setting(
        "password",
        "",
        "The user's password; it has to be set again when `from` names another address, and when `tls`, `tls.ca` or "
        "`sasl.mechanism` changes.",
        is_secret=True,
        sent_to=_CONNECTION,
    )
    token: str = setting(
        "token",
        "",
        "An API token to sign in with, instead of a user; it has to be set again when the password would have to.",
        is_secret=True,
        sent_to=_CONNECTION,
    )
    mechanism: str = setting(
        "sasl.mechanism",
        "SCRAM-SHA-512",
        "The SASL mechanism for the password.",
        choices=("SCRAM-SHA-512", "SCRAM-SHA-256", "PLAIN"),
    )

    def check(self) -> None:
        """Raise `InvalidMirror` or `InvalidSetting` for settings that cannot be used."""
        if not self.source:
            raise InvalidMirror("a mirror needs the address of its source: --from HOST:PORT")
        for part in self.source.split(","):
            parse_address(part.strip(), name="--from")
        try:
            compile_regex(self.topics)
            compile_regex(self.exclude)
        except InvalidRegex as error:
            raise InvalidMirror(str(error)) from None
        if self.rename:
            try:
                check_topic_name(self.rename, noun="prefix")
            except InvalidTopicName as error:
                raise InvalidMirror(str(error)) from None
        if self.user and not self.password:
            raise InvalidMirror(f"there is no password for user {self.user!r} at the source")

    @cached_property
    def _patterns(self) -> tuple[Any, Any]:
        return compile_regex(self.topics), compile_regex(self.exclude) if self.exclude else None

    def takes(self, name: str) -> bool:
        """Whether a topic of the source is mirrored because of its name."""
        return self._patterns[0].fullmatch(name) is not None and not self.excludes(name)

    def excludes(self, name: str) -> bool:
        """Whether a topic of the source must not be mirrored."""
        excluded = self._patterns[1]
        return excluded is not None and excluded.fullmatch(name) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Mirror:
    noun: ClassVar = "mirror"
    settings_class: ClassVar = MirrorSettings
    mirror_id: UUID
    name: str
    overrides: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The settings that were given, by name."""
    is_enabled: bool = True
    """Whether it should copy; a paused mirror keeps its copies."""
    created_ms: int = 0
    version: int = 0
    """How often it has changed since it was declared."""
    cuts: TopicOffsets = field(default_factory=dict)
    """The offset up to which each partition is certainly equal on both sides since the last failover."""
    aborted: Mapping[str, Mapping[int, Sequence[int]]] = field(default_factory=dict)
    """The start offsets of the transactions that the last failover aborted, by topic and partition."""
    dropped: Mapping[str, Mapping[int, Sequence[tuple[int, int]]]] = field(default_factory=dict)
    """For an old source that now follows: the ranges that it has dropped, by topic and partition."""
    verified: TopicOffsets = field(default_factory=dict)
    """The offset up to which each partition holds complete transactions; from there on, readers wait at a commit."""
    group_offsets: Mapping[str, TopicOffsets] = field(default_factory=dict)
    """The offsets of groups that transactions up to there have committed, and that may not be applied here yet."""
    gaps: TopicOffsets = field(default_factory=dict)
    """The offset from which copies may lack values that the source compacted because of records yet to arrive."""
    is_gated: bool = False
    """Whether readers wait at commits at all: once the source was seen to be Millstream."""
    cut_epochs: TopicOffsets = field(default_factory=dict)
    """The leader epochs in which a failover that has begun continues its copies; nothing is copied to them any more."""
    resumes: bool = False
    """Whether it copies its other topics again once that failover, of some topics only, has finished."""
    sealed: Mapping[str, SealedValue] = field(default_factory=dict, repr=False)
    """Secrets that this node cannot open, by setting; they are not among `overrides`."""

    @property
    def settings(self) -> MirrorSettings:
        return MirrorSettings.from_strings(self.overrides)

    @property
    def is_due(self) -> bool:
        """Whether nodes should be copying."""
        return self.is_enabled and not self.sealed

    @property
    def is_reversible(self) -> bool:
        """Whether its source can follow this cluster after a failover: it is Millstream, and topics have one name."""
        return self.is_gated and not self.overrides.get("rename")

    @property
    def idle_reason(self) -> str:
        """The reason why nothing is copied although it should be; empty if nothing prevents it."""
        return seal_problem(self.sealed)

    def shown_overrides(self) -> dict[str, str]:
        """Return the settings that were given, without secrets."""
        return {**hide_secrets(MirrorSettings, self.overrides), **dict.fromkeys(self.sealed, HIDDEN)}

    def verified_until(self, topic: str, partition: int) -> int | None:
        """Return the offset up to which a partition holds complete transactions; None if it is unknown."""
        return self.verified.get(topic, {}).get(partition, 0) if self.is_gated else None

    def gap_of(self, topic: str, partition: int) -> int | None:
        """Return the offset from which a copy may lack values of keys; None if it lacks none."""
        return self.gaps.get(topic, {}).get(partition)

    def source_name(self, topic: Topic) -> str:
        """Return the name that a copy's original has on the source."""
        return topic.name.removeprefix(self.overrides.get("rename", ""))

    def unselected(self, copies: Iterable[Topic], letters: Set[str]) -> list[str]:
        """Return the copies that would not be created with the present settings; `letters` are dead letter topics."""
        settings = self.settings
        return [
            copy.name
            for copy in copies
            if not settings.takes(name := self.source_name(copy)) and (settings.excludes(name) or name not in letters)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class SightingChange:
    """Schemas or access rules that were seen at the source for the first time, and those to delete here."""

    mirror_id: UUID
    owner: str
    """The node's claim on the sightings, which ends when another node claims them."""
    kind: str
    seen: frozenset[str] = frozenset()
    """Hashes of the items at the source."""
    forgotten: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.seen or self.forgotten)


def check_mirror(name: str, overrides: Mapping[str, str]) -> MirrorSettings:
    """Raise an error for a mirror that cannot be declared like this; return its settings."""
    try:
        check_topic_name(name, noun="mirror")
    except InvalidTopicName as refused:
        raise InvalidMirror(str(refused)) from None
    if len(name) > NAME_LENGTH_MAX:
        raise InvalidMirror(f"the name of a mirror has at most {NAME_LENGTH_MAX} characters, not {len(name)}")
    settings = MirrorSettings.from_strings(overrides)
    settings.check()
    return settings


class Problem(str):
    """A note that something which is to be mirrored is not; other notes only inform."""

    __slots__ = ()


def listed(names: Collection[str]) -> str:
    """Return names for a note, a limited number of them."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(sorted(names)[:NAMED_MAX]) + more


def pattern_of(name: str) -> str:
    """Return a regular expression that only this name of a topic matches."""
    # The only character of names that means something else in a regular expression.
    return name.replace(".", r"\.")


def merged_offsets(
    before: Mapping[str, Mapping[int, V]], after: Mapping[str, Mapping[int, V]]
) -> dict[str, dict[int, V]]:
    """Merge offsets by topic and partition; later ones replace earlier ones."""
    merged = {topic: dict(offsets) for topic, offsets in before.items()}
    for topic, offsets in after.items():
        known: dict[int, V] = merged.setdefault(topic, {})
        known.update(offsets)
    return merged
