"""JSON payloads as typed columns, with the reason for every payload that cannot be had as such.

Whole batches go through the compiled parser of Arrow. A batch that it refuses is cut into smaller ones, so that only
the neighbours of an odd payload are looked at one by one. Both ways agree on what they both take, which a test shows:
whether a message is put into quarantine never depends on its neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from millstream.pipelines.jobs.land.document import Misfit, parsed, value_for, wider
from millstream.pipelines.jobs.land.inference import grown, grown_by, joined_schemas, type_of
from millstream.pipelines.jobs.land.spelling import Spellings, merged, others_in, picked, with_others
from millstream.pipelines.lake.places import Place, retyped, told
from millstream.pipelines.source.nesting import is_too_deep

_APART_MAX: Final = 32
"""So few are looked at one by one."""

_OTHERS_MAX: Final = 32
"""With more spellings of the same names payloads are looked at one by one."""

_CUTS: Final = 8
_BLANK: Final = " \t\r\n"


@dataclass(frozen=True, slots=True)
class Decoded:
    """The payloads of a batch: a column for every field, and why a row cannot be had, or null."""

    columns: pa.StructArray
    reasons: pa.Array
    found: pa.Schema
    """The fields that are known with what was found beside them; only where fields are looked for."""


class Decoder:
    """Decodes payloads by the fields that are known; when it `evolves`, it also finds those that are not.

    When it `widens`, whole numbers are found to be double where a payload would fit then, except at places that are
    `fixed`: for these it is known why they stay as they are.
    """

    def __init__(
        self, fields: pa.Schema, *, evolves: bool, widens: bool = False, fixed: Mapping[Place, str] | None = None
    ) -> None:
        self._fields = fields
        self._evolves = evolves
        self._widens = widens and evolves
        self._fixed = fixed or {}
        self._kind = pa.struct(list(fields))
        # The parser takes days as numbers only.
        self._parsed_as = pa.schema([field.with_type(_parsed_type(field.type)) for field in fields])
        # Where fields are looked for, their other spellings are found with them.
        self._spellings = None if evolves else Spellings(fields)

    def decode(self, values: pa.Array) -> Decoded:
        """Decode a column of payloads; a message without one has no fields, which is no fault."""
        if not len(values):
            empty = pa.array([], self._kind)
            return Decoded(empty, pa.array([], pa.string()), self._fields)
        whole = self._together(values)
        if whole is not None:
            return whole
        if len(values) <= _APART_MAX:
            return self._apart(values)
        size = -(-len(values) // _CUTS)
        parts = [self.decode(values.slice(start, size)) for start in range(0, len(values), size)]
        return Decoded(
            pa.concat_arrays([part.columns for part in parts]),
            pa.concat_arrays([part.reasons for part in parts]),
            grown_by(self._fields, [part.found for part in parts]),
        )

    # -- all at once ----------------------------------------------------------------------------------------------

    def _together(self, values: pa.Array) -> Decoded | None:
        """Everything at once; None if some payload is not as it should be."""
        texts = _texts(values)
        text = None if texts is None else _lines(texts)
        if text is None:
            return None
        others = self._spellings.in_texts(texts) if self._spellings is not None else frozenset()
        return self._parsed(text, len(values), others)

    def _parsed(self, text: pa.Buffer, rows: int, others: frozenset[str]) -> Decoded | None:
        if len(others) > _OTHERS_MAX:
            return None
        schema = pa.schema(with_others(self._parsed_as, others)) if others else self._parsed_as
        table = _read(text, schema, evolves=self._evolves)
        if table is None or table.num_rows != rows:
            return None
        if self._evolves and (more := others | others_in(self._fields, table.schema)) != others:
            return self._parsed(text, rows, more)
        found = grown(self._fields, table.schema) if self._evolves else self._fields
        wanted = table.select(schema.names)
        if wanted.schema.types != schema.types:
            # Something that no column is made of stands inside of one that there is.
            table = _read(text, schema, evolves=False)
            if table is None or table.num_rows != rows:
                return None
            wanted = table.select(schema.names)
        columns = self._columns(wanted, rows)
        if columns is None:
            return None
        return Decoded(columns, pa.nulls(rows, pa.string()), found)

    def _columns(self, table: pa.Table, rows: int) -> pa.StructArray | None:
        if not len(self._fields):
            return pa.array([{}] * rows, self._kind)
        arrays = [column.combine_chunks() for column in table.columns]
        if table.schema.names != self._parsed_as.names or table.schema.types != self._parsed_as.types:
            several = pa.StructArray.from_arrays(arrays, fields=list(table.schema))
            arrays = merged(several, pa.struct(list(self._parsed_as))).flatten()
        if any(_has_infinity(array) for array in arrays):
            return None
        try:
            cast = [array.cast(field.type) for array, field in zip(arrays, self._fields, strict=True)]
        except pa.ArrowInvalid:
            return None
        return pa.StructArray.from_arrays(cast, fields=list(self._fields))

    # -- one by one -----------------------------------------------------------------------------------------------

    def _apart(self, values: pa.Array) -> Decoded:
        rows: list[dict[str, object]] = []
        reasons: list[str | None] = []
        found: list[pa.Schema] = []
        wide: set[Place] = set()
        for value in values.to_pylist():
            row, reason = self._one(value, found, wide)
            rows.append(row)
            reasons.append(reason)
        fields = retyped(grown(self._fields, joined_schemas(found)), wide, pa.float64()) if found else self._fields
        return Decoded(pa.array(rows, self._kind), pa.array(reasons, pa.string()), fields)

    def _one(
        self, value: bytes | None, found: list[pa.Schema], wide: set[Place]
    ) -> tuple[dict[str, object], str | None]:
        """One row and what is wrong with it; fields that fit are in it all the same."""
        row: dict[str, object] = {}
        try:
            document = parsed(value)
        except Misfit as misfit:
            return row, str(misfit)
        reason = None
        values = picked(document, self._fields.names)
        for field in self._fields:
            try:
                row[field.name] = value_for(values[field.name], field.type, field.name)
            except Misfit as misfit:
                reason = reason or str(misfit)
        places: set[Place] = set()
        if reason is not None:
            reason, places = self._widened(document, reason)
            wide |= places
        if self._evolves and (reason is None or places):
            found.append(pa.schema(list(type_of(document))))
        return row, reason

    def _widened(self, document: dict[str, object], reason: str) -> tuple[str, set[Place]]:
        """Why a payload does not fit, and the places that have to become double for it to fit, if that is all."""
        places = set(wider(document, self._kind))
        fixed = sorted(places & self._fixed.keys())
        if fixed:
            return f"{reason}; {told(fixed[0])} stays long: {self._fixed[fixed[0]]}", set()
        if not self._widens or not places:
            return reason, set()
        try:
            value_for(document, pa.struct(list(retyped(self._fields, places, pa.float64()))), "")
        except Misfit:
            return reason, set()
        return reason, places


def _texts(values: pa.Array) -> pa.Array | None:
    """The payloads as text; None if one of them is no object for sure, or nothing that the parser survives."""
    try:
        texts = values.cast(pa.string())
    except pa.ArrowInvalid:
        return None
    texts = pc.ascii_trim(texts.fill_null("{}"), _BLANK)
    if not pc.all(pc.and_(pc.starts_with(texts, "{"), pc.ends_with(texts, "}"))).as_py() or is_too_deep(texts):
        return None
    if pc.any(pc.match_substring(texts, "\n")).as_py():
        # Between two words of JSON the one is as good as the other, and neither may stand within one.
        texts = pc.replace_substring(texts, "\n", "\r")
    return texts


def _lines(texts: pa.Array) -> pa.Buffer | None:
    """Texts as lines of one; None if they are too much for that."""
    lines = pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts)
    try:
        return pc.binary_join(lines, "\n")[0].as_buffer()
    except pa.ArrowInvalid:
        return None


def _read(text: pa.Buffer, schema: pa.Schema, *, evolves: bool) -> pa.Table | None:
    options = pj.ParseOptions(explicit_schema=schema, unexpected_field_behavior="infer" if evolves else "ignore")
    reading = pj.ReadOptions(use_threads=False, block_size=text.size + 1)
    try:
        return pj.read_json(pa.BufferReader(text), reading, options)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return None


def _parsed_type(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_date(kind):
        return pa.string()
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_parsed_type(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_parsed_type(kind.value_type)))
    return kind


def _has_infinity(array: pa.Array) -> bool:
    """Whether a number may be one that was too large: that is decided by looking at it."""
    kind = array.type
    if pa.types.is_floating(kind):
        return bool(pc.any(pc.is_inf(array)).as_py())
    if pa.types.is_struct(kind):
        return any(_has_infinity(array.field(index)) for index in range(kind.num_fields))
    return _has_infinity(array.values) if pa.types.is_list(kind) else False
