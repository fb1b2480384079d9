"""The catalog: a small relational store, SQLite in the data folder of a single node, PostgreSQL for a cluster.

Calls block for a moment and are rare, so callers run them in a thread. Several nodes may call at once.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import logging
import re
import secrets
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar
from uuid import UUID

from sqlalchemy import Connection, Table, delete, insert, select, text, update
from sqlalchemy.exc import (
    DatabaseError,
    IntegrityError,
    InterfaceError,
    InternalError,
    OperationalError,
    ProgrammingError,
)
from sqlalchemy.exc import TimeoutError as PoolTimeout

from millstream.broker.catalog.database import WRITES, Reserve, copy_tables, is_empty, open_database
from millstream.broker.catalog.mirror_store import (
    claim_sightings,
    delete_mirror,
    insert_mirror,
    lock_mirror,
    read_mirrors,
    require_mirror,
    store_sightings,
    update_mirror,
)
from millstream.broker.catalog.pipeline_store import (
    begin_run,
    delete_pipeline,
    insert_pipeline,
    lock_pipeline,
    read_pipeline_named,
    read_pipelines,
    read_runs,
    update_pipeline,
    update_run,
)
from millstream.broker.catalog.schema_store import SchemaTransaction, read_schema_changes
from millstream.broker.catalog.sealing import N, Sealable, SealedSecret, Sealing
from millstream.broker.catalog.tables import (
    SCHEMA_VERSION,
    about,
    acls,
    add_if_missing,
    api_tokens,
    broker_settings,
    client_quotas,
    declared_of,
    deleted_subscriptions,
    deleted_topics,
    group_settings,
    in_parts,
    insert_into,
    metadata,
    mirrors,
    pipelines,
    put_row,
    row_of,
    scram_credentials,
    subscriptions,
    take_numbers,
    topics,
)
from millstream.core.acl import Acl
from millstream.core.config import Config
from millstream.core.credential import (
    DELETED_OWNER,
    ApiToken,
    DeclaredSecurity,
    ScramCredential,
    SecurityChange,
    user_principal,
)
from millstream.core.errors import (
    CatalogDenied,
    CatalogUnavailable,
    ClusterMismatch,
    DataFolderInvalid,
    InvalidSetting,
    MillstreamError,
    MirrorExists,
    PipelineExists,
    StorageFailure,
    SubscriptionExists,
    UnknownPipeline,
    UnknownSubscription,
    UnknownTopic,
)
from millstream.core.ids import first_producer_id
from millstream.core.job import JobRun
from millstream.core.mirror import Mirror, SightingChange
from millstream.core.pipeline import Pipeline
from millstream.core.private_file import read_secret
from millstream.core.quota import QuotaEntity
from millstream.core.schema import SchemaChanges
from millstream.core.setting import with_changes
from millstream.core.subscription import Subscription
from millstream.core.topic import Topic

V = TypeVar("V", Pipeline, Mirror)
P = ParamSpec("P")
T = TypeVar("T")


_logger = logging.getLogger(__name__)

CATALOG_NAME = "catalog.sqlite"
"""The catalog of a single node, in its data folder."""

_PRODUCER_IDS = "producer-id"

_CLUSTER_ID = "cluster-id"

_CLUSTER_NAME = "cluster-name"
_CLUSTER_KEY = "cluster-key"

_SCHEMA_VERSION = "schema-version"

_AWAY = (OperationalError, InterfaceError, InternalError, PoolTimeout)
"""The errors of SQLAlchemy when the database is unavailable, shutting down, or read-only."""

_DENIED = re.compile(
    r"authentication failed|no password supplied|pg_hba\.conf|not permitted to (log in|connect)"
    r"|(role|user|database) .* does not exist|permission denied",
    re.IGNORECASE,
)
"""The error texts for which retrying is pointless. A connection that was never made has no code, only a text."""

_PREPARE_LOCK = 0x6D696C6C
"""The PostgreSQL advisory lock of the node that creates the tables."""


def _with_reserve(change: Callable[Concatenate[Catalog, P], T]) -> Callable[Concatenate[Catalog, P], T]:
    """Free the reserved space if the disk is full, for a change that may free more."""

    @wraps(change)
    def changed(catalog: Catalog, /, *arguments: P.args, **named: P.kwargs) -> T:
        try:
            return change(catalog, *arguments, **named)
        except StorageFailure:
            if not catalog._reserve.free():
                raise
            return change(catalog, *arguments, **named)

    return changed


class Catalog:
    def __init__(
        self,
        url: str,
        *,
        password_file: str = "",
        reserve: Path | None = None,
        cluster: str = "",
        sealing: Sealing | None = None,
    ) -> None:
        """Open a catalog; `cluster` is the name of the cluster that shares it, which the first node claims."""
        self._cluster = cluster
        self._sealing = sealing or Sealing(None)
        self._reserve = Reserve(reserve)
        self._engine = open_database(url, password_file=password_file)
        self._changing = self._engine.execution_options(**{WRITES: True})
        self._shared = self._engine.dialect.name != "sqlite"
        self.cluster_id = ""

    @classmethod
    def open_folder(cls, data: Path, *, sealing: Sealing | None = None) -> Catalog:
        """Open the embedded catalog of a data folder, creating it in a new one."""
        path = data / CATALOG_NAME
        if not path.exists():
            # SQLite gives its additional files the same mode.
            path.touch(mode=0o600)
        catalog = cls(f"sqlite:///{path}", reserve=data / "catalog.reserve", sealing=sealing)
        try:
            catalog.prepare()
        except BaseException as error:
            catalog.close()
            if not isinstance(error, DatabaseError):
                raise
            raise DataFolderInvalid(
                f"the catalog {path} cannot be read ({error.orig}); "
                "restore it from a backup or start with another --data"
            ) from error
        return catalog

    @classmethod
    def of_cluster(cls, config: Config, *, sealing: Sealing | None = None) -> Catalog:
        """Return the catalog that a cluster's node is configured with; it connects later."""
        if config.catalog_password_file:
            read_secret(config.catalog_password_file, flag="--catalog-password-file")
        try:
            return cls(
                config.catalog, password_file=config.catalog_password_file, cluster=config.cluster, sealing=sealing
            )
        except ValueError as error:
            raise InvalidSetting(f"--catalog: {error}") from error

    @classmethod
    def open_shared(cls, url: str, *, password_file: str = "") -> Catalog:
        """Open the catalog of a cluster, creating its tables if this is the first node."""
        catalog = cls(url, password_file=password_file)
        try:
            catalog.prepare()
        except BaseException:
            catalog.close()
            raise
        return catalog

    def prepare(self, *, is_checked_only: bool = False) -> None:
        """Create the tables of a new catalog; check the version of an existing one.

        If a shared one is only checked, what was created is rolled back.
        """
        if not self._shared:
            self._prepare()
            self._reserve.fill()
            return
        try:
            with self._translate_errors("opened"):
                self._prepare(is_checked_only=is_checked_only)
        except ProgrammingError as error:
            reason = _first_line(error.orig)
            raise CatalogDenied(
                f"the catalog's tables cannot be created: {reason}; its user must own the database"
            ) from error

    def _prepare(self, *, is_checked_only: bool = False) -> None:
        with self._changing.connect() as connection, connection.begin() as transaction:
            if self._shared:
                connection.execute(text(f"SELECT pg_advisory_xact_lock({_PREPARE_LOCK})"))
            about.create(connection, checkfirst=True)
            version = _metadata_value(connection, _SCHEMA_VERSION)
            if version is None:
                metadata.create_all(connection)
                connection.execute(insert(about).values(name=_SCHEMA_VERSION, value=str(SCHEMA_VERSION)))
                connection.execute(insert(about).values(name=_CLUSTER_ID, value=_new_cluster_id()))
            else:
                _check_version(version)
            self._claim(connection)
            add_if_missing(connection, about, {"name": _CLUSTER_KEY, "value": secrets.token_hex(32)})
            self.cluster_id = _metadata_value(connection, _CLUSTER_ID) or ""
            if is_checked_only:
                transaction.rollback()

    def _claim(self, connection: Connection) -> None:
        """Raise if another cluster uses this catalog, since it would apply this cluster's declarations."""
        if not self._cluster:
            return
        add_if_missing(connection, about, {"name": _CLUSTER_NAME, "value": self._cluster})
        name = _metadata_value(connection, _CLUSTER_NAME)
        if name != self._cluster:
            raise ClusterMismatch(
                f"the catalog belongs to the cluster {name!r}, but this node is started for {self._cluster!r}; "
                f"pass --cluster {name}, or another database with --catalog"
            )

    @classmethod
    def of_file(cls, path: Path) -> Catalog:
        catalog = cls(f"sqlite:///{path}")
        catalog.prepare()
        return catalog

    def take_over(self, source: Catalog, *, flush: str) -> None:
        """Replace the contents with those of another catalog, including its counters and cluster id."""
        with source._read() as theirs, self._change() as mine:
            copy_tables(theirs, mine, flush=flush)
            here = about.c.name == _CLUSTER_ID
            mine.execute(update(about).where(here).values(value=source.cluster_id))
        self.cluster_id = source.cluster_id

    def read_cluster_id(self) -> str:
        """Return the id that clients see, which an existing catalog has once it is prepared."""
        return self.cluster_id

    def is_empty(self) -> bool:
        with self._read() as connection:
            return is_empty(connection)

    def restore(self, cluster_id: str, known: Iterable[Topic]) -> int:
        """Make this the catalog of a cluster whose own was lost: take its id, and topics that are not declared here.

        Return how many topics were added. One whose name was taken by another topic meanwhile is skipped.
        """
        added = 0
        with self._change() as connection:
            here = about.c.name == _CLUSTER_ID
            connection.execute(update(about).where(here).values(value=cluster_id))
            for topic in known:
                inserted = insert_into(connection, topics).values(**row_of(topic)).on_conflict_do_nothing()
                added += len(connection.execute(inserted.returning(topics.c.topic_id)).all())
        self.cluster_id = cluster_id
        return added

    def topics(self) -> list[Topic]:
        """Return every topic, by name."""
        with self._read() as connection:
            return [declared_of(Topic, row) for row in connection.execute(select(topics).order_by(topics.c.name))]

    def topics_with(self, topic_ids: Collection[UUID]) -> list[Topic]:
        """Return the declared topics with these ids."""
        ids = sorted(map(str, topic_ids))
        with self._read() as connection:
            return [
                declared_of(Topic, row)
                for here in in_parts(topics.c.topic_id, ids)
                for row in connection.execute(select(topics).where(here))
            ]

    def add_topics(self, declared: Sequence[Topic]) -> set[UUID]:
        """Declare topics, durably; return those whose names and ids were free.

        Raise `UnknownMirror` if one is written by a mirror that does not exist.
        """
        # All nodes lock the names in the same order, so that they cannot deadlock.
        rows = [row_of(topic) for topic in sorted(declared, key=lambda topic: topic.name)]
        try:
            with self._change() as connection:
                for mirror in sorted({topic.mirror for topic in declared if topic.mirror}):
                    require_mirror(connection, mirror)
                connection.execute(insert(topics), rows)
        except IntegrityError:
            return set() if len(declared) == 1 else {added for topic in declared for added in self.add_topics([topic])}
        return {topic.topic_id for topic in declared}

    @_with_reserve
    def alter_topic(self, topic_id: UUID, change: Callable[[Topic], Topic]) -> Topic:
        """Store the partitions and overrides that `change` computes from a topic as it is declared now.

        Several nodes may do so concurrently: each sees the changes of the previous one. Raise `UnknownMirror` if the
        topic is to be written by a mirror that does not exist.
        """
        with self._change() as connection:
            here = topics.c.topic_id == str(topic_id)
            row = connection.execute(select(topics).where(here).with_for_update()).first()
            if row is None:
                raise UnknownTopic(f"topic {topic_id} is not in the catalog")
            before = declared_of(Topic, row)
            changed = change(before)
            if changed.mirror not in ("", before.mirror):
                require_mirror(connection, changed.mirror)
            connection.execute(update(topics).where(here).values(row_of(changed)))
            return changed

    @_with_reserve
    def delete_topics(self, doomed: Sequence[Topic], *, now_ms: int) -> set[UUID]:
        """Delete topics and write the records that allow their files to be removed; return those that existed."""
        with self._change() as connection:
            # All nodes lock them in the same order, so that they cannot deadlock.
            deleted = [
                topic
                for topic in sorted(doomed, key=lambda topic: topic.name)
                if connection.execute(delete(topics).where(topics.c.topic_id == str(topic.topic_id))).rowcount == 1
            ]
            rows = [{"topic_id": str(topic.topic_id), "name": topic.name, "deleted_ms": now_ms} for topic in deleted]
            if rows:
                connection.execute(insert(deleted_topics), rows)
        return {topic.topic_id for topic in deleted}

    def deleted_topic_ids(self) -> set[UUID]:
        """Return the topics whose files may be removed."""
        with self._read() as connection:
            return {UUID(row.topic_id) for row in connection.execute(select(deleted_topics.c.topic_id))}

    def forget_deleted(self, topic_ids: Iterable[UUID]) -> None:
        """Drop the records of deleted topics whose files are gone."""
        self._forget_deleted(list(map(str, topic_ids)))
        self._reserve.fill()

    @_with_reserve
    def _forget_deleted(self, topic_ids: Sequence[str]) -> None:
        with self._change() as connection:
            for here in in_parts(deleted_topics.c.topic_id, topic_ids):
                connection.execute(delete(deleted_topics).where(here))

    def take_producer_ids(self, count: int) -> int:
        """Allocate some producer ids, which are never allocated again, and return the first.

        They come from the range of this cluster, so that they never collide with those of a mirrored cluster.
        """
        return self.take_block(_PRODUCER_IDS, count, first=first_producer_id(self.cluster_id))

    def take_block(self, counter: str, size: int, *, first: int = 0) -> int:
        """Allocate `size` numbers of a counter and return the first; they are never allocated again."""
        with self._change() as connection:
            return take_numbers(connection, counter, size, first=first)

    def client_quotas(self) -> dict[QuotaEntity, dict[str, float]]:
        with self._read() as connection:
            return {_parse_entity(row.entity): dict(row.limits) for row in connection.execute(select(client_quotas))}

    def change_client_quotas(self, changes: Mapping[QuotaEntity, Mapping[str, float]]) -> None:
        """Store the limits of some entities, all or none; an entity without limits is removed."""
        with self._change() as connection:
            # In a fixed order, so that nodes cannot deadlock.
            for entity, limits in sorted(
                (json.dumps(entity.parts), dict(limits)) for entity, limits in changes.items()
            ):
                if limits:
                    put_row(connection, client_quotas, {"entity": entity, "limits": limits})
                else:
                    connection.execute(delete(client_quotas).where(client_quotas.c.entity == entity))

    def group_settings(self) -> dict[str, dict[str, str]]:
        with self._read() as connection:
            return {row.group_id: dict(row.overrides) for row in connection.execute(select(group_settings))}

    def change_group_settings(self, group_id: str, overrides: Mapping[str, str]) -> None:
        """Store the settings of a group; a group without any is removed."""
        with self._change() as connection:
            if overrides:
                put_row(connection, group_settings, {"group_id": group_id, "overrides": dict(overrides)})
            else:
                connection.execute(delete(group_settings).where(group_settings.c.group_id == group_id))

    def broker_settings(self) -> dict[str, dict[str, str]]:
        with self._read() as connection:
            return {row.scope: dict(row.overrides) for row in connection.execute(select(broker_settings))}

    @_with_reserve
    def change_broker_settings(
        self, scope: str, changes: Mapping[str, str | None], *, replace: bool = False
    ) -> dict[str, str]:
        """Change the settings of a scope, computed from the stored ones; None unsets one, `replace` all others."""
        with self._change() as connection:
            add_if_missing(connection, broker_settings, {"scope": scope, "overrides": {}})
            here = broker_settings.c.scope == scope
            row = connection.execute(select(broker_settings).where(here).with_for_update()).one()
            overrides = with_changes({} if replace else row.overrides, changes)
            connection.execute(update(broker_settings).where(here).values(overrides=overrides))
            return overrides

    def security(self) -> DeclaredSecurity:
        with self._read() as connection:
            return DeclaredSecurity(
                cluster_key=bytes.fromhex(_metadata_value(connection, _CLUSTER_KEY) or ""),
                credentials=tuple(
                    declared_of(ScramCredential, row) for row in connection.execute(select(scram_credentials))
                ),
                tokens=tuple(declared_of(ApiToken, row) for row in connection.execute(select(api_tokens))),
                acls=frozenset(declared_of(Acl, row) for row in connection.execute(select(acls))),
            )

    def has_token(self, token_ids: Sequence[str]) -> bool:
        """Return whether one of some API tokens exists."""
        with self._read() as connection:
            return any(
                connection.execute(select(api_tokens.c.token_id).where(here).limit(1)).first() is not None
                for here in in_parts(api_tokens.c.token_id, token_ids)
            )

    def change_security(self, change: SecurityChange, sightings: SightingChange | None = None) -> None:
        """Store a change of users, tokens and access rules atomically.

        `sightings` has what a mirror saw at its source, if the change comes from a mirror.
        """
        with self._change() as connection:
            if sightings is not None:
                store_sightings(connection, sightings)
            for user, mechanism in sorted(change.delete_credentials):
                here = (scram_credentials.c.user == user) & (scram_credentials.c.mechanism == mechanism)
                connection.execute(delete(scram_credentials).where(here))
            for credential in sorted(
                change.put_credentials, key=lambda credential: (credential.user, credential.mechanism)
            ):
                put_row(connection, scram_credentials, row_of(credential))
            _disown_deleted(connection, change)
            _delete_tokens(connection, change)
            for token in change.put_tokens:
                connection.execute(insert(api_tokens).values(row_of(token)))
            for acl_id in sorted(map(_acl_id, change.delete_acls)):
                connection.execute(delete(acls).where(acls.c.acl_id == acl_id))
            for acl_id, acl in sorted((_acl_id(acl), acl) for acl in change.add_acls):
                add_if_missing(connection, acls, {"acl_id": acl_id, **dataclasses.asdict(acl)})

    def subscriptions(self) -> list[Subscription]:
        """Return every subscription, by name."""
        with self._read() as connection:
            rows = connection.execute(select(subscriptions).order_by(subscriptions.c.name)).all()
        return [self._sealing.open_all(declared_of(Subscription, row)) for row in rows]

    def subscriptions_named(self, names: Sequence[str]) -> list[Subscription]:
        with self._read() as connection:
            return [
                self._sealing.open_all(declared_of(Subscription, row))
                for here in in_parts(subscriptions.c.name, names)
                for row in connection.execute(select(subscriptions).where(here))
            ]

    def add_subscription(self, subscription: Subscription) -> None:
        self._add(subscription, _insert_subscription, SubscriptionExists)

    def alter_subscription(self, subscription_id: UUID, change: Callable[[Subscription], Subscription]) -> Subscription:
        here = subscriptions.c.subscription_id == str(subscription_id)

        def hold(connection: Connection) -> Subscription:
            row = connection.execute(select(subscriptions).where(here).with_for_update()).first()
            if row is None:
                raise UnknownSubscription(f"subscription {subscription_id} is not in the catalog")
            return declared_of(Subscription, row)

        def store(connection: Connection, _before: Subscription, after: Subscription) -> None:
            connection.execute(update(subscriptions).where(here).values(row_of(after)))

        return self._alter(hold, store, change)

    def delete_subscription(self, subscription: Subscription, *, now_ms: int) -> None:
        """Delete a subscription and write the record that allows its state to be removed."""
        with self._change() as connection:
            here = subscriptions.c.subscription_id == str(subscription.subscription_id)
            if connection.execute(delete(subscriptions).where(here)).rowcount != 1:
                raise UnknownSubscription(f"subscription {subscription.name!r} is not in the catalog")
            connection.execute(
                insert(deleted_subscriptions).values(
                    subscription_id=str(subscription.subscription_id), name=subscription.name, deleted_ms=now_ms
                )
            )

    def deleted_subscriptions(self) -> dict[UUID, int]:
        """Return the subscriptions whose state may be removed, and since when."""
        with self._read() as connection:
            return {
                UUID(row.subscription_id): row.deleted_ms for row in connection.execute(select(deleted_subscriptions))
            }

    def forget_deleted_subscription(self, subscription_id: UUID) -> None:
        """Drop the deletion record once the state is gone everywhere."""
        here = deleted_subscriptions.c.subscription_id == str(subscription_id)
        with self._change() as connection:
            connection.execute(delete(deleted_subscriptions).where(here))

    def pipelines(self) -> list[Pipeline]:
        """Return every pipeline with its rules, by name."""
        with self._read() as connection:
            return [self._sealing.open_all(pipeline) for pipeline in read_pipelines(connection)]

    def pipeline_named(self, name: str) -> Pipeline | None:
        with self._read() as connection:
            pipeline = read_pipeline_named(connection, name)
        return None if pipeline is None else self._sealing.open_all(pipeline)

    def add_pipeline(self, pipeline: Pipeline) -> None:
        self._add(pipeline, insert_pipeline, PipelineExists)

    def alter_pipeline(self, pipeline_id: UUID, change: Callable[[Pipeline], Pipeline]) -> Pipeline:
        return self._alter(
            lambda connection: lock_pipeline(connection, pipeline_id), update_pipeline, _with_version_bump(change)
        )

    def secrets(self) -> list[SealedSecret]:
        """Return every secret, without its value, by noun and name."""
        with self._read() as connection:
            rows = connection.execute(select(subscriptions).order_by(subscriptions.c.name)).all()
            declarations: list[Sealable] = [
                *(declared_of(Subscription, row) for row in rows),
                *read_pipelines(connection),
                *read_mirrors(connection),
            ]
        return [secret for declaration in declarations for secret in self._sealing.describe(declaration)]

    def reseal(self) -> int:
        """Reseal secrets of older keys with the newest key; return how many."""
        count = 0
        with self._change() as connection:
            kinds: tuple[tuple[Table, Callable[[], Iterable[Sealable]]], ...] = (
                (
                    subscriptions,
                    lambda: [declared_of(Subscription, row) for row in connection.execute(select(subscriptions)).all()],
                ),
                (pipelines, lambda: read_pipelines(connection)),
                (mirrors, lambda: read_mirrors(connection)),
            )
            for table, read in kinds:
                # Take the lock before reading what it protects.
                connection.execute(select(table.c.name).with_for_update())
                for stored in read():
                    overrides = self._sealing.reseal(stored)
                    changed = sum(overrides[name] != text for name, text in stored.overrides.items())
                    if changed:
                        connection.execute(update(table).where(table.c.name == stored.name).values(overrides=overrides))
                        count += changed
        return count

    def delete_pipeline(self, pipeline: Pipeline) -> None:
        with self._change() as connection:
            if not delete_pipeline(connection, pipeline.pipeline_id):
                raise UnknownPipeline(f"pipeline {pipeline.name!r} is not in the catalog")

    def mirrors(self) -> list[Mirror]:
        """Return every mirror, by name."""
        with self._read() as connection:
            return [self._sealing.open_all(mirror) for mirror in read_mirrors(connection)]

    def add_mirror(self, mirror: Mirror) -> None:
        self._add(mirror, insert_mirror, MirrorExists)

    def alter_mirror(self, mirror_id: UUID, change: Callable[[Mirror], Mirror]) -> Mirror:
        return self._alter(
            lambda connection: lock_mirror(connection, mirror_id), update_mirror, _with_version_bump(change)
        )

    def delete_mirror(self, mirror: Mirror) -> None:
        """Delete a mirror; raise `InvalidMirror` while it writes topics, which only it makes writable again."""
        with self._change() as connection:
            delete_mirror(connection, mirror.mirror_id)

    def claim_sightings(self, mirror_id: UUID, *, source: str, owner: str) -> dict[str, set[str]]:
        with self._change() as connection:
            return claim_sightings(connection, mirror_id, source=source, owner=owner)

    def store_sightings(self, change: SightingChange) -> None:
        with self._change() as connection:
            store_sightings(connection, change)

    def job_runs(self, pipeline_id: UUID, *, limit: int) -> list[JobRun]:
        with self._read() as connection:
            return read_runs(connection, pipeline_id, limit)

    def begin_job_run(self, run: JobRun) -> bool:
        with self._change() as connection:
            return begin_run(connection, run)

    def update_job_run(self, before: JobRun, after: JobRun) -> bool:
        with self._change() as connection:
            return update_run(connection, before, after)

    def schema_changes(self, since: int) -> SchemaChanges:
        """Return the rows that the schema registry stored after a change."""
        with self._read() as connection:
            return read_schema_changes(connection, since)

    def change_schemas(
        self, since: int, work: Callable[[SchemaTransaction], None], sightings: SightingChange | None = None
    ) -> SchemaChanges:
        """Change the schema registry in an exclusive transaction; return all changes.

        `sightings` has what a mirror saw at its source, if the change comes from a mirror.
        """
        with self._change() as connection:
            if sightings is not None:
                store_sightings(connection, sightings)
            work(SchemaTransaction(connection))
            return read_schema_changes(connection, since)

    def _add(self, declared: N, store: Callable[[Connection, N], None], already_exists: type[MillstreamError]) -> None:
        """Declare something with its secrets sealed."""
        stored = dataclasses.replace(declared, overrides=self._sealing.seal_all(declared))
        try:
            with self._change() as connection:
                store(connection, stored)
        except IntegrityError as error:
            raise already_exists(f"{declared.noun} {declared.name!r} already exists") from error

    def _alter(
        self,
        hold: Callable[[Connection], N],
        store: Callable[[Connection, N, N], None],
        change: Callable[[N], N],
    ) -> N:
        """Apply `change` to the current declaration, and store the result with its secrets sealed; `hold` locks it."""
        with self._change() as connection:
            stored = hold(connection)
            before = self._sealing.open_all(stored)
            after = change(before)
            if after != before:
                sealed = self._sealing.seal_all(after, before, stored.overrides)
                store(connection, before, dataclasses.replace(after, overrides=sealed))
            return after

    @contextmanager
    def _read(self) -> Iterator[Connection]:
        with self._translate_errors("read"), self._engine.connect() as connection:
            yield connection

    @contextmanager
    def _change(self) -> Iterator[Connection]:
        with self._translate_errors("changed"), self._changing.begin() as connection:
            yield connection

    @contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        """Convert errors of an unavailable database or a full disk to errors for clients."""
        try:
            yield
        except _AWAY as error:
            cause = getattr(error, "orig", None) or error
            if self._shared:
                raise _unavailable_error(what, cause) from error
            raise StorageFailure(
                f"the catalog could not be {what}: {cause}; free space on the disk of the data folder"
            ) from error

    def close(self) -> None:
        self._engine.dispose()


