"""Payloads as columns: both decoders agree, no value is distorted, and each payload has a row or a reason."""

from __future__ import annotations

import json
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.pipelines.jobs.land.decoding import DecodedPayloads, Decoder, Widening
from millstream.pipelines.jobs.land.inference import column_of, field_of, fields_of, grown, payload_fields, table_schema
from millstream.pipelines.jobs.land.job import declared_fields, merge_schema

FIELDS = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("small", pa.int8()),
        pa.field("amount", pa.float64()),
        pa.field("text", pa.string()),
        pa.field("paid", pa.bool_()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("day", pa.date32()),
        pa.field("price", pa.decimal128(10, 2)),
        pa.field("buyer", pa.struct([pa.field("name", pa.string()), pa.field("age", pa.int64())])),
        pa.field("lines", pa.list_(pa.field("element", pa.struct([pa.field("sku", pa.string())])))),
    ]
)


def payloads(*documents: Any) -> pa.Array:
    texts = [
        document if isinstance(document, bytes) or document is None else json.dumps(document).encode()
        for document in documents
    ]
    return pa.array(texts, pa.binary())


def decode(*documents: Any, fields: pa.Schema = FIELDS, evolves: bool = False) -> tuple[list[Any], list[str | None]]:
    decoded = Decoder(fields, evolves=evolves).decode(payloads(*documents))
    return decoded.columns.to_pylist(), decoded.reasons.to_pylist()


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
    | st.sampled_from(["2026-01-02", "2026-01-02T03:04:05Z", "1.25", 1.25, 1.255, 3.0, 10**400])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["name", "age", "sku", "more", "NAME", "Sku"]), inner, max_size=3)
    ),
    max_leaves=6,
)
DOCUMENTS = st.dictionaries(
    st.sampled_from([*FIELDS.names, "other", "Id", "ID", "Buyer", "LINES", "Text"]), VALUES, max_size=5
)
ODD = st.sampled_from(
    [
        *(b"", b" ", b"[]", b"{", b"null", b'{"id":1}{"id":2}', b'{"id":', b'{"id":1}}', b"\xff\xfe", b'{"id":01}'),
        *(b'{\n"id" : 1 }\n', b'{"id":1,"id":2}', b'{"amount":NaN}', b'{"amount":1e999}', b'{"text":"a\nb"}'),
        b'{"text":"\\ud800"}',
        # Recursive parsers would crash the whole process.
        *(b'{"a":' * 250 + b"1" + b"}" * 250, b'{"text":"]]","a":' + b"[" * 199 + b"]" * 199 + b"}"),
        b'{"text":"' + b"]" * 300 + b'","a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' + b"[" * 100_000,
    ]
)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@given(st.lists(DOCUMENTS | ODD | st.none(), max_size=4), st.booleans())
def test_a_payload_is_decoded_independently_of_its_batch(documents: list[Any], evolves: bool) -> None:
    decoder = Decoder(FIELDS, evolves=evolves, refuses_rounding=evolves)
    values = payloads(*documents)
    together = decoder.decode(values)
    apart = decoder._decode_singly(values)
    assert together.reasons.to_pylist() == apart.reasons.to_pylist()
    assert same(together.columns.to_pylist(), apart.columns.to_pylist())
    assert together.columns.type == apart.columns.type
    for row in range(len(values)):
        alone = decoder.decode(values.slice(row, 1))
        assert alone.reasons[0] == together.reasons[row]
        assert same(alone.columns[0].as_py(), together.columns[row].as_py())


@given(st.lists(DOCUMENTS | ODD | st.none(), min_size=1, max_size=6))
def test_inferred_columns_decode_every_payload_they_were_inferred_from(documents: list[Any]) -> None:
    values = payloads(*documents)
    first = Decoder(pa.schema([]), evolves=True).decode(values)
    second = Decoder(grown_by(first), evolves=True).decode(values)
    assert not second.new_fields
    for before, after in zip(first.reasons.to_pylist(), second.reasons.to_pylist(), strict=True):
        # The first value decides; a number too large for any column of numbers makes one that it does not fit.
        assert after == before or "is not of type" in str(after)


