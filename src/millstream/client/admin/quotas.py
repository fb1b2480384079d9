"""Client quotas, over the requests that Kafka has for them."""

from __future__ import annotations

from collections.abc import Mapping

from millstream.core.quota import QuotaEntity
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import error_from_code


async def list_quotas(client: Client) -> Mapping[QuotaEntity, Mapping[str, float]]:
    """Return every entity that has quotas, with its limits."""
    from kio.schema.describe_client_quotas.v1.request import DescribeClientQuotasRequest

    answer = await client.send(None, DescribeClientQuotasRequest(components=(), strict=False))
    if answer.error_code:
        raise error_from_code(answer.error_code, answer.error_message, about="list quotas")
    return {
        QuotaEntity.of((part.entity_type, part.entity_name) for part in entry.entity): {
            one.key: float(one.value) for one in entry.values
        }
        for entry in answer.entries or ()
    }


async def alter_quota(client: Client, entity: QuotaEntity, changes: Mapping[str, float | None]) -> None:
    """Set the limits of an entity; None removes a limit."""
    from kio.schema.alter_client_quotas.v1 import request
    from kio.static.primitive import f64

    entry = request.EntryData(
        entity=tuple(request.EntityData(entity_type=kind, entity_name=name) for kind, name in entity.parts),
        ops=tuple(
            request.OpData(key=key, value=f64(value or 0.0), remove=value is None) for key, value in changes.items()
        ),
    )
    (result,) = (
        await client.send(None, request.AlterClientQuotasRequest(entries=(entry,), validate_only=False))
    ).entries
    if result.error_code:
        raise error_from_code(result.error_code, result.error_message, about=f"the quota of {entity}")
