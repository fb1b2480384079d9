"""Schemas and access rules of the source, copied by choice into a cluster that has none of its own.

A schema keeps its id and its version, since records refer to it by its id. What exists here and was never seen at the
source is left alone and reported: nothing that somebody declared here is overwritten or deleted.

Any node of the source may answer, and one may know less than another. So what a single answer lacks is not deleted yet.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import TYPE_CHECKING, Final, Generic, TypeVar

from millstream.broker.mirror.source import Source
from millstream.broker.schemas.registry import SchemaRegistry
from millstream.broker.security.state import SecurityState
from millstream.core.acl import Acl, AclFilter
from millstream.core.errors import InvalidMirror
from millstream.core.mirror import MirrorSettings
from millstream.core.schema import (
    QualifiedSubject,
    SchemaContent,
    SchemaReference,
    StoredSchema,
    SubjectSettings,
    SubjectVersion,
)
from millstream.protocol.private.mirror_messages import REGISTRY_KEY, RegistryRequest, RegistryResponse, SettingsMessage
from millstream.protocol.private.schema_messages import SchemaMessage

if TYPE_CHECKING:
    from millstream.broker.mirror.service import MirrorRun

PAGE_BYTES: Final = 4 * 1024 * 1024
ABSENT_TIMES: Final = 3
"""How often in a row something has to be missing at the source before it is deleted here."""
SHOWN_MAX: Final = 5
_UNKNOWN: Final = -1
T = TypeVar("T", bound=Hashable)


def check_declared(settings: MirrorSettings, schemas: SchemaRegistry, security: SecurityState) -> None:
    """Raise `InvalidMirror` if something is to be copied of which this cluster has its own."""
    if settings.schemas and (subjects := schemas.subjects()):
        raise InvalidMirror(
            f"the schema registry here has {len(subjects)} subjects (such as {str(subjects[0])!r}), whose ids may be "
            "those of other schemas at the source; delete them permanently, or mirror without schemas"
        )
    if settings.acls and (acls := security.snapshot.acls):
        raise InvalidMirror(
            f"there are {len(acls)} access rules here; delete them to take those of the source, or mirror without acls"
        )


def registry_page(registry: SchemaRegistry, request: RegistryRequest) -> RegistryResponse:
    """As a source: return a part of the registry, or nothing if it has not changed since."""
    last = registry.last_change
    if request.since == last:
        return RegistryResponse(last=last)
    found: list[SchemaMessage] = []
    size = position = 0
    for subject in registry.subjects():
        for version in registry.versions(subject):
            position += 1
            if position <= request.offset:
                continue
            if size > PAGE_BYTES:
                return RegistryResponse(last=last, schemas=found, has_more=True)
            schema = registry.schema_of(version)
            size += len(schema.content.text)
            found.append(
                SchemaMessage(
                    id=schema.schema_id,
                    guid=schema.guid,
                    schema_type=schema.content.schema_type,
                    schema=schema.content.text,
                    references=schema.content.references,
                    metadata=schema.content.metadata,
                    rule_set=schema.content.rule_set,
                    subject=str(subject),
                    version=version.version,
                    deleted=version.is_deleted,
                )
            )
    settings = [
        SettingsMessage(subject=str(one.subject), config=dict(one.config), mode=one.mode)
        for one in registry.all_settings()
    ]
    return RegistryResponse(last=last, schemas=found, settings=settings)


class Sightings(Generic[T]):
    """What the source has had, and how often in a row each was missing since."""

    def __init__(self) -> None:
        self._absences: dict[T, int] = {}

    def __contains__(self, one: T) -> bool:
        return one in self._absences

    @property
    def has_absent(self) -> bool:
        """Whether something is missing that the source has had."""
        return any(self._absences.values())

    def note(self, found: Collection[T]) -> None:
        """Take in one complete answer of the source."""
        for one in self._absences:
            self._absences[one] += 1
        self._absences.update(dict.fromkeys(found, 0))

    def gone(self) -> set[T]:
        """Return what was missing often enough to be deleted here."""
        return {one for one, times in self._absences.items() if times >= ABSENT_TIMES}

    def forget(self, gone: Collection[T]) -> None:
        """Forget what was deleted here: if it is declared here again, it is no longer the source's."""
        for one in gone:
            self._absences.pop(one, None)


