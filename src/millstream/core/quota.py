"""Client quotas: entities, limits, and which of several quotas applies to a client.

The names are Kafka's. A client's user is the name of its principal; without authentication, all are ANONYMOUS.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from millstream.core.acl import NAME_CHARACTERS_MAX
from millstream.core.errors import InvalidRequest

USER = "user"
CLIENT_ID = "client-id"
IP = "ip"
ENTITY_TYPES = (USER, CLIENT_ID, IP)
ANONYMOUS = "ANONYMOUS"
DEFAULT = None
"""Stands for every client without its own quota."""

PRODUCER_BYTE_RATE = "producer_byte_rate"
CONSUMER_BYTE_RATE = "consumer_byte_rate"
LIMITS = (PRODUCER_BYTE_RATE, CONSUMER_BYTE_RATE)

MISSING: Mapping[str, str] = MappingProxyType(
    {
        "request_percentage": "all clients share one event loop, so there are no threads to divide; limit bytes",
        "controller_mutation_rate": "topic changes are not limited by client",
        "connection_creation_rate": "the rate of new connections is not limited; `connections-per-address-max` and "
        "`connections-per-principal-max` limit how many are open",
    }
)
"""Kafka's limits that Millstream does not have, each with the reason."""

NAME_LENGTH_MAX = NAME_CHARACTERS_MAX
"""Names in certificates are long."""
RATE_MAX = float(2**63 - 1)


@dataclass(frozen=True, slots=True)
class QuotaEntity:
    """The subject of a quota: a user, a client id or both, by name or as the default, ordered by type."""

    parts: tuple[tuple[str, str | None], ...]

    @classmethod
    def of(cls, named_parts: Iterable[tuple[str, str | None]]) -> QuotaEntity:
        """Parse the entity of a request; raise `InvalidRequest` for one that cannot have a quota."""
        parts: dict[str, str | None] = {}
        for kind, name in named_parts:
            if kind in parts:
                raise InvalidRequest(f"the quota's entity names its {kind} twice")
            _check_part(kind, name)
            parts[kind] = name
        if not parts:
            raise InvalidRequest("the quota's entity is empty; name a user, a client id or both")
        return cls(tuple((kind, parts[kind]) for kind in ENTITY_TYPES if kind in parts))

    @classmethod
    def parse(cls, texts: Iterable[str]) -> QuotaEntity:
        """Read TYPE:NAME, or TYPE for the default; raise `InvalidRequest` for anything else."""
        parts: list[tuple[str, str | None]] = []
        for text in texts:
            kind, colon, name = text.partition(":")
            if kind not in (USER, CLIENT_ID):
                raise InvalidRequest(f"quotas are for user:NAME and client-id:ID, not {text!r}")
            parts.append((kind, name if colon else DEFAULT))
        return cls.of(parts)

    @property
    def words(self) -> list[str]:
        """Return the text that `parse` accepts."""
        return [kind if name is DEFAULT else f"{kind}:{name}" for kind, name in self.parts]

    def __str__(self) -> str:
        return ", ".join(f"{kind} {'(default)' if name is DEFAULT else name}" for kind, name in self.parts)


def _check_part(kind: str, name: str | None) -> None:
    if kind == IP:
        raise InvalidRequest(f"quotas by address are not available: {MISSING['connection_creation_rate']}")
    if kind not in ENTITY_TYPES:
        raise InvalidRequest(f"quotas are for users and client ids; {kind!r} is unknown")
    if name is DEFAULT:
        return
    if not 0 < len(name) <= NAME_LENGTH_MAX:
        raise InvalidRequest(f"the {kind} of a quota has 1 to {NAME_LENGTH_MAX} characters, not {len(name)}")


def check_limit(key: str, value: float) -> None:
    """Raise `InvalidRequest` for an unknown limit or an invalid value."""
    if key in MISSING:
        raise InvalidRequest(f"{key} is a quota of Kafka that Millstream does not have: {MISSING[key]}")
    if key not in LIMITS:
        raise InvalidRequest(f"the quota {key!r} is unknown; the quotas are {' and '.join(LIMITS)}")
    if not math.isfinite(value) or not 0 < value <= RATE_MAX:
        raise InvalidRequest(f"{key} must be greater than 0, not {value:g}")
    if value != int(value):
        raise InvalidRequest(f"{key} must be a whole number of bytes per second, not {value:g}")


class Scope(NamedTuple):
    """The clients that share the rate of a quota: those of a user, of a client id, or of both; None means any."""

    user: str | None
    client_id: str | None


def candidates(user: str, client_id: str) -> Iterator[tuple[QuotaEntity, Scope]]:
    """Yield the entities whose quota may apply to a client, the most specific first, and who shares it.

    A quota with a default name covers each user or client id alone.
    """
    for named in (user, DEFAULT):
        yield QuotaEntity(((USER, named), (CLIENT_ID, client_id))), Scope(user, client_id)
        yield QuotaEntity(((USER, named), (CLIENT_ID, DEFAULT))), Scope(user, client_id)
        yield QuotaEntity(((USER, named),)), Scope(user, None)
    yield QuotaEntity(((CLIENT_ID, client_id),)), Scope(None, client_id)
    yield QuotaEntity(((CLIENT_ID, DEFAULT),)), Scope(None, client_id)


class QuotaRate(NamedTuple):
    """The rate that a client may use."""

    rate: float
    scope: Scope


@dataclass(frozen=True, slots=True, kw_only=True)
class QuotaFilter:
    """Selects quotas: entity types with a required name, and types that may have any name."""

    named: Mapping[str, str | None]
    any_name: frozenset[str]
    strict: bool
    """Whether an entity may have no types other than those selected."""

    def matches(self, entity: QuotaEntity) -> bool:
        parts = dict(entity.parts)
        if self.strict and parts.keys() != self.named.keys() | self.any_name:
            return False
        return self.any_name <= parts.keys() and all(
            kind in parts and parts[kind] == name for kind, name in self.named.items()
        )
