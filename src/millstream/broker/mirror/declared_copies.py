"""Schemas and access rules of the source, copied by choice into a cluster that has none of its own.

A schema keeps its id and its version, since records refer to it by its id. What exists here and was never seen at the
source is left alone and reported: nothing that somebody declared here is overwritten or deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

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
_UNKNOWN: Final = -1


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


class DeclaredCopies:
    """Keeps schemas and access rules equal to the source's, for the owner of a mirror."""

    def __init__(self, run: MirrorRun, source: Source) -> None:
        self._run = run
        self._source = source
        self._schemas = run.service.schemas
        self._security = run.service.security
        self._last = _UNKNOWN
        self._versions: set[tuple[QualifiedSubject, int]] = set()
        """The versions that were seen at the source."""
        self._acls: set[Acl] = set()

    async def sync_schemas(self) -> None:
        """Copy the source's registry if it has changed."""
        pages: list[SchemaMessage] = []
        while True:
            asked = RegistryRequest(since=self._last, offset=len(pages))
            page = await self._source.ask(None, REGISTRY_KEY, asked, RegistryResponse, waits=True)
            if page.last == self._last:
                return
            pages += page.schemas
            if not page.has_more:
                break
        versions = [_version(one) for one in pages]
        self._versions |= {(one.subject, one.version) for one in versions}
        settings = [
            SubjectSettings(subject=QualifiedSubject.parse(one.subject), config=one.config, mode=one.mode)
            for one in page.settings
        ]
        unknown = await self._schemas.follow([_schema(one) for one in pages], versions, settings, seen=self._versions)
        self._note("schemas", "the schema registry", [f"{subject} version {number}" for subject, number in unknown])
        self._last = page.last

    async def sync_acls(self) -> None:
        """Copy the source's access rules if they have changed."""
        wanted = frozenset(await self._source.acls())
        here = self._security.snapshot.acls
        self._acls |= wanted
        await self._security.add_acls(wanted - here)
        for acl in (here - wanted) & self._acls:
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
        self._note("acls", "the access rules", sorted(map(str, here - wanted - self._acls)))

    def _note(self, key: str, of: str, unknown: Sequence[str]) -> None:
        if unknown:
            self._run.notes[key] = f"{of} of this cluster has what the source has not: {', '.join(unknown[:5])}"
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
