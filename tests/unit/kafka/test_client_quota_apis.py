"""DescribeClientQuotas and AlterClientQuotas."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from millstream.broker.cluster.declared_state import ClientQuotas
from millstream.broker.kafka.apis.client_quotas import (
    ANY_NAME,
    EXACT,
    THE_DEFAULT,
    AlterClientQuotas,
    DescribeClientQuotas,
)
from millstream.core.quota import CONSUMER_BYTE_RATE, PRODUCER_BYTE_RATE
from millstream_testing.api_requests import send_in_version, send_request

ALTER: Any = importlib.import_module("kio.schema.alter_client_quotas.v1.request")
DESCRIBE: Any = importlib.import_module("kio.schema.describe_client_quotas.v1.request")

Entity = tuple[tuple[str, str | None], ...]
ONE: Entity = (("client-id", "one"),)
REST: Entity = (("client-id", None),)
BOTH: Entity = (("user", "ANONYMOUS"), ("client-id", "one"))
USER: Entity = (("user", None),)


def alteration(entity: Entity, **limits: float | None) -> Any:
    return ALTER.EntryData(
        entity=tuple(ALTER.EntityData(entity_type=kind, entity_name=name) for kind, name in entity),
        ops=tuple(
            ALTER.OpData(key=key, value=0.0 if value is None else value, remove=value is None)
            for key, value in limits.items()
        ),
    )


def alter(*entries: Any, validate_only: bool = False) -> Any:
    return ALTER.AlterClientQuotasRequest(entries=entries, validate_only=validate_only)


def describe(*components: tuple[str, int, str | None], strict: bool = False) -> Any:
    return DESCRIBE.DescribeClientQuotasRequest(
        components=tuple(
            DESCRIBE.ComponentData(entity_type=kind, match_type=how, match=match) for kind, how, match in components
        ),
        strict=strict,
    )


def shown(response: Any) -> dict[Entity, dict[str, float]]:
    assert response.error_code is ErrorCode.none
    return {
        tuple((part.entity_type, part.entity_name) for part in entry.entity): {
            value.key: value.value for value in entry.values
        }
        for entry in response.entries
    }


@pytest.mark.parametrize("version", [0, 1])
async def test_quotas_are_set_described_and_removed(quotas: ClientQuotas, version: int) -> None:
    change, show = AlterClientQuotas(quotas), DescribeClientQuotas(quotas)
    versioned = alter(
        alteration(ONE, producer_byte_rate=1000.0, consumer_byte_rate=2000.0), alteration(USER, consumer_byte_rate=5.0)
    )
    response = await send_in_version(change, version, versioned)
    assert [entry.error_code for entry in response.entries] == [ErrorCode.none, ErrorCode.none]
    assert [(part.entity_type, part.entity_name) for part in response.entries[0].entity] == list(ONE)
    assert shown(await send_in_version(show, version, describe())) == {
        ONE: {CONSUMER_BYTE_RATE: 2000.0, PRODUCER_BYTE_RATE: 1000.0},
        USER: {CONSUMER_BYTE_RATE: 5.0},
    }
    versioned = alter(alteration(ONE, producer_byte_rate=None), alteration(USER, consumer_byte_rate=None, no_such=None))
    await send_in_version(change, version, versioned)
    assert shown(await send_in_version(show, version, describe())) == {ONE: {CONSUMER_BYTE_RATE: 2000.0}}


async def test_a_user_may_have_a_quota_before_users_authenticate(quotas: ClientQuotas) -> None:
    """As in Kafka: quotas are declared before a cluster is secured, and can be removed if that is undone."""
    alice: Entity = (("user", "alice"), ("client-id", "one"))
    for rate, stored in ((1.0, {alice: {PRODUCER_BYTE_RATE: 1.0}}), (None, {})):
        (entry,) = (
            await send_request(AlterClientQuotas(quotas), alter(alteration(alice, producer_byte_rate=rate)))
        ).entries
        assert entry.error_code is ErrorCode.none
        assert shown(await send_request(DescribeClientQuotas(quotas), describe())) == stored


async def test_a_validated_change_is_not_stored(quotas: ClientQuotas) -> None:
    versioned = alter(alteration(ONE, producer_byte_rate=1.0), alteration(REST, rate=1.0), validate_only=True)
    response = await send_request(AlterClientQuotas(quotas), versioned)
    assert [entry.error_code for entry in response.entries] == [ErrorCode.none, ErrorCode.invalid_request]
    assert quotas.all() == {}


@pytest.mark.parametrize(
    ("entity", "limits", "says"),
    [
        ((), {"producer_byte_rate": 1.0}, "is empty"),
        ((("ip", "10.0.0.1"),), {"connection_creation_rate": 1.0}, "by address are not available"),
        ((("team", "x"),), {"producer_byte_rate": 1.0}, "'team' is unknown"),
        (ONE, {"request_percentage": 50.0}, "request_percentage is a quota of Kafka"),
        (ONE, {"controller_mutation_rate": 5.0}, "controller_mutation_rate is a quota of Kafka"),
        (ONE, {"producer_byte_rate": 0.0}, "greater than 0"),
        (ONE, {"producer_byte_rate": 0.5}, "whole number"),
        (ONE, {"no_such": 5.0}, "'no_such' is unknown"),
    ],
)
async def test_an_invalid_change_is_refused_and_the_others_are_applied(
    quotas: ClientQuotas, entity: Entity, limits: dict[str, float], says: str
) -> None:
    versioned = alter(alteration(entity, **limits), alteration(REST, producer_byte_rate=7.0))
    response = await send_request(AlterClientQuotas(quotas), versioned)
    assert [entry.error_code for entry in response.entries] == [ErrorCode.invalid_request, ErrorCode.none]
    assert says in response.entries[0].error_message
    assert len(quotas.all()) == 1


async def test_a_duplicate_change_is_refused(quotas: ClientQuotas) -> None:
    twice = alter(alteration(BOTH, producer_byte_rate=1.0), alteration(BOTH[::-1], producer_byte_rate=2.0))
    response = await send_request(AlterClientQuotas(quotas), twice)
    assert {entry.error_code for entry in response.entries} == {ErrorCode.invalid_request}
    entry = ALTER.EntryData(entity=alteration(ONE).entity, ops=alteration(ONE, producer_byte_rate=1.0).ops * 2)
    (responded,) = (await send_request(AlterClientQuotas(quotas), alter(entry))).entries
    assert responded.error_code is ErrorCode.invalid_request
    assert quotas.all() == {}


class TestFilters:
    @pytest.fixture
    async def api(self, quotas: ClientQuotas) -> DescribeClientQuotas:
        entities = [ONE, REST, BOTH, USER]
        response = await send_request(
            AlterClientQuotas(quotas), alter(*(alteration(entity, producer_byte_rate=1.0) for entity in entities))
        )
        assert {entry.error_code for entry in response.entries} == {ErrorCode.none}
        return DescribeClientQuotas(quotas)

    @pytest.mark.parametrize(
        ("components", "strict", "expected"),
        [
            ([], False, {ONE, REST, BOTH, USER}),
            ([], True, set()),
            ([("client-id", EXACT, "one")], False, {ONE, BOTH}),
            ([("client-id", EXACT, "one")], True, {ONE}),
            ([("client-id", THE_DEFAULT, None)], False, {REST}),
            ([("client-id", ANY_NAME, None)], False, {ONE, REST, BOTH}),
            ([("client-id", ANY_NAME, None)], True, {ONE, REST}),
            ([("client-id", ANY_NAME, None), ("user", EXACT, "ANONYMOUS")], True, {BOTH}),
            ([("user", EXACT, "nobody")], False, set()),
            ([("ip", ANY_NAME, None)], False, set()),
        ],
    )
    async def test_filters_select_quotas(
        self, api: DescribeClientQuotas, components: list[Any], strict: bool, expected: set[Entity]
    ) -> None:
        assert shown(await send_request(api, describe(*components, strict=strict))).keys() == expected

    @pytest.mark.parametrize(
        ("components", "code"),
        [
            ([("", EXACT, "x")], ErrorCode.invalid_request),
            ([("team", EXACT, "x")], ErrorCode.unsupported_version),
            ([("user", EXACT, "x"), ("user", ANY_NAME, None)], ErrorCode.invalid_request),
            ([("user", EXACT, None)], ErrorCode.invalid_request),
            ([("user", THE_DEFAULT, "x")], ErrorCode.invalid_request),
            ([("user", ANY_NAME, "x")], ErrorCode.invalid_request),
            ([("user", 9, None)], ErrorCode.invalid_request),
            ([("user", EXACT, "x"), ("ip", EXACT, "x")], ErrorCode.invalid_request),
        ],
    )
    async def test_an_invalid_filter_is_refused(
        self, api: DescribeClientQuotas, components: list[Any], code: ErrorCode
    ) -> None:
        response = await send_request(api, describe(*components))
        assert (response.error_code, response.entries) == (code, None)
        assert response.error_message