def test_every_type_accepts_valid_values() -> None:
    whole = {
        "id": 7,
        "small": -128,
        "amount": 3,
        "text": "ä",
        "paid": True,
        "at": "2026-01-02T03:04:05.5+01:00",
        "day": "2026-01-02",
        "price": 12.25,
        "buyer": {"name": "Ann", "age": None},
        "lines": [{"sku": "a"}, None],
    }
    (row,), (reason,) = decode(whole)
    assert reason is None
    assert row["id"] == 7
    assert row["amount"] == 3.0
    assert str(row["day"]) == "2026-01-02"
    assert str(row["price"]) == "12.25"
    assert row["at"].isoformat() == "2026-01-02T02:04:05.500000+00:00"
    assert row["buyer"] == {"name": "Ann", "age": None}
    assert row["lines"] == [{"sku": "a"}, None]


def test_nanoseconds_of_times_are_dropped() -> None:
    rows, reasons = decode(
        {"at": "2026-01-02T03:04:05.123456789Z"}, {"at": "2026-01-02T03:04:05.1234567+01:00"}, {"at": "2026-01-02"}
    )
    assert reasons == [None] * 3
    assert [row["at"].isoformat() for row in rows[:2]] == [
        "2026-01-02T03:04:05.123456+00:00",
        "2026-01-02T02:04:05.123456+00:00",
    ]


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ({"id": 1.5}, "id: 1.5 is not of type long"),
        ({"id": "1"}, 'id: "1" is not of type long'),
        ({"id": 2**63}, f"id: {2**63} is not of type long"),
        ({"small": 128}, "small: 128 is not of type byte"),
        ({"amount": "1"}, 'amount: "1" is not of type double'),
        ({"amount": True}, "amount: true is not of type double"),
        (b'{"amount": 1e999}', "amount: 1e999 is not of type double"),
        ({"paid": 1}, "paid: 1 is not of type boolean"),
        ({"at": 17}, "at: 17 is not of type timestamp"),
        ({"at": "soon"}, 'at: "soon" is not of type timestamp'),
        ({"day": "2026-13-01"}, 'day: "2026-13-01" is not of type date'),
        ({"price": 1.255}, "price: 1.255 is not of type decimal(10,2)"),
        ({"buyer": "Ann"}, 'buyer: "Ann" is not of type object'),
        ({"buyer": {"age": "old"}}, 'buyer.age: "old" is not of type long'),
        ({"lines": {}}, "lines: {} is not of type array"),
        ({"lines": [{"sku": "a"}, 3]}, "lines[1]: 3 is not of type object"),
        (b"", "the payload is empty"),
        (b"[1]", "the payload is not a JSON object but [1]"),
        (b"\xff", "the payload is not UTF-8: byte 0 cannot be read"),
        (
            b'{"id":' + b"[" * 200 + b"]" * 200 + b"}",
            "the payload nests more than 200 objects and arrays",
        ),
        (b'{"text":"\\ud800"}', "the payload contains an unpaired surrogate"),
    ],
)
def test_an_invalid_value_has_a_reason(document: Any, reason: str) -> None:
    rows, reasons = decode({"id": 1}, document, {"id": 3})
    assert reasons == [None, reason, None]
    assert [row["id"] for row in (rows[0], rows[2])] == [1, 3]


def test_a_text_column_accepts_anything_as_json() -> None:
    rows, reasons = decode(b'{"text":1.50}', {"text": {"a": [1, "ä"]}}, {"text": False}, None)
    assert [row["text"] for row in rows] == ["1.50", '{"a":[1,"ä"]}', "false", None]
    assert reasons == [None] * 4


def test_one_invalid_payload_among_thousands_is_found() -> None:
    documents: list[Any] = [{"id": number} for number in range(5000)]
    documents[4321] = {"id": "x"}
    rows, reasons = decode(*documents)
    assert [number for number, reason in enumerate(reasons) if reason] == [4321]
    assert rows[4999]["id"] == 4999
    assert rows[4320]["id"] == 4320


def grown_by(decoded: DecodedPayloads, known: pa.Schema | None = None) -> pa.Schema:
    fields = known if known is not None else pa.schema([])
    for _row, new_fields in decoded.new_fields:
        fields = grown(fields, new_fields)
    return fields


def found_in(*documents: Any, known: pa.Schema | None = None) -> dict[str, str]:
    decoded = Decoder(known if known is not None else pa.schema([]), evolves=True).decode(payloads(*documents))
    return {field.name: str(field.type) for field in grown_by(decoded, known)}


