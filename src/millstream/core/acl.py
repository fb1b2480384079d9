"""Access rules as Kafka defines them: who may, or may not, do which operation on which resources, from where."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from ipaddress import IPv6Address, ip_address
from types import MappingProxyType
from typing import Final, Self, TypeVar

from millstream.core.errors import InvalidRequest

WILDCARD: Final = "*"
EVERYONE: Final = "User:*"
CLUSTER_NAME: Final = "kafka-cluster"
NAME_CHARACTERS_MAX: Final = 1024
"""The longest name of a principal or resource, so that a rule fits into every catalog."""


class ResourceType(enum.IntEnum):
    """The type of resource that a rule applies to; the numbers are Kafka's."""

    ANY = 1
    TOPIC = 2
    GROUP = 3
    CLUSTER = 4
    TRANSACTIONAL_ID = 5
    DELEGATION_TOKEN = 6
    USER = 7


class PatternType(enum.IntEnum):
    """The way in which a rule names resources. `ANY` and `MATCH` exist in filters only."""

    ANY = 1
    MATCH = 2
    LITERAL = 3
    PREFIXED = 4


class Operation(enum.IntEnum):
    """An operation on a resource; the numbers are Kafka's."""

    ANY = 1
    ALL = 2
    READ = 3
    WRITE = 4
    CREATE = 5
    DELETE = 6
    ALTER = 7
    DESCRIBE = 8
    CLUSTER_ACTION = 9
    DESCRIBE_CONFIGS = 10
    ALTER_CONFIGS = 11
    IDEMPOTENT_WRITE = 12
    CREATE_TOKENS = 13
    DESCRIBE_TOKENS = 14
    TWO_PHASE_COMMIT = 15


class Permission(enum.IntEnum):
    """Whether a rule allows or denies; the numbers are Kafka's."""

    ANY = 1
    DENY = 2
    ALLOW = 3


OPERATIONS: Final = {
    ResourceType.TOPIC: (
        Operation.READ,
        Operation.WRITE,
        Operation.CREATE,
        Operation.DELETE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
    ),
    ResourceType.GROUP: (
        Operation.READ,
        Operation.DELETE,
        Operation.DESCRIBE,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
    ),
    ResourceType.CLUSTER: (
        Operation.CREATE,
        Operation.ALTER,
        Operation.DESCRIBE,
        Operation.CLUSTER_ACTION,
        Operation.DESCRIBE_CONFIGS,
        Operation.ALTER_CONFIGS,
        Operation.IDEMPOTENT_WRITE,
    ),
    ResourceType.TRANSACTIONAL_ID: (Operation.WRITE, Operation.DESCRIBE, Operation.TWO_PHASE_COMMIT),
    ResourceType.DELEGATION_TOKEN: (Operation.DESCRIBE,),
    ResourceType.USER: (Operation.CREATE_TOKENS, Operation.DESCRIBE_TOKENS),
}
"""The operations that each type of resource has."""

ROLES: Final[Mapping[str, Mapping[ResourceType, tuple[Operation, ...]]]] = MappingProxyType(
    {
        "reader": {
            ResourceType.TOPIC: (Operation.READ, Operation.DESCRIBE_CONFIGS),
            ResourceType.GROUP: (Operation.READ,),
        },
        "writer": {
            ResourceType.TOPIC: (Operation.WRITE, Operation.CREATE),
            ResourceType.TRANSACTIONAL_ID: (Operation.WRITE,),
        },
        "worker": {
            ResourceType.TOPIC: (Operation.READ,),
            ResourceType.GROUP: (Operation.READ, Operation.DESCRIBE_CONFIGS),
        },
        "operator": {
            ResourceType.TOPIC: (
                Operation.CREATE,
                Operation.DELETE,
                Operation.ALTER,
                Operation.ALTER_CONFIGS,
            ),
            ResourceType.GROUP: (Operation.DELETE, Operation.ALTER_CONFIGS),
            ResourceType.TRANSACTIONAL_ID: (Operation.DESCRIBE,),
            ResourceType.CLUSTER: (Operation.CREATE, Operation.DESCRIBE, Operation.ALTER_CONFIGS),
        },
    }
)
"""The operations of each role on each type of resource. Writing a topic, for example, implies describing it."""

EnumT = TypeVar("EnumT", bound=enum.IntEnum)


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Acl:
    resource_type: ResourceType
    resource_name: str
    pattern: PatternType = PatternType.LITERAL
    principal: str
    host: str = WILDCARD
    operation: Operation
    permission: Permission = Permission.ALLOW

    def check(self) -> Self:
        """Raise `InvalidRequest` if the rule can never apply."""
        if self.resource_type not in OPERATIONS:
            raise InvalidRequest("a rule needs a type of resource, such as topic or group")
        if self.pattern not in (PatternType.LITERAL, PatternType.PREFIXED):
            raise InvalidRequest("a rule names its resource literally or by a prefix")
        if not 0 < len(self.resource_name) <= NAME_CHARACTERS_MAX:
            raise InvalidRequest(f"the name of a resource has 1 to {NAME_CHARACTERS_MAX} characters")
        if self.resource_type is ResourceType.CLUSTER and self.resource_name not in (CLUSTER_NAME, WILDCARD):
            raise InvalidRequest(
                f"access rules can only be set for the cluster {CLUSTER_NAME!r}, not {self.resource_name!r}"
            )
        check_principal(self.principal)
        if len(self.principal) > NAME_CHARACTERS_MAX or not 0 < len(self.host) <= NAME_CHARACTERS_MAX:
            raise InvalidRequest(f"a principal and a host have 1 to {NAME_CHARACTERS_MAX} characters")
        if self.permission not in (Permission.ALLOW, Permission.DENY):
            raise InvalidRequest("a rule either allows or denies")
        if self.operation is not Operation.ALL and self.operation not in OPERATIONS[self.resource_type]:
            raise InvalidRequest(
                f"{name_of(self.operation)} is not an operation on a {name_of(self.resource_type)}; "
                f"those are {', '.join(map(name_of, OPERATIONS[self.resource_type]))}"
            )
        return self

    def __str__(self) -> str:
        star = "*" if self.pattern is PatternType.PREFIXED else ""
        where = "" if self.host == WILDCARD else f" from {self.host}"
        what = f"{name_of(self.resource_type)}:{self.resource_name}{star}"
        return f"{name_of(self.permission)} {self.principal} {name_of(self.operation)} {what}{where}"


