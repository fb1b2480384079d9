"""The tables of the catalog: what users declare, as opposed to what the log holds; and their rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Connection,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    select,
)
from sqlalchemy.dialects import postgresql, sqlite

from millstream.core.credential import Owner

T = TypeVar("T")

SCHEMA_VERSION = 1
"""Incremented with every change of the tables after a release, which also needs a migration from the previous
version."""

metadata = MetaData()

about = Table(
    "about",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("value", String(255), nullable=False),
)
"""Single facts: the version of this schema, the id of the cluster."""

topics = Table(
    "topics",
    metadata,
    Column("topic_id", String(36), primary_key=True),
    Column("name", String(249), nullable=False, unique=True),
    Column("partitions", Integer, nullable=False),
    Column("replication", Integer, nullable=False),
    Column("overrides", JSON, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("mirror", String(200), nullable=False),
    Column("is_draining", Boolean, nullable=False),
    Column("origins", JSON, nullable=False),
    Column("original_id", String(36)),
)

deleted_topics = Table(
    "deleted_topics",
    metadata,
    Column("topic_id", String(36), primary_key=True),
    Column("name", String(249), nullable=False),
    Column("deleted_ms", BigInteger, nullable=False),
)
"""Explicit deletion records: data files are removed only because of a row here, never because one is missing above."""

counters = Table(
    "counters",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("next_value", BigInteger, nullable=False),
)
"""Counters whose numbers are allocated once, in blocks."""

client_quotas = Table(
    "client_quotas",
    metadata,
    Column("entity", String(1024), primary_key=True),
    Column("limits", JSON, nullable=False),
)
"""Limits of clients. The entity is the JSON text of a list of `[type, name]`; no name means the default."""

group_settings = Table(
    "group_settings",
    metadata,
    Column("group_id", String(1024), primary_key=True),
    Column("overrides", JSON, nullable=False),
)
"""Settings of single consumer groups; share groups are subscriptions."""

broker_settings = Table(
    "broker_settings",
    metadata,
    Column("scope", String(16), primary_key=True),
    Column("overrides", JSON, nullable=False),
)
"""Settings of nodes that were changed while they ran: of all of them, or of one. Rows are emptied, never deleted."""

subscriptions = Table(
    "subscriptions",
    metadata,
    Column("subscription_id", String(36), primary_key=True),
    Column("name", String(249), nullable=False, unique=True),
    Column("topics", JSON, nullable=False),
    Column("starts", JSON, nullable=False),
    Column("overrides", JSON, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("used_ms", BigInteger, nullable=False),
    Column("owner", String(1024), nullable=False),
    Column("owner_has_password", Boolean, nullable=False),
)

deleted_subscriptions = Table(
    "deleted_subscriptions",
    metadata,
    Column("subscription_id", String(36), primary_key=True),
    Column("name", String(249), nullable=False),
    Column("deleted_ms", BigInteger, nullable=False),
)
"""Explicit deletion records: the state of a queue is removed only because of a row here."""

pipelines = Table(
    "pipelines",
    metadata,
    Column("pipeline_id", String(36), primary_key=True),
    Column("name", String(200), nullable=False, unique=True),
    Column("kind", String(16), nullable=False),
    Column("overrides", JSON, nullable=False),
    Column("is_enabled", Boolean, nullable=False),
    Column("parked", Text, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("owner", String(1024), nullable=False),
    Column("owner_has_password", Boolean, nullable=False),
    Column("requests", BigInteger, nullable=False),
)

job_runs = Table(
    "job_runs",
    metadata,
    Column("pipeline_id", String(36), primary_key=True),
    Column("number", BigInteger, primary_key=True, autoincrement=False),
    Column("state", String(16), nullable=False),
    Column("scheduled_ms", BigInteger, nullable=False),
    Column("started_ms", BigInteger, nullable=False),
    Column("ended_ms", BigInteger, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("node", Integer, nullable=False),
    Column("code_hash", String(64), nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("request", BigInteger, nullable=False),
    Column("error", Text, nullable=False),
    Column("progress", JSON, nullable=False),
)
"""The last runs of jobs. A row is written before its run begins, so that two nodes never begin the same one."""

routing_rules = Table(
    "routing_rules",
    metadata,
    Column("pipeline_id", String(36), primary_key=True),
    Column("name", String(200), primary_key=True),
    Column("topic", String(249), nullable=False),
    Column("targets", JSON, nullable=False),
    Column("condition", Text, nullable=False),
    Column("subscription", String(249), nullable=False),
)
"""The rules of routing pipelines, which are deleted with their pipeline."""

mirrors = Table(
    "mirrors",
    metadata,
    Column("mirror_id", String(36), primary_key=True),
    Column("name", String(200), nullable=False, unique=True),
    Column("overrides", JSON, nullable=False),
    Column("is_enabled", Boolean, nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("version", BigInteger, nullable=False),
    Column("cuts", JSON, nullable=False),
    Column("aborted", JSON, nullable=False),
    Column("dropped", JSON, nullable=False),
    Column("verified", JSON, nullable=False),
    Column("group_offsets", JSON, nullable=False),
    Column("gaps", JSON, nullable=False),
    Column("is_gated", Boolean, nullable=False),
    Column("cut_epochs", JSON, nullable=False),
    Column("resumes", Boolean, nullable=False),
    Column("sightings_source", String(64), nullable=False),
    Column("sightings_owner", String(64), nullable=False),
)
"""Mirrors of other clusters. `cuts`, `aborted`, `dropped`, `verified` and `gaps` hold offsets, by topic and partition,
`group_offsets` by group, topic and partition, and `cut_epochs` leader epochs.

