"""AlterClientQuotas (key 49), versions 0 and 1: sets and removes client quotas.

An entity is a user, a client id or both, each by name or as the default (no name); a user need not exist yet. Limits
are `producer_byte_rate` and `consumer_byte_rate`, in bytes per second; Kafka's others are refused by name. Each entity
is changed as a whole or not at all, and the change holds from the next request of its clients on.

Version notes: 1 is flexible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kio.schema.alter_client_quotas.v1 import request as asked
from kio.schema.alter_client_quotas.v1.request import AlterClientQuotasRequest
from kio.schema.alter_client_quotas.v1.response import AlterClientQuotasResponse, EntityData, EntryData
from kio.schema.errors import ErrorCode

from millstream.broker.cluster.declared_state import ClientQuotas
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code, error_message
from millstream.broker.security.audit import Change
from millstream.broker.security.changes import TIMED_OUT, UPDATE, Users, change_of
from millstream.core.errors import InvalidRequest, MillstreamError
from millstream.core.quota import QuotaEntity


class AlterClientQuotas(Api[AlterClientQuotasRequest, AlterClientQuotasResponse]):
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
            entity_data = tuple(EntityData(entity_type=kind, entity_name=name) for kind, name in _parts(entry))
            entries.append(EntryData(error_code=code, error_message=message, entity=entity_data))
        return AlterClientQuotasResponse(throttle_time=NO_THROTTLE, entries=tuple(entries))

    @staticmethod
    def changes(
        request: AlterClientQuotasRequest, response: AlterClientQuotasResponse, _users: Users
    ) -> Iterator[Change]:
        for entry, result in zip(request.entries, response.entries, strict=True):
            if result.error_code in (0, TIMED_OUT):
                name = ", ".join(f"{one.entity_type} {one.entity_name or '(default)'}" for one in entry.entity)
                data = {one.key: None if one.remove else float(one.value) for one in entry.ops}
                yield change_of(result, UPDATE, "quota", name, data)


def _parts(entry: asked.EntryData) -> list[tuple[str, str | None]]:
    return [(part.entity_type, part.entity_name) for part in entry.entity]


def _changes(entry: asked.EntryData) -> dict[str, float | None]:
    changes: dict[str, float | None] = {}
    for operation in entry.ops:
        if operation.key in changes:
            raise InvalidRequest(f"{operation.key} is named more than once for one entity")
        changes[operation.key] = None if operation.remove else operation.value
    return changes