def test_types_are_inferred() -> None:
    schema = found_in(
        {"n": 1, "x": 1.5, "s": "a", "b": True, "o": {"k": 1, "e": {}}, "l": [1, 2.5], "none": None, "empty": []},
        {"n": 2.5, "t": "2026-01-02T00:00:00Z", "o": {"j": "a"}},
    )
    assert schema == {
        "n": "int64",
        "x": "double",
        "s": "string",
        "b": "bool",
        "o": "struct<k: int64, j: string>",
        "l": "list<element: double>",
        "t": "string",
    }


def test_of_incompatible_types_the_first_stays() -> None:
    assert found_in({"a": 1}, {"a": "x"}) == {"a": "int64"}
    assert found_in({"a": "x"}, {"a": 1}) == {"a": "string"}
    assert found_in({"a": [1, "x"]}) == {"a": "list<element: string>"}
    assert found_in({"a": {"b": 1}}, {"a": 3}) == {"a": "struct<b: int64>"}
    assert found_in({"a": 1}, {"a": 0.5}) == {"a": "int64"}
    assert found_in({"a": 3.0}, {"a": 1}) == {"a": "double"}


@pytest.mark.parametrize("beside", [0, 100])
def test_the_first_message_with_a_field_is_found(beside: int) -> None:
    others: list[Any] = [{"z": 1, "empty": {}, "l": []}] * beside
    documents = [
        {"z": 1},
        *others,
        {"l": [{}]},
        {"l": [{"x": 1}, {"X": 2, "y": {"k": 5}}]},
        {"Z": 5, "A": 1},
        {"a": 2.5, "nulls": [None, None]},
        {"nulls": [None, 1, None]},
        {"o": {"nulls": [None, {"nulls": [None, 1.5]}]}},
    ]
    known = pa.schema([pa.field("z", pa.int64())])
    decoded = Decoder(known, evolves=True).decode(payloads(*documents))
    assert [(row - beside, fields.names, str(fields.field(0).type)) for row, fields in decoded.new_fields] == [
        (2, ["l"], "list<element: struct<x: int64, y: struct<k: int64>>>"),
        (3, ["A"], "int64"),
        (5, ["nulls"], "list<element: int64>"),
        (6, ["o"], "struct<nulls: list<element: struct<nulls: list<element: double>>>>"),
    ]


def test_a_column_keeps_its_type_and_gains_fields() -> None:
    known = pa.schema([pa.field("a", pa.int64()), pa.field("o", pa.struct([pa.field("x", pa.int64())]))])
    assert found_in({"a": 1, "o": {"x": 1, "y": "b"}, "c": True}, known=known) == {
        "a": "int64",
        "o": "struct<x: int64, y: string>",
        "c": "bool",
    }
    # A new field becomes a column even if another value of its message does not fit.
    assert found_in({"a": 1.5, "d": 1}, known=known) == {"a": "int64", "o": "struct<x: int64>", "d": "int64"}


def test_a_value_that_does_not_fit_hides_no_new_field() -> None:
    known = pa.schema([pa.field("o", pa.struct([pa.field("x", pa.int64())]))])
    assert found_in({"o": 5}, {"o": {"y": 1}}, known=known) == {"o": "struct<x: int64, y: int64>"}


def test_names_invalid_in_tables_stay_in_the_payload() -> None:
    assert found_in({"a b": 1, "": 2, "Id": 3, "id": 4, "a;": 5, "fine": 6}) == {"Id": "int64", "fine": "int64"}


@pytest.mark.parametrize("evolves", [False, True])
@pytest.mark.parametrize("count", [1, 5000])
def test_names_match_columns_case_insensitively(evolves: bool, count: int) -> None:
    document = {"ID": 3001, "Amount": 5, "BUYER": {"Name": "Ann", "AGE": 7}, "Lines": [{"SKU": "a"}, None, {}]}
    rows, reasons = decode(*[document] * count, {"id": 1}, {"iD": "x"}, evolves=evolves)
    assert reasons == [None] * (count + 1) + ['id: "x" is not of type long']
    for row in rows[:count]:
        assert (row["id"], row["amount"], row["buyer"]) == (3001, 5.0, {"name": "Ann", "age": 7})
        assert row["lines"] == [{"sku": "a"}, None, {"sku": None}]
    assert rows[count]["id"] == 1


