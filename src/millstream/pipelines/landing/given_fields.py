"""The columns of payloads that a pipeline is given, in Spark's notation."""

from __future__ import annotations

import pyarrow as pa
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import to_arrow_type
from pyspark.sql.types import DataType, StructType

from millstream.lake.columns import widest
from millstream.model.errors import InvalidSetting
from millstream.pipelines.landing.layout import is_legal


def given_fields(text: str) -> pa.Schema:
    """The fields that a text names; raise `InvalidSetting` for what is no schema, or none that tables can have.

    Whole numbers become long and others double, as where fields are found: a column cannot be widened later.
    """
    try:
        kind = DataType.fromDDL(text)
    except PySparkException as error:
        raise InvalidSetting(f"`schema` is not in Spark's notation: {error}") from error
    if not isinstance(kind, StructType) or not kind.fields:
        raise InvalidSetting(f"`schema` has to name columns, as in `id long, name string`, not {text!r}")
    fields = pa.schema([pa.field(one.name, widest(to_arrow_type(one.dataType, timezone="UTC"))) for one in kind.fields])
    names = [name.lower() for name in fields.names]
    if len(set(names)) < len(names):
        raise InvalidSetting("`schema` has two columns whose names differ in nothing but case")
    for field in fields:
        _check(field)
    return fields


def _check(field: pa.Field) -> None:
    kind = field.type
    if not is_legal(field.name):
        raise InvalidSetting(f"`schema` names {field.name!r}, which cannot be a column of a table")
    if pa.types.is_struct(kind):
        for inner in kind:
            _check(inner)
    elif pa.types.is_list(kind):
        _check(kind.value_field)
    elif pa.types.is_map(kind) or pa.types.is_binary(kind) or pa.types.is_null(kind):
        raise InvalidSetting(
            f"`schema` has {field.name} as {kind}, which payloads are not decoded into; as string it keeps its JSON"
        )
