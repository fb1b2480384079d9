"""Mirrors in the catalog, and what they have seen at their sources."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy import Connection, and_, bindparam, delete, insert, select, update
from sqlalchemy.dialects import postgresql, sqlite

from millstream.broker.catalog.tables import mirror_sightings, mirrors
from millstream.core.errors import NotCoordinator, UnknownMirror
from millstream.core.mirror import Mirror, SightingChange, TopicOffsets


def read_mirrors(connection: Connection) -> list[Mirror]:
    """Return every mirror as stored, by name."""
    return [_mirror(row) for row in connection.execute(select(mirrors).order_by(mirrors.c.name))]


def insert_mirror(connection: Connection, mirror: Mirror) -> None:
    """Store a new mirror."""
    connection.execute(
        insert(mirrors).values(
            mirror_id=str(mirror.mirror_id),
            name=mirror.name,
            created_ms=mirror.created_ms,
            sightings_source="",
            sightings_owner="",
            **_row(mirror),
        )
    )


def hold_mirror(connection: Connection, mirror_id: UUID) -> Mirror:
    """Return a mirror as stored, which no other node changes until the end of the transaction."""
    return _mirror(_held(connection, mirror_id))


def update_mirror(connection: Connection, before: Mirror, after: Mirror) -> None:
    """Store a changed mirror."""
    connection.execute(update(mirrors).where(_here(before.mirror_id)).values(**_row(after)))


def delete_mirror(connection: Connection, mirror_id: UUID) -> None:
    """Delete a mirror with its sightings."""
    # Everyone locks the mirror before its sightings, so that no two transactions wait for each other.
    _held(connection, mirror_id)
    connection.execute(delete(mirror_sightings).where(mirror_sightings.c.mirror_id == str(mirror_id)))
    connection.execute(delete(mirrors).where(_here(mirror_id)))


# -- what was seen at the source ----------------------------------------------------------------------------------


def claim_sightings(connection: Connection, mirror_id: UUID, *, source: str, owner: str) -> dict[str, set[str]]:
    """Return what was seen at a source, by kind; from now on, only this owner may change it.

    What was seen at another cluster is forgotten.
    """
    of_mirror = mirror_sightings.c.mirror_id == str(mirror_id)
    if _held(connection, mirror_id).sightings_source != source:
        connection.execute(delete(mirror_sightings).where(of_mirror))
    values = {"sightings_source": source, "sightings_owner": owner}
    connection.execute(update(mirrors).where(_here(mirror_id)).values(**values))
    found: dict[str, set[str]] = {}
    for kind, item_id in connection.execute(
        select(mirror_sightings.c.kind, mirror_sightings.c.item_id).where(of_mirror)
    ):
        found.setdefault(kind, set()).add(item_id)
    return found


def store_sightings(connection: Connection, change: SightingChange) -> None:
    """Store what was seen; raise `NotCoordinator` if another node has made a claim since."""
    if _held(connection, change.mirror_id).sightings_owner != change.owner:
        raise NotCoordinator("another node copies the schemas and access rules of this mirror")
    key = {"mirror_id": str(change.mirror_id), "kind": change.kind}
    if change.seen:
        added = postgresql.insert if connection.dialect.name != "sqlite" else sqlite.insert
        rows = [{**key, "item_id": item_id} for item_id in sorted(change.seen)]
        connection.execute(added(mirror_sightings).on_conflict_do_nothing(), rows)
    if change.forgotten:
        gone = and_(
            mirror_sightings.c.mirror_id == key["mirror_id"],
            mirror_sightings.c.kind == change.kind,
            mirror_sightings.c.item_id == bindparam("gone_id"),
        )
        connection.execute(
            delete(mirror_sightings).where(gone), [{"gone_id": item_id} for item_id in sorted(change.forgotten)]
        )


def _held(connection: Connection, mirror_id: UUID) -> Any:
    """Return the row of a mirror, locked until the end of the transaction."""
    row = connection.execute(select(mirrors).where(_here(mirror_id)).with_for_update()).first()
    if row is None:
        raise UnknownMirror(f"mirror {mirror_id} is not in the catalog")
    return row


def _here(mirror_id: UUID) -> Any:
    return mirrors.c.mirror_id == str(mirror_id)


def _mirror(row: Any) -> Mirror:
    return Mirror(
        mirror_id=UUID(row.mirror_id),
        name=row.name,
        overrides=dict(row.overrides),
        is_wanted=row.is_wanted,
        created_ms=row.created_ms,
        version=row.version,
        cuts=_offsets(row.cuts),
        verified=_offsets(row.verified),
        is_gated=row.is_gated,
        cut_epochs=_offsets(row.cut_epochs),
        resumes=row.resumes,
    )


def _row(mirror: Mirror) -> dict[str, Any]:
    return {
        "overrides": dict(mirror.overrides),
        "is_wanted": mirror.is_wanted,
        "version": mirror.version,
        "cuts": _offsets_row(mirror.cuts),
        "verified": _offsets_row(mirror.verified),
        "is_gated": mirror.is_gated,
        "cut_epochs": _offsets_row(mirror.cut_epochs),
        "resumes": mirror.resumes,
    }


def _offsets(row: Any) -> dict[str, dict[int, int]]:
    return {topic: {int(index): int(offset) for index, offset in offsets.items()} for topic, offsets in row.items()}


def _offsets_row(offsets: TopicOffsets) -> dict[str, dict[str, int]]:
    return {topic: {str(index): offset for index, offset in found.items()} for topic, found in offsets.items()}