`sightings_source` is the cluster that `mirror_sightings` are of, `sightings_owner` the only node that may change them.
"""

mirror_sightings = Table(
    "mirror_sightings",
    metadata,
    Column("mirror_id", String(36), primary_key=True),
    Column("kind", String(16), primary_key=True),
    Column("item_id", String(64), primary_key=True),
)
"""Schemas and access rules that the source of a mirror has had, by hash: a mirror may delete only these."""

scram_credentials = Table(
    "scram_credentials",
    metadata,
    Column("user", String(128), primary_key=True),
    Column("mechanism", String(16), primary_key=True),
    Column("iterations", Integer, nullable=False),
    Column("salt", String(256), nullable=False),
    Column("stored_key", String(128), nullable=False),
    Column("server_key", String(128), nullable=False),
)
"""Verifiers of passwords for SCRAM, with bytes in base 64."""

api_tokens = Table(
    "api_tokens",
    metadata,
    Column("token_id", String(32), primary_key=True),
    Column("owner", String(1024), nullable=False),
    Column("digest", String(64), nullable=False),
    Column("scope", JSON, nullable=False),
    Column("parent", String(32), nullable=False),
    Column("created_ms", BigInteger, nullable=False),
    Column("expires_ms", BigInteger, nullable=False),
)
"""API tokens. The digest is that of the secret, in base 64; the scope is a list of rules."""

acls = Table(
    "acls",
    metadata,
    Column("acl_id", String(64), primary_key=True),
    Column("resource_type", Integer, nullable=False),
    Column("resource_name", String(1024), nullable=False),
    Column("pattern", Integer, nullable=False),
    Column("principal", String(1024), nullable=False),
    Column("host", String(1024), nullable=False),
    Column("operation", Integer, nullable=False),
    Column("permission", Integer, nullable=False),
)
"""Access rules. The id is a hash of the other columns, which are too long for a key."""

schemas = Table(
    "schemas",
    metadata,
    Column("context", String(255), primary_key=True),
    Column("schema_id", Integer, primary_key=True, autoincrement=False),
    Column("guid", String(36), nullable=False, index=True),
    Column("schema_type", String(16), nullable=False),
    Column("text", Text, nullable=False),
    Column("references", JSON, nullable=False),
    Column("metadata", JSON, nullable=True),
    Column("rule_set", JSON, nullable=True),
    Column("change", BigInteger, nullable=False, index=True),
)
"""Registered schemas. A row is never updated: an id keeps its schema."""

schema_versions = Table(
    "schema_versions",
    metadata,
    Column("context", String(255), primary_key=True),
    Column("subject", String(1024), primary_key=True),
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("schema_id", Integer, nullable=False),
    Column("state", Integer, nullable=False),
    Column("change", BigInteger, nullable=False, index=True),
)
"""The versions of subjects. One that was deleted permanently keeps its row, so that every node learns of it."""

schema_settings = Table(
    "schema_settings",
    metadata,
    Column("context", String(255), primary_key=True),
    Column("subject", String(1024), primary_key=True),
    Column("config", JSON, nullable=False),
    Column("mode", String(32), nullable=True),
    Column("change", BigInteger, nullable=False, index=True),
)
"""Settings of subjects, and of contexts, whose subject is empty. Rows are emptied, never deleted."""

schema_contexts = Table(
    "schema_contexts",
    metadata,
    Column("context", String(255), primary_key=True),
    Column("last_id", Integer, nullable=False),
)
"""The last allocated schema id of each context."""


def row_of(declared: Any) -> dict[str, Any]:
    """Return the row of a declaration: its fields by name, and two columns for its owner.

    Secrets that this node could not open are omitted, and so are `rules`, which have their own table.
    """
    stored = (field.name for field in dataclasses.fields(declared) if field.name not in ("sealed", "rules"))
    row = {name: msgspec.to_builtins(getattr(declared, name), str_keys=True, enc_hook=dict) for name in stored}
    if isinstance(owner := getattr(declared, "owner", None), Owner):
        row |= {"owner": owner.principal, "owner_has_password": owner.has_password}
    return row


def declared_of(kind: type[T], row: Any) -> T:
    """Return the declaration in a row; columns that are not fields are ignored."""
    values = {str(name): value for name, value in row._mapping.items()}
    if "owner_has_password" in values:
        values["owner"] = {"principal": values["owner"], "has_password": values["owner_has_password"]}
    return msgspec.convert(values, kind, str_keys=True)


_VALUES_AT_ONCE: Final = 1000
"""The number of values in one statement, since databases limit its parameters."""


def in_parts(column: Column[Any], values: Sequence[str]) -> Iterator[ColumnElement[bool]]:
    """Yield conditions that together select the rows with these values."""
    for at in range(0, len(values), _VALUES_AT_ONCE):
        yield column.in_(values[at : at + _VALUES_AT_ONCE])


def insert_into(connection: Connection, table: Table) -> postgresql.Insert | sqlite.Insert:
    """Return an insert that supports `ON CONFLICT`, which both databases write in the same way."""
    return sqlite.insert(table) if connection.dialect.name == "sqlite" else postgresql.insert(table)


def add_if_missing(connection: Connection, table: Table, row: Mapping[str, Any]) -> None:
    connection.execute(insert_into(connection, table).values(row).on_conflict_do_nothing())


def put_row(connection: Connection, table: Table, row: Mapping[str, Any]) -> None:
    """Insert a row, or replace the one with the same primary key."""
    stored = insert_into(connection, table).values(row)
    connection.execute(stored.on_conflict_do_update(index_elements=list(table.primary_key), set_=row))


def take_numbers(connection: Connection, counter: str, size: int, *, first: int = 0) -> int:
    """Allocate `size` numbers of a counter and return the first; they are never allocated again."""
    # One statement, which locks the row for all others until the end of the transaction.
    taken = insert_into(connection, counters).values(name=counter, next_value=first + size)
    updated = {"next_value": counters.c.next_value + size}
    connection.execute(taken.on_conflict_do_update(index_elements=[counters.c.name], set_=updated))
    end = connection.execute(select(counters.c.next_value).where(counters.c.name == counter)).scalar_one()
    return int(end) - size