@pytest.mark.parametrize("evolves", [False, True])
def test_an_exact_match_precedes_other_spellings(evolves: bool) -> None:
    documents = [{"ID": 1, "id": 2, "Id": 3}, {"ID": 1, "Id": 3}, {"ID": 1, "id": None}, {"ID": "x", "id": 2}]
    buyers = [{"buyer": {"name": "a", "NAME": "b"}}, {"BUYER": {"name": "a"}, "buyer": {"age": 1}}]
    rows, reasons = decode(*documents, *buyers, b'{"\\u0049D": 4}', evolves=evolves)
    assert reasons == [None] * 7
    assert [row["id"] for row in rows] == [2, 1, 1, 2, None, None, 4]
    assert [row["buyer"] for row in rows[4:6]] == [{"name": "a", "age": None}, {"name": None, "age": 1}]


def test_non_ascii_names_match_case_insensitively() -> None:
    fields = pa.schema([pa.field("größe", pa.int64())])
    for escaped in (True, False):
        documents = [json.dumps({name: 1}, ensure_ascii=escaped).encode() for name in ("größe", "Größe", "grÖße", "x")]
        for evolves in (True, False):
            rows, _reasons = decode(*documents, fields=fields, evolves=evolves)
            assert [row["größe"] for row in rows] == [1, 1, 1, None]


def test_other_spellings_of_many_long_names_are_matched() -> None:
    fields = pa.schema([pa.field(f"a_rather_long_name_of_a_column_{number}", pa.int64()) for number in range(200)])
    rows, _reasons = decode({fields.names[199].title(): 5}, *[{fields.names[0]: 1}] * 10_000, fields=fields)
    assert rows[0][fields.names[199]] == 5


def test_new_fields_are_found_in_other_spellings_of_their_parent() -> None:
    known = pa.schema([pa.field("o", pa.struct([pa.field("x", pa.int64())]))])
    assert found_in({"O": {"X": 1, "y": 2}}, known=known) == {"o": "struct<x: int64, y: int64>"}
    assert found_in({"a": 1}, {"A": "x"}) == {"a": "int64"}


WHOLE = pa.schema(
    [
        pa.field("n", pa.int64()),
        pa.field("o", pa.struct([pa.field("x", pa.int64()), pa.field("l", pa.list_(pa.field("element", pa.int64())))])),
    ]
)


@pytest.mark.parametrize(
    ("document", "places"),
    [
        ({"n": 0.5}, [("n",)]),
        ({"N": 0.5}, [("n",)]),
        (b'{"n": 1e300}', [("n",)]),
        (b'{"n": NaN}', [("n",)]),
        ({"o": {"x": 0.5, "l": [1, 0.25]}}, [("o", "l", "[]"), ("o", "x")]),
        ({"n": 0.5, "o": {"x": 3.0}}, [("n",)]),
        # Whether the payload fits then does not matter.
        (b'{"n": 1e999}', [("n",)]),
        ({"n": 0.5, "o": {"x": "y"}}, [("n",)]),
        # These fit as they are, have no fraction, or have a number that would be rounded.
        ({"n": 3.0}, []),
        ({"n": 2**64}, []),
        ({"n": "0.5"}, []),
        ({"n": 0.5, "o": {"l": [2**60, 0.5]}}, [("n",)]),
    ],
)
@pytest.mark.parametrize("beside", [0, 100])
def test_integers_are_widened_for_fractions(document: Any, places: list[Any], beside: int) -> None:
    documents = payloads(*[{"n": 1}] * beside, document)
    widening = Decoder(WHOLE, evolves=True).decode(documents).widening
    assert widening == (Widening(beside, frozenset(places), frozenset(places)) if places else None)
    assert Decoder(WHOLE, evolves=False).decode(documents).widening is None


def test_fields_found_beside_a_fraction_are_kept() -> None:
    decoded = Decoder(WHOLE, evolves=True).decode(payloads({"n": 0.5, "new": 1, "o": {"y": True}}))
    assert decoded.widening == Widening(0, frozenset({("n",)}), frozenset({("n",)}))
    assert grown_by(decoded, WHOLE) == pa.schema(
        [
            pa.field("n", pa.int64()),
            pa.field("o", pa.struct([*WHOLE.field("o").type, pa.field("y", pa.bool_())])),
            pa.field("new", pa.int64()),
        ]
    )


