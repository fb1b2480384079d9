"""Schemas in the catalog: rows with the number of the change that wrote them, so that nodes read only what is new.

Changes take their numbers from one counter, which each locks until it is committed: they are serialized across nodes,
so a node that has read up to a number has seen every change before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Table, and_, delete, insert, or_, select, update

from millstream.broker.catalog.tables import (
    add_if_missing,
    counters,
    declared_of,
    insert_into,
    put_row,
    row_of,
    schema_contexts,
    schema_settings,
    schema_versions,
    schemas,
    take_numbers,
)
from millstream.core.errors import SchemaRegistryError
from millstream.core.schema import (
    GLOBAL_CONTEXT,
    NUMBER_MAX,
    QualifiedSubject,
    RegistryCode,
    SchemaChanges,
    SchemaContent,
    StoredSchema,
    SubjectSettings,
    SubjectVersion,
)

_COUNTER: Final = "schema-changes"
_LIVE, _DELETED, _GONE = range(3)


def read_schema_changes(connection: Connection, since: int) -> SchemaChanges:
    last = connection.execute(select(counters.c.next_value).where(counters.c.name == _COUNTER)).scalar_one_or_none()
    if last is None or last <= since:
        return SchemaChanges(last=since)
    # Not beyond the number just read: a later change may be committed between two of these statements.
    rows: dict[str, list[Any]] = {}
    for table in (schemas, schema_versions, schema_settings):
        condition = and_(table.c.change > since, table.c.change <= last)
        rows[table.name] = list(connection.execute(select(table).where(condition).order_by(table.c.change)))
    return SchemaChanges(
        last=int(last),
        schemas=[_to_schema(row) for row in rows[schemas.name]],
        versions=[_to_version(row) for row in rows[schema_versions.name]],
        settings=[_to_settings(row) for row in rows[schema_settings.name]],
    )


class SchemaTransaction:
    """A change of the registry; all others wait until it is committed."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._number = take_numbers(connection, _COUNTER, 1) + 1

    def is_unchanged(self, subject: QualifiedSubject, since: int) -> bool:
        """Whether neither the subject nor the settings that apply to it have changed since."""
        for table in (schema_versions, schema_settings):
            about = _is_subject(table, subject)
            if table is schema_settings:
                scopes = (QualifiedSubject(subject.context, ""), QualifiedSubject(GLOBAL_CONTEXT, ""))
                about = or_(about, *(_is_subject(table, scope) for scope in scopes))
            if self._connection.execute(select(table.c.change).where(about, table.c.change > since).limit(1)).first():
                return False
        return True

    def find_schema(self, context: str, content: SchemaContent) -> StoredSchema | None:
        """Return the oldest schema of a context with this content."""
        equal = and_(schemas.c.context == context, schemas.c.guid == str(content.guid))
        row = self._connection.execute(select(schemas).where(equal).order_by(schemas.c.schema_id).limit(1)).first()
        return None if row is None else _to_schema(row)

    def schema(self, context: str, schema_id: int) -> StoredSchema | None:
        row = self._connection.execute(select(schemas).where(_with_id(context, schema_id))).first()
        return None if row is None else _to_schema(row)

    def add_schema(self, context: str, content: SchemaContent, *, schema_id: int | None = None) -> StoredSchema:
        """Store content under its next id, or under the given one, which no other content may have."""
        new_id = self._next_id(context) if schema_id is None else schema_id
        if schema_id is not None:
            self._skip_ids(context, schema_id)
        stored = StoredSchema(context=context, schema_id=new_id, guid=str(content.guid), content=content)
        self._connection.execute(
            insert(schemas).values(
                context=context, schema_id=new_id, guid=stored.guid, change=self._number, **row_of(content)
            )
        )
        return stored

    def put_version(self, version: SubjectVersion) -> None:
        """Store a version of a subject; a permanent deletion also drops the schema, if no other version has it."""
        state = _GONE if version.is_gone else _DELETED if version.is_deleted else _LIVE
        row = {"version": version.version, "schema_id": version.schema_id, "state": state}
        self._put(schema_versions, version.subject, row)
        if version.is_gone:
            self._drop_unused(version.subject.context, version.schema_id)

    def put_settings(self, settings: SubjectSettings) -> None:
        self._put(schema_settings, settings.subject, {"config": dict(settings.config), "mode": settings.mode})

    def _put(self, table: Table, subject: QualifiedSubject, values: Mapping[str, Any]) -> None:
        key = {"context": subject.context, "subject": subject.name}
        put_row(self._connection, table, {**key, **values, "change": self._number})

    def _next_id(self, context: str) -> int:
        first = insert_into(self._connection, schema_contexts).values(context=context, last_id=1)
        last = schema_contexts.c.last_id
        upsert = first.on_conflict_do_update(
            index_elements=[schema_contexts.c.context], set_={"last_id": last + 1}, where=last < NUMBER_MAX
        )
        number = self._connection.execute(upsert.returning(last)).scalar_one_or_none()
        if number is None:
            raise SchemaRegistryError(
                f"context {context!r} has no schema ids left; register in another one, such as :.NAME:SUBJECT",
                code=RegistryCode.NOT_PERMITTED,
            )
        return int(number)

    def _skip_ids(self, context: str, schema_id: int) -> None:
        """Reserve all ids up to this one."""
        add_if_missing(self._connection, schema_contexts, {"context": context, "last_id": schema_id})
        lower = and_(schema_contexts.c.context == context, schema_contexts.c.last_id < schema_id)
        self._connection.execute(update(schema_contexts).where(lower).values(last_id=schema_id))

    def _drop_unused(self, context: str, schema_id: int) -> None:
        uses = select(schema_versions.c.version).where(
            schema_versions.c.context == context,
            schema_versions.c.schema_id == schema_id,
            schema_versions.c.state != _GONE,
        )
        if self._connection.execute(uses.limit(1)).first() is None:
            self._connection.execute(delete(schemas).where(_with_id(context, schema_id)))


def _is_subject(table: Table, subject: QualifiedSubject) -> ColumnElement[bool]:
    return and_(table.c.context == subject.context, table.c.subject == subject.name)


def _with_id(context: str, schema_id: int) -> ColumnElement[bool]:
    return and_(schemas.c.context == context, schemas.c.schema_id == schema_id)


def _to_schema(row: Any) -> StoredSchema:
    return StoredSchema(
        context=row.context,
        schema_id=row.schema_id,
        guid=row.guid,
        content=declared_of(SchemaContent, row),
    )


def _to_version(row: Any) -> SubjectVersion:
    return SubjectVersion(
        subject=QualifiedSubject(row.context, row.subject),
        version=row.version,
        schema_id=row.schema_id,
        is_deleted=row.state == _DELETED,
        is_gone=row.state == _GONE,
    )


def _to_settings(row: Any) -> SubjectSettings:
    return SubjectSettings(subject=QualifiedSubject(row.context, row.subject), config=dict(row.config), mode=row.mode)
