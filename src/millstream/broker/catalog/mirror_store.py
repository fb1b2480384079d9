"""Mirrors in the catalog, and their sightings: the schemas and access rules seen at their sources."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy import Connection, and_, bindparam, delete, insert, select, update

from millstream.broker.catalog.tables import declared_of, insert_into, mirror_sightings, mirrors, row_of, topics
from millstream.core.errors import InvalidMirror, NotCoordinator, UnknownMirror
from millstream.core.mirror import Mirror, SightingChange


def read_mirrors(connection: Connection) -> list[Mirror]:
    """Return every mirror as stored, by name."""
    return [declared_of(Mirror, row) for row in connection.execute(select(mirrors).order_by(mirrors.c.name))]


def insert_mirror(connection: Connection, mirror: Mirror) -> None:
    connection.execute(insert(mirrors).values(**row_of(mirror), sightings_source="", sightings_owner=""))


def lock_mirror(connection: Connection, mirror_id: UUID) -> Mirror:
    """Return a mirror as stored, locked until the end of the transaction."""
    return declared_of(Mirror, _lock_row(connection, mirror_id))


def update_mirror(connection: Connection, before: Mirror, after: Mirror) -> None:
    connection.execute(update(mirrors).where(_is_mirror(before.mirror_id)).values(**row_of(after)))


def delete_mirror(connection: Connection, mirror_id: UUID) -> None:
    """Delete a mirror with its sightings; raise `InvalidMirror` while it writes topics."""
    # All transactions lock the mirror before its sightings, so that they cannot deadlock.
    name = _lock_row(connection, mirror_id).name
    written = connection.execute(select(topics.c.name).where(topics.c.mirror == name).limit(1)).scalar()
    if written is not None:
        raise InvalidMirror(f"mirror {name!r} still writes topic {written!r}; fail over or delete the topic first")
    connection.execute(delete(mirror_sightings).where(mirror_sightings.c.mirror_id == str(mirror_id)))
    connection.execute(delete(mirrors).where(_is_mirror(mirror_id)))


# -- sightings ----------------------------------------------------------------------------------------------------


def require_mirror(connection: Connection, name: str) -> None:
    """Keep a mirror from being deleted until the end of the transaction; raise `UnknownMirror` if it does not exist."""
    query = select(mirrors.c.name).where(mirrors.c.name == name).with_for_update(read=True)
    if connection.execute(query).first() is None:
        raise UnknownMirror(f"there is no mirror {name!r}; it was deleted meanwhile")


def claim_sightings(connection: Connection, mirror_id: UUID, *, source: str, owner: str) -> dict[str, set[str]]:
    """Return the sightings at a source, by kind; from now on, only this owner may change them.

    Sightings at another cluster are discarded.
    """
    of_mirror = mirror_sightings.c.mirror_id == str(mirror_id)
    if _lock_row(connection, mirror_id).sightings_source != source:
        connection.execute(delete(mirror_sightings).where(of_mirror))
    values = {"sightings_source": source, "sightings_owner": owner}
    connection.execute(update(mirrors).where(_is_mirror(mirror_id)).values(**values))
    seen: dict[str, set[str]] = {}
    for kind, item_id in connection.execute(
        select(mirror_sightings.c.kind, mirror_sightings.c.item_id).where(of_mirror)
    ):
        seen.setdefault(kind, set()).add(item_id)
    return seen


def store_sightings(connection: Connection, change: SightingChange) -> None:
    """Store sightings; raise `NotCoordinator` if another node has claimed them since."""
    if _lock_row(connection, change.mirror_id).sightings_owner != change.owner:
        raise NotCoordinator("another node copies the schemas and access rules of this mirror")
    key = {"mirror_id": str(change.mirror_id), "kind": change.kind}
    if change.seen:
        rows = [{**key, "item_id": item_id} for item_id in sorted(change.seen)]
        connection.execute(insert_into(connection, mirror_sightings).on_conflict_do_nothing(), rows)
    if change.forgotten:
        gone = and_(
            mirror_sightings.c.mirror_id == key["mirror_id"],
            mirror_sightings.c.kind == change.kind,
            mirror_sightings.c.item_id == bindparam("gone_id"),
        )
        connection.execute(
            delete(mirror_sightings).where(gone), [{"gone_id": item_id} for item_id in sorted(change.forgotten)]
        )


def _lock_row(connection: Connection, mirror_id: UUID) -> Any:
    """Return the row of a mirror, locked until the end of the transaction."""
    row = connection.execute(select(mirrors).where(_is_mirror(mirror_id)).with_for_update()).first()
    if row is None:
        raise UnknownMirror(f"mirror {mirror_id} is not in the catalog")
    return row


def _is_mirror(mirror_id: UUID) -> Any:
    return mirrors.c.mirror_id == str(mirror_id)