@dataclass(frozen=True, slots=True, kw_only=True)
class AclFilter:
    """Selects the rules that a request concerns; None and `ANY` match everything."""

    resource_type: ResourceType = ResourceType.ANY
    resource_name: str | None = None
    pattern: PatternType = PatternType.ANY
    principal: str | None = None
    host: str | None = None
    operation: Operation = Operation.ANY
    permission: Permission = Permission.ANY

    @classmethod
    def of(cls, acl: Acl, permission: Permission) -> AclFilter:
        """Select the rule that is the same except for its permission."""
        return cls(**asdict(acl) | {"permission": permission})

    def matches(self, acl: Acl) -> bool:
        return (
            self.resource_type in (ResourceType.ANY, acl.resource_type)
            and self.operation in (Operation.ANY, acl.operation)
            and self.permission in (Permission.ANY, acl.permission)
            and self.principal in (None, acl.principal)
            and self.host in (None, acl.host)
            and self._matches_pattern(acl)
        )

    def _matches_pattern(self, acl: Acl) -> bool:
        if self.pattern not in (PatternType.ANY, PatternType.MATCH, acl.pattern):
            return False
        if self.resource_name is None or self.resource_name == acl.resource_name:
            return True
        if self.pattern is not PatternType.MATCH:
            return False
        if acl.pattern is PatternType.PREFIXED:
            return self.resource_name.startswith(acl.resource_name)
        return acl.resource_name == WILDCARD


def role_operations(role: str, kind: ResourceType) -> tuple[Operation, ...]:
    """Return the operations of a role on a type of resource; raise `InvalidRequest` if it has none."""
    if role not in ROLES:
        raise InvalidRequest(f"there is no role {role!r}; the roles are {', '.join(ROLES)}")
    if kind not in ROLES[role]:
        known = ", ".join(map(name_of, ROLES[role]))
        raise InvalidRequest(f"a {role} has no rights on a {name_of(kind)}, only on resources of the type {known}")
    return ROLES[role][kind]


def check_principal(principal: str) -> None:
    """Raise `InvalidRequest` unless the text is a principal, such as `User:alice`."""
    kind, colon, name = principal.partition(":")
    if not (kind and colon and name):
        raise InvalidRequest(f"a principal must be written as in User:alice, not {principal!r}")


def name_of(value: enum.IntEnum) -> str:
    """Return an operation, a type or a permission as users write it: `describe_configs`."""
    return value.name.lower()


def parse_name(kind: type[EnumT], text: str) -> EnumT:
    """Parse what `name_of` returns; dashes and capitals are accepted too."""
    try:
        return kind[text.strip().upper().replace("-", "_")]
    except KeyError:
        known = ", ".join(map(name_of, kind))
        raise InvalidRequest(f"{text!r} is not one of {known}") from None


def canonical_host(text: str) -> str:
    """Return one spelling for each address, since IPv6 has many; anything else stays as it is.

    An IPv4 client of a listener on an IPv6 address appears with a mapped address, and is the same host.
    """
    try:
        address = ip_address(text)
    except ValueError:
        return text
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return str(mapped or address)


def parse_rules(
    permission: Permission, principal: str, operations: str, resource: str, prefixed: bool, host: str
) -> list[Acl]:
    """Parse rules as users write them, one for each operation, or raise `InvalidRequest`."""
    kind, name = parse_resource(resource)
    return [
        Acl(
            resource_type=kind,
            resource_name=name,
            pattern=PatternType.PREFIXED if prefixed and kind is not ResourceType.CLUSTER else PatternType.LITERAL,
            principal=principal,
            host=host,
            operation=parse_name(Operation, operation),
            permission=permission,
        ).check()
        for operation in operations.split(",")
    ]


def check_names(rules: Iterable[Acl]) -> None:
    """Raise `InvalidRequest` for a new rule whose name looks like a pattern: only `*` alone is one."""
    for rule in rules:
        name = rule.resource_name
        if name != WILDCARD and name.endswith(WILDCARD):
            what = f"{name_of(rule.resource_type)}:{name.rstrip(WILDCARD)}"
            raise InvalidRequest(f"{name!r} would be taken literally; use --prefixed {what}")


def parse_resource(text: str) -> tuple[ResourceType, str]:
    """Parse TYPE:NAME, or raise `InvalidRequest`."""
    kind_text, colon, name = text.partition(":")
    if not colon and kind_text.lower() != "cluster":
        raise InvalidRequest(f"a resource must be written as TYPE:NAME, as in topic:orders, not {text!r}")
    kind = parse_name(ResourceType, "group" if kind_text == "subscription" else kind_text)
    if kind is ResourceType.CLUSTER:
        return kind, name or CLUSTER_NAME
    if not name:
        raise InvalidRequest(f"a resource must be written as TYPE:NAME, as in topic:orders, not {text!r}")
    return kind, name
