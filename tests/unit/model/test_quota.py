"""The entities of quotas, and which of several quotas applies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.core.errors import InvalidRequest
from millstream.core.quota import (
    ANONYMOUS,
    CLIENT_ID,
    CONSUMER_BYTE_RATE,
    DEFAULT,
    IP,
    MISSING,
    PRODUCER_BYTE_RATE,
    USER,
    QuotaEntity,
    QuotaFilter,
    candidates,
    check_limit,
)


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([], "is empty"),
        ([(CLIENT_ID, "a"), (CLIENT_ID, "b")], "twice"),
        ([("team", "a")], "'team' is unknown"),
        ([(IP, "127.0.0.1")], "by address are not available"),
        ([(CLIENT_ID, "")], "1 to 1024 characters"),
        ([(USER, "x" * 1025)], "1 to 1024 characters"),
    ],
)
def test_an_invalid_entity_is_reported(parts: list[tuple[str, str | None]], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        QuotaEntity.of(parts)


def test_the_order_of_the_parts_does_not_matter() -> None:
    entity = QuotaEntity.of([(USER, ANONYMOUS), (CLIENT_ID, DEFAULT)])
    other = QuotaEntity.of([(CLIENT_ID, DEFAULT), (USER, ANONYMOUS)])
    assert entity == other
    assert str(entity) == "user ANONYMOUS, client-id (default)"


@pytest.mark.parametrize("key", sorted(MISSING))
def test_quotas_that_only_kafka_has_are_refused_by_name(key: str) -> None:
    with pytest.raises(InvalidRequest, match=f"{key} is a quota of Kafka that Millstream does not have: \\w+"):
        check_limit(key, 5.0)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf"), 1e30, 1.5])
def test_invalid_values_are_refused(value: float) -> None:
    with pytest.raises(InvalidRequest, match="producer_byte_rate must be"):
        check_limit(PRODUCER_BYTE_RATE, value)


def test_unknown_limits_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="producer_byte_rate and consumer_byte_rate"):
        check_limit("bytes", 1.0)
    check_limit(CONSUMER_BYTE_RATE, 1.0)


def test_the_most_specific_quota_comes_first_and_names_who_shares_it() -> None:
    assert [(str(entity), scope) for entity, scope in candidates("alice", "x")] == [
        ("user alice, client-id x", ("alice", "x")),
        ("user alice, client-id (default)", ("alice", "x")),
        ("user alice", ("alice", None)),
        ("user (default), client-id x", ("alice", "x")),
        ("user (default), client-id (default)", ("alice", "x")),
        ("user (default)", ("alice", None)),
        ("client-id x", (None, "x")),
        ("client-id (default)", (None, "x")),
    ]


names = st.one_of(st.none(), st.sampled_from(["a", "b"]))
entities = st.dictionaries(st.sampled_from([USER, CLIENT_ID]), names, min_size=1).map(
    lambda parts: QuotaEntity(tuple(sorted(parts.items(), key=lambda part: part[0] != USER)))
)


@given(entities, st.dictionaries(st.sampled_from([USER, CLIENT_ID]), names), st.booleans())
def test_a_filter_by_name_matches_those_names(entity: QuotaEntity, named: dict[str, str], strict: bool) -> None:
    parts = dict(entity.parts)
    expected = named.items() <= parts.items() and (not strict or named.keys() == parts.keys())
    assert QuotaFilter(named=named, any_name=frozenset(), strict=strict).matches(entity) == expected


def test_a_filter_by_type_matches_any_name() -> None:
    any_client = QuotaFilter(named={}, any_name=frozenset({CLIENT_ID}), strict=False)
    assert any_client.matches(QuotaEntity(((CLIENT_ID, DEFAULT),)))
    assert any_client.matches(QuotaEntity(((USER, DEFAULT), (CLIENT_ID, "a"))))
    assert not any_client.matches(QuotaEntity(((USER, DEFAULT),)))
    only_client = QuotaFilter(named={}, any_name=frozenset({CLIENT_ID}), strict=True)
    assert not only_client.matches(QuotaEntity(((USER, DEFAULT), (CLIENT_ID, "a"))))
    nothing = QuotaFilter(named={}, any_name=frozenset(), strict=True)
    assert not nothing.matches(QuotaEntity(((USER, DEFAULT),)))
