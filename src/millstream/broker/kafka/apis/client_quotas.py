"""The APIs of client quotas.

Version notes: 1 is flexible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from kio.schema.alter_client_quotas.v1 import request as alter
from kio.schema.alter_client_quotas.v1 import response as altered
from kio.schema.alter_client_quotas.v1.request import AlterClientQuotasRequest
from kio.schema.alter_client_quotas.v1.response import AlterClientQuotasResponse
from kio.schema.describe_client_quotas.v1.request import ComponentData, DescribeClientQuotasRequest
from kio.schema.describe_client_quotas.v1.response import DescribeClientQuotasResponse, EntityData, EntryData, ValueData
from kio.schema.errors import ErrorCode
from kio.static.primitive import f64

from millstream.broker.cluster.declared_state import ClientQuotas
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code, error_message
from millstream.broker.security.audit import Change
from millstream.broker.security.changes import TIMED_OUT, UPDATE, Users, change_of
from millstream.core.errors import InvalidRequest, MillstreamError
from millstream.core.quota import CLIENT_ID, DEFAULT, ENTITY_TYPES, IP, USER, QuotaEntity, QuotaFilter

EXACT: Final = 0
THE_DEFAULT: Final = 1
ANY_NAME: Final = 2


class _Refused(Exception):
    """An invalid filter, with the error of the response."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


class DescribeClientQuotas(Api[DescribeClientQuotasRequest, DescribeClientQuotasResponse]):
    """DescribeClientQuotas (key 48), versions 0 and 1: returns the client quotas that match a filter.

    A filter names a type of entity (`user`, `client-id`) with an exact name, the default, or any name; `strict` leaves
    out entities that have other types too. An empty filter matches all quotas, and none if it is strict.
    """

    key = 48
    versions = (0, 1)
    changes = None

    def __init__(self, quotas: ClientQuotas) -> None:
        self._quotas = quotas

    async def handle(self, request: DescribeClientQuotasRequest, client: ClientInfo) -> DescribeClientQuotasResponse:
        try:
            filter_ = _parse_filter(request)
        except _Refused as refused:
            return DescribeClientQuotasResponse(
                throttle_time=NO_THROTTLE, error_code=refused.code, error_message=str(refused), entries=None
            )
        entries = tuple(
            EntryData(
                entity=tuple(EntityData(entity_type=kind, entity_name=name) for kind, name in entity.parts),
                values=tuple(ValueData(key=key, value=f64(value)) for key, value in sorted(limits.items())),
            )
            for entity, limits in self._quotas.all().items()
            if filter_.matches(entity)
        )
        return DescribeClientQuotasResponse(
            throttle_time=NO_THROTTLE, error_code=ErrorCode.none, error_message=None, entries=entries
        )


def _parse_filter(request: DescribeClientQuotasRequest) -> QuotaFilter:
    named: dict[str, str | None] = {}
    any_name: set[str] = set()
    for component in request.components:
        kind = component.entity_type
        if kind in named or kind in any_name:
            raise _Refused(ErrorCode.invalid_request, f"the type {kind} is named twice in the filter")
        _check_component(component)
        if component.match_type == ANY_NAME:
            any_name.add(kind)
        else:
            named[kind] = component.match if component.match_type == EXACT else DEFAULT
    types = named.keys() | any_name
    if IP in types and types & {USER, CLIENT_ID}:
        raise _Refused(ErrorCode.invalid_request, "quotas by address have no user and no client id")
    return QuotaFilter(named=named, any_name=frozenset(any_name), strict=request.strict)


def _check_component(component: ComponentData) -> None:
    kind = component.entity_type
    if not kind:
        raise _Refused(ErrorCode.invalid_request, "a type of the filter is empty")
    if kind not in ENTITY_TYPES:
        # As in Kafka: a newer version may know more types.
        raise _Refused(ErrorCode.unsupported_version, f"quotas are for users and client ids; {kind!r} is unknown")
    if component.match_type not in (EXACT, THE_DEFAULT, ANY_NAME):
        raise _Refused(ErrorCode.invalid_request, f"the match type {component.match_type} is unknown")
    if (component.match is not None) != (component.match_type == EXACT):
        raise _Refused(ErrorCode.invalid_request, f"{kind}: an exact match needs a name, any other match has none")


class AlterClientQuotas(Api[AlterClientQuotasRequest, AlterClientQuotasResponse]):
    """AlterClientQuotas (key 49), versions 0 and 1: sets and removes client quotas.

    An entity is a user, a client id or both, each by name or as the default (no name); a user need not exist yet.
    Limits are `producer_byte_rate` and `consumer_byte_rate`, in bytes per second; Kafka's others are refused by name.
    Each entity is changed as a whole or not at all, and the change holds from the next request of its clients on.
    """

    key = 49
    versions = (0, 1)

    def __init__(self, quotas: ClientQuotas) -> None:
        self._quotas = quotas

    async def handle(self, request: AlterClientQuotasRequest, client: ClientInfo) -> AlterClientQuotasResponse:
        named = Counter(frozenset(_parts(entry)) for entry in request.entries)
        entries = []
        for entry in request.entries:
            code, message = ErrorCode.none, None
            try:
                entity = QuotaEntity.of(_parts(entry))
                if named[frozenset(_parts(entry))] > 1:
                    raise InvalidRequest(f"{entity} is named more than once in the request")
                await self._quotas.alter(entity, _changes(entry), validate_only=request.validate_only)
            except MillstreamError as error:
                code, message = error_code(error), error_message(error)
            entity_data = tuple(altered.EntityData(entity_type=kind, entity_name=name) for kind, name in _parts(entry))
            entries.append(altered.EntryData(error_code=code, error_message=message, entity=entity_data))
        return AlterClientQuotasResponse(throttle_time=NO_THROTTLE, entries=tuple(entries))

    @staticmethod
    def changes(
        request: AlterClientQuotasRequest, response: AlterClientQuotasResponse, _users: Users
    ) -> Iterator[Change]:
        for entry, result in zip(request.entries, response.entries, strict=True):
            if result.error_code in (0, TIMED_OUT):
                name = ", ".join(
                    f"{component.entity_type} {component.entity_name or '(default)'}" for component in entry.entity
                )
                data = {operation.key: None if operation.remove else float(operation.value) for operation in entry.ops}
                yield change_of(result, UPDATE, "quota", name, data)


def _parts(entry: alter.EntryData) -> list[tuple[str, str | None]]:
    return [(part.entity_type, part.entity_name) for part in entry.entity]


def _changes(entry: alter.EntryData) -> dict[str, float | None]:
    changes: dict[str, float | None] = {}
    for operation in entry.ops:
        if operation.key in changes:
            raise InvalidRequest(f"{operation.key} is named more than once for one entity")
        changes[operation.key] = None if operation.remove else operation.value
    return changes
