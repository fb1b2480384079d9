"""JSON payloads as typed columns: the compiled parser of Arrow where it can, row by row where a row is out of line.

A field that is missing, or whose value does not fit its type, is null, and so is every field of a payload that is not
a JSON object: as `from_json` of Spark does in its permissive mode. Numbers and objects in a text column are their JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.json as pj

from millstream.pipelines.source.nesting import is_text_too_deep, is_too_deep
from millstream.pipelines.source.shape import Column

_EMPTY = b"{}"


def parse_payloads(values: pa.Array, columns: Sequence[Column]) -> list[pa.Array]:
    """The fields of every payload, a column each."""
    schema = pa.schema([pa.field(column.name, column.kind) for column in columns])
    parsed = _parse_together(values, schema)
    return _parse_apart(values, schema) if parsed is None else parsed


def _parse_together(values: pa.Array, schema: pa.Schema) -> list[pa.Array] | None:
    """Everything at once; None if some payload is not as it should be."""
    if not len(values):
        return [pa.array([], field.type) for field in schema]
    documents = values.fill_null(_EMPTY).to_pylist() if values.null_count else values.to_pylist()
    if any(b"\n" in document or not document.lstrip().startswith(b"{") for document in documents):
        return None
    try:
        if is_too_deep(values.cast(pa.string())):
            return None
    except pa.ArrowInvalid:
        # Some payload is no text.
        return None
    text = b"\n".join(documents)
    options = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="ignore")
    reading = pj.ReadOptions(use_threads=False, block_size=len(text) + 1)
    try:
        table = pj.read_json(pa.BufferReader(text), reading, options)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None
    if table.num_rows != len(values):
        return None
    return [table.column(field.name).combine_chunks().cast(field.type) for field in schema]


def _parse_apart(values: pa.Array, schema: pa.Schema) -> list[pa.Array]:
    documents = [_document(value) for value in values.to_pylist()]
    return [
        pa.array([_fitting(document.get(field.name), field.type) for document in documents], field.type)
        for field in schema
    ]


def _document(value: bytes | None) -> dict[str, Any]:
    try:
        text = (value or _EMPTY).decode("utf-8")
        document = {} if is_text_too_deep(text) else json.loads(text)
        # Half of a surrogate pair is no character, and no column takes it.
        json.dumps(document, ensure_ascii=False).encode("utf-8")
    except ValueError:
        return {}
    return document if isinstance(document, dict) else {}


def _fitting(value: Any, kind: pa.DataType) -> Any:
    """The value if its type fits, else None."""
    if value is None:
        return None
    if pa.types.is_string(kind):
        return value if isinstance(value, str) else json.dumps(value, separators=(",", ":"))
    if isinstance(value, bool) != pa.types.is_boolean(kind) or (isinstance(value, float) and pa.types.is_integer(kind)):
        return None
    try:
        if pa.types.is_timestamp(kind) and isinstance(value, str):
            return pa.scalar(value).cast(kind).as_py()
        return pa.scalar(value, kind).as_py()
    except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, ValueError, TypeError):
        return None