def _unavailable_error(what: str, cause: object) -> CatalogUnavailable:
    summary = f"the catalog could not be {what}: {_first_line(cause)}"
    if _DENIED.search(str(cause)):
        return CatalogDenied(f"{summary}; check user, password and database of --catalog")
    return CatalogUnavailable(f"{summary}; it recovers when PostgreSQL is back")


def _first_line(error: object) -> str:
    """Return the first line of an error, without the advice that drivers add."""
    return str(error).strip().partition("\n")[0]


def _metadata_value(connection: Connection, name: str) -> str | None:
    return connection.execute(select(about.c.value).where(about.c.name == name)).scalar_one_or_none()


def _check_version(stored: str) -> None:
    if stored != str(SCHEMA_VERSION):
        raise DataFolderInvalid(
            f"the catalog has schema {stored}, and this Millstream reads schema {SCHEMA_VERSION}; start the version "
            "that wrote it, or pass an empty --data or --catalog"
        )


def _parse_entity(text: str) -> QuotaEntity:
    return QuotaEntity(tuple((kind, name) for kind, name in json.loads(text)))


def _disown_deleted(connection: Connection, change: SecurityChange) -> None:
    """Delete the tokens of users that no longer have a password, and mark the items that they own."""
    for user in sorted({user for user, _ in change.delete_credentials}):
        if connection.execute(select(scram_credentials).where(scram_credentials.c.user == user)).first() is None:
            owner = user_principal(user)
            connection.execute(delete(api_tokens).where(api_tokens.c.owner == owner))
            for table, more in ((subscriptions, {}), (pipelines, {"version": pipelines.c.version + 1})):
                owned = (table.c.owner == owner) & table.c.owner_has_password
                connection.execute(update(table).where(owned).values(owner=f"{owner}{DELETED_OWNER}", **more))


def _delete_tokens(connection: Connection, change: SecurityChange) -> None:
    for here in in_parts(api_tokens.c.token_id, sorted(change.delete_tokens)):
        connection.execute(delete(api_tokens).where(here))


def _acl_id(acl: Acl) -> str:
    return hashlib.sha256(json.dumps(dataclasses.astuple(acl)).encode()).hexdigest()


def _new_cluster_id() -> str:
    # Kafka shows cluster ids as 22 characters of URL-safe base 64, and some tools expect that.
    return base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()


def _insert_subscription(connection: Connection, subscription: Subscription) -> None:
    connection.execute(insert(subscriptions).values(row_of(subscription)))
    # A mirror may declare one again that was deleted: its state is not to be removed any more.
    again = deleted_subscriptions.c.subscription_id == str(subscription.subscription_id)
    connection.execute(delete(deleted_subscriptions).where(again))


def _with_version_bump(change: Callable[[V], V]) -> Callable[[V], V]:
    """Increment the version with each change."""

    def counted(now: V) -> V:
        after = change(now)
        return after if after == now else dataclasses.replace(after, version=now.version + 1)

    return counted