class SeenAtSource:
    """What the owner of a mirror has seen at one source; kept while the node runs, across connections and pauses."""

    def __init__(self, cluster_id: str) -> None:
        self.cluster_id = cluster_id
        self.versions: Sightings[tuple[QualifiedSubject, int]] = Sightings()
        self.acls: Sightings[Acl] = Sightings()


class DeclaredCopies:
    """Keeps schemas and access rules equal to the source's, for the owner of a mirror."""

    def __init__(self, run: MirrorRun, source: Source) -> None:
        self._run = run
        self._source = source
        self._schemas = run.service.schemas
        self._security = run.service.security
        self._last = _UNKNOWN
        """The latest change of the source's registry that was copied, on this connection."""
        self._seen = run.service.seen_at(run.mirror, source.cluster_id)

    async def sync_schemas(self) -> None:
        """Copy the source's registry if it has changed."""
        pages: list[SchemaMessage] = []
        seen, first = self._seen.versions, _UNKNOWN
        # What is missing has to be looked for again, although nothing has changed since.
        since = _UNKNOWN if seen.has_absent else self._last
        while True:
            asked = RegistryRequest(since=since, offset=len(pages))
            page = await self._source.ask(None, REGISTRY_KEY, asked, RegistryResponse, waits=True)
            if page.last < self._last:
                self._run.notes["schemas behind"] = (
                    f"a node of the source has the schema registry as of change {page.last}, which is before "
                    f"{self._last}, and is not followed; if the source was restored, pause the mirror and resume it"
                )
                return
            if page.last == since:
                self._run.notes.pop("schemas behind", None)
                return
            if pages and page.last != first:
                # Pages are cut by position, which a change shifts: start over at the next look.
                return
            first = page.last
            pages += page.schemas
            if not page.has_more:
                break
        self._run.notes.pop("schemas behind", None)
        versions = [_version(one) for one in pages]
        seen.note({(one.subject, one.version) for one in versions})
        gone = seen.gone()
        settings = [
            SubjectSettings(subject=QualifiedSubject.parse(one.subject), config=one.config, mode=one.mode)
            for one in page.settings
        ]
        kept = await self._schemas.follow([_schema(one) for one in pages], versions, settings, seen=gone)
        seen.forget(gone)
        self._note("schemas", "schemas", [f"{place[0]} version {place[1]}" for place in kept if place not in seen])
        self._last = page.last

    async def sync_acls(self) -> None:
        """Copy the source's access rules if they have changed."""
        wanted = frozenset(await self._source.acls())
        here, seen = self._security.snapshot.acls, self._seen.acls
        seen.note(wanted)
        gone = seen.gone()
        await self._security.add_acls(wanted - here)
        for acl in here & gone:
            exact = AclFilter(
                resource_type=acl.resource_type,
                resource_name=acl.resource_name,
                pattern=acl.pattern,
                principal=acl.principal,
                host=acl.host,
                operation=acl.operation,
                permission=acl.permission,
            )
            await self._security.delete_acls(exact)
        self._note("acls", "access rules", sorted(str(acl) for acl in here - gone if acl not in seen))
        seen.forget(gone)

    def _note(self, key: str, noun: str, unknown: Sequence[str]) -> None:
        if unknown:
            more = f" and {len(unknown) - SHOWN_MAX} more" if len(unknown) > SHOWN_MAX else ""
            self._run.notes[key] = (
                f"{noun} that the source does not have stay here: {', '.join(unknown[:SHOWN_MAX])}{more}; "
                "delete by hand those that were deleted at the source"
            )
        else:
            self._run.notes.pop(key, None)


def _version(one: SchemaMessage) -> SubjectVersion:
    subject = QualifiedSubject.parse(one.subject)
    return SubjectVersion(subject=subject, version=one.version, schema_id=one.id, is_deleted=one.deleted)


def _schema(one: SchemaMessage) -> StoredSchema:
    content = SchemaContent(
        schema_type=one.schema_type,
        text=one.schema,
        references=tuple(SchemaReference(*reference) for reference in one.references),
        metadata=one.metadata,
        rule_set=one.rule_set,
    )
    context = QualifiedSubject.parse(one.subject).context
    return StoredSchema(context=context, schema_id=one.id, guid=one.guid, content=content)