@pytest.mark.parametrize("beside", [0, 100])
def test_numbers_that_a_double_would_round_do_not_fit_an_inferred_column(beside: int) -> None:
    documents = [
        *[{"amount": 1e300, "lines": [{"sku": "1234567890123456789"}]}] * beside,
        *({"amount": number} for number in (2**53, 2**53 + 1, -(2**60), 12345678901234568 * 10**4, 10**400)),
        b'{"amount": 9007199254740993.0}',
    ]
    reasons = Decoder(FIELDS, evolves=True, refuses_rounding=True).decode(payloads(*documents)).reasons.to_pylist()
    rounded = f"amount: {2**53 + 1} would be rounded as double"
    refused = f"amount: {str(10**400)[:60]}… is not of type double"
    assert reasons[beside:] == [None, rounded, None, None, refused, None]
    assert not any(reasons[:beside])
    lists = pa.schema([pa.field("l", pa.list_(pa.field("element", pa.struct([("x", pa.float64())]))))])
    nested = [{"l": [{"x": 1}]}, {"l": None}, {"l": []}, {"l": [{"x": 1}, None, {"x": 2**60 + 1}]}] * (beside + 1)
    reasons = Decoder(lists, evolves=True, refuses_rounding=True).decode(payloads(*nested)).reasons.to_pylist()
    assert reasons == [None, None, None, f"l[].x: {2**60 + 1} would be rounded as double"] * (beside + 1)
    rows, reasons = decode({"amount": 2**53 + 1})
    assert (rows[0]["amount"], reasons) == (2.0**53, [None])


@pytest.mark.parametrize("evolves", [False, True])
def test_the_reason_not_to_widen_a_column_is_reported(evolves: bool) -> None:
    fixed = {("n",): "it is too large", ("o", "l", "[]"): "so it is"}
    decoder = Decoder(WHOLE, evolves=evolves, fixed=fixed)
    both = {"n": "x", "o": {"l": [0.5]}}
    decoded = decoder.decode(payloads({"n": 0.5}, {"o": {"l": [0.5]}}, {"n": "x"}, both, {"n": 1}))
    assert (decoded.new_fields, decoded.widening) == ((), None)
    assert decoded.reasons.to_pylist() == [
        "n: 0.5 is not of type long; n stays long: it is too large",
        "o.l[0]: 0.5 is not of type long; o.l[] stays long: so it is",
        'n: "x" is not of type long',
        # Only the reason of the field that is named.
        'n: "x" is not of type long',
        None,
    ]


def test_a_given_schema_overrides_that_of_a_table() -> None:
    known = pa.schema([pa.field("N", pa.int64()), *WHOLE.remove(0), pa.field("text", pa.string())])
    given_again = declared_fields("n double, o struct<y string, x double>, text long, more date")
    assert merge_schema(known, given_again) == pa.schema(
        [
            pa.field("N", pa.float64()),
            pa.field("o", pa.struct([("x", pa.float64()), WHOLE.field("o").type.field("l"), ("y", pa.string())])),
            pa.field("text", pa.string()),
            pa.field("more", pa.date32()),
        ]
    )
    assert merge_schema(known, declared_fields("text string")) == pa.schema([pa.field("text", pa.string())])


def test_the_number_of_columns_is_bounded() -> None:
    wide = {f"f{number}": number for number in range(1500)}
    schema = grown_by(Decoder(pa.schema([]), evolves=True).decode(payloads(wide, {"o": {"x": 1, "y": 2}})))
    assert len(schema) == 1000
    assert not Decoder(schema, evolves=True).decode(payloads(wide)).new_fields
    # An object gets as many of its fields as there is room for.
    almost = pa.schema([pa.field(f"f{number}", pa.int64()) for number in range(999)])
    decoded = Decoder(almost, evolves=True).decode(payloads({"o": {"x": 1, "y": 2}}))
    assert [str(fields.field("o").type) for _row, fields in decoded.new_fields] == ["struct<x: int64>"]
    assert decoded.dropped == {"o.y"}


def test_fields_named_like_metadata_columns_get_a_prefix() -> None:
    fields = pa.schema([pa.field(name, pa.int64()) for name in ("value", "payload_value", "Offset", "payload_x", "x")])
    names = [column_of(name) for name in fields.names]
    assert names == ["payload_value", "payload_payload_value", "payload_Offset", "payload_x", "x"]
    assert [field_of(name) for name in names] == fields.names
    assert payload_fields(table_schema(fields)) == fields


@given(st.lists(DOCUMENTS, min_size=1, max_size=5))
def test_types_only_grow(documents: list[dict[str, Any]]) -> None:
    schemas = [fields_of(document) for document in documents]
    known = grown(pa.schema([]), schemas[0])
    for schema in schemas[1:]:
        wider = grown(known, schema)
        assert wider.names[: len(known.names)] == known.names
        assert grown(wider, schema) == wider
        known = wider
