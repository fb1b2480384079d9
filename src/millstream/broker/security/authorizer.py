"""The authorizer: a pure function over an immutable set of access rules.

It decides as Apache Kafka's StandardAuthorizer does: a rule that denies wins over every rule that allows, and what no
rule allows is denied. One thing differs on purpose: a wildcard, or a prefix that does not begin with two underscores,
allows nothing on internal topics.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from millstream.core.acl import (
    EVERYONE,
    WILDCARD,
    Acl,
    Operation,
    PatternType,
    Permission,
    ResourceType,
    canonical_host,
)
from millstream.core.topic import INTERNAL_TOPICS

INTERNAL_PREFIX: Final = "__"

_IMPLIED_BY: Final[Mapping[Operation, frozenset[Operation]]] = {
    Operation.DESCRIBE: frozenset(
        {Operation.DESCRIBE, Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER}
    ),
    Operation.DESCRIBE_CONFIGS: frozenset({Operation.DESCRIBE_CONFIGS, Operation.ALTER_CONFIGS}),
}
"""Rules that allow one of these operations allow the first one too; rules that deny imply nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """Whether something is allowed, and by what."""

    is_allowed: bool
    rule: Acl | None = None
    """The rule that decides; None for super users and where no rule matches."""

    def __bool__(self) -> bool:
        return self.is_allowed


_SUPER_USER: Final = Decision(is_allowed=True)
_NO_RULE: Final = Decision(is_allowed=False)


class AclSnapshot:
    """An immutable set of rules, indexed by resource."""

    __slots__ = ("_by_prefix", "_by_type", "_exact", "_lengths", "acls", "super_users")

    def __init__(self, acls: Iterable[Acl] = (), super_users: Iterable[str] = ()) -> None:
        self.acls = frozenset(acls)
        self.super_users = frozenset(super_users)
        exact: dict[tuple[ResourceType, str], list[Acl]] = defaultdict(list)
        by_prefix: dict[tuple[ResourceType, str], list[Acl]] = defaultdict(list)
        by_type: dict[ResourceType, list[Acl]] = defaultdict(list)
        for acl in sorted(self.acls):
            index = exact if acl.pattern is PatternType.LITERAL else by_prefix
            index[acl.resource_type, acl.resource_name].append(acl)
            by_type[acl.resource_type].append(acl)
        self._exact = dict(exact)
        self._by_prefix = dict(by_prefix)
        self._by_type = dict(by_type)
        lengths: dict[ResourceType, set[int]] = defaultdict(set)
        for kind, prefix in by_prefix:
            lengths[kind].add(len(prefix))
        self._lengths = {kind: sorted(sizes) for kind, sizes in lengths.items()}

    def decide(self, principal: str, host: str, operation: Operation, kind: ResourceType, name: str) -> Decision:
        """Decide whether a principal may do one operation on one resource."""
        if principal in self.super_users:
            return _SUPER_USER
        host = canonical_host(host)
        allowed: Decision = _NO_RULE
        for acl in self._rules_for(kind, name):
            if not _applies_to(acl, principal, host):
                continue
            if acl.permission is Permission.DENY:
                if acl.operation in (Operation.ALL, operation):
                    return Decision(is_allowed=False, rule=acl)
            elif not allowed and _allows(acl, operation, kind, name):
                allowed = Decision(is_allowed=True, rule=acl)
        return allowed

    def decide_any(self, principal: str, host: str, operation: Operation, kind: ResourceType) -> bool:
        """Decide whether a principal may do an operation on at least one resource of a type.

        Implied operations do not count here, as in Kafka.
        """
        if self.decide(principal, host, operation, kind, "hardcode"):
            return True
        host = canonical_host(host)
        allowed: list[Acl] = []
        denied: dict[PatternType, set[str]] = {PatternType.LITERAL: set(), PatternType.PREFIXED: set()}
        for acl in self._by_type.get(kind, ()):
            if not _applies_to(acl, principal, host) or acl.operation not in (operation, Operation.ALL):
                continue
            if acl.permission is Permission.ALLOW:
                allowed.append(acl)
            elif acl.pattern is PatternType.LITERAL and acl.resource_name == WILDCARD:
                return False
            else:
                denied[acl.pattern].add(acl.resource_name)
        return any(_is_open(acl, denied) for acl in allowed)

    def _rules_for(self, kind: ResourceType, name: str) -> Iterator[Acl]:
        """Yield every rule whose pattern covers a resource."""
        yield from self._exact.get((kind, name), ())
        # Names of groups may begin with an asterisk; in Kafka, the wildcard does not cover those.
        if not name.startswith(WILDCARD):
            yield from self._exact.get((kind, WILDCARD), ())
        for length in self._lengths.get(kind, ()):
            if length > len(name):
                break
            yield from self._by_prefix.get((kind, name[:length]), ())


def _applies_to(acl: Acl, principal: str, host: str) -> bool:
    return acl.principal in (principal, EVERYONE) and (acl.host == WILDCARD or canonical_host(acl.host) == host)


def _allows(acl: Acl, operation: Operation, kind: ResourceType, name: str) -> bool:
    if acl.operation is not Operation.ALL and acl.operation not in _IMPLIED_BY.get(operation, (operation,)):
        return False
    if kind is not ResourceType.TOPIC or name not in INTERNAL_TOPICS:
        return True
    return acl.resource_name.startswith(INTERNAL_PREFIX)


def _is_open(acl: Acl, denied: Mapping[PatternType, set[str]]) -> bool:
    """Whether an allowing rule covers something that no rule of a wider pattern denies."""
    name = acl.resource_name
    if acl.pattern is PatternType.LITERAL:
        if name == WILDCARD:
            return True
        if name in denied[PatternType.LITERAL]:
            return False
    return not any(name[:length] in denied[PatternType.PREFIXED] for length in range(1, len(name) + 1))
