"""Copies the schemas and access rules of the source, if the mirror is set to, into a cluster that had none at first.

A schema keeps its id and its version, since records refer to it by its id. The catalog records what was seen at the
source (*sightings*). A mirror deletes only what is recorded there; schemas and rules that were declared on this cluster
are neither overwritten nor deleted, and `mirror describe` lists them.

A node of the source may respond before it has learned of a change, so a schema or rule is deleted here only after it
was missing in several consecutive responses.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence, Set
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Final

from kio.schema.errors import ErrorCode

from millstream.broker.mirror.source import Source
from millstream.broker.schemas.registry import SchemaRegistry
from millstream.broker.security.state import SecurityState
from millstream.core.acl import Acl
from millstream.core.errors import InvalidMirror, NotCoordinator, ProtocolViolation, RequestRefused
from millstream.core.mirror import MirrorSettings, SightingChange, listed
from millstream.core.schema import (
    QualifiedSubject,
    SchemaContent,
    SchemaReference,
    StoredSchema,
    SubjectSettings,
    SubjectVersion,
)
from millstream.protocol.private.mirror_messages import RegistryRequest, RegistryResponse, SettingsMessage
from millstream.protocol.private.schema_messages import SchemaMessage

if TYPE_CHECKING:
    from millstream.broker.mirror.service import MirrorRun

PAGE_BYTES: Final = 4 * 1024 * 1024
REGISTRY_CHARACTERS_MAX: Final = 512 * 1024 * 1024
"""More schemas than this are not copied."""
ABSENT_TIMES: Final = 3
"""In how many consecutive responses of the source something has to be missing before it is deleted here."""
SCHEMAS: Final = "schemas"
ACLS: Final = "acls"
_UNKNOWN: Final = -1


def require_enforced(rules: SecurityState | None) -> SecurityState:
    """Return the access rules of this cluster; raise `InvalidMirror` if it does not enforce any."""
    if rules is None:
        raise InvalidMirror(
            "access rules cannot be mirrored to a cluster that does not enforce them, because its clients need not "
            "authenticate; start its nodes with --auth required, or mirror without acls"
        )
    return rules


def check_declared(settings: MirrorSettings, schemas: SchemaRegistry, rules: SecurityState | None) -> None:
    """Raise `InvalidMirror` if schemas or access rules are to be copied and this cluster already has some."""
    if settings.schemas and (subjects := schemas.subjects()):
        raise InvalidMirror(
            f"the schema registry here has {len(subjects)} subjects (such as {str(subjects[0])!r}), whose ids may be "
            "those of other schemas at the source; delete them permanently, or mirror without schemas"
        )
    if settings.acls and (acls := require_enforced(rules).snapshot.acls):
        raise InvalidMirror(
            f"there are {len(acls)} access rules here; delete them to take those of the source, or mirror without acls"
        )


def registry_page(registry: SchemaRegistry, request: RegistryRequest) -> RegistryResponse:
    """As a source: return a part of the registry, or nothing if it has not changed since."""
    last = registry.last_change
    if request.since == last:
        return RegistryResponse(last=last)
    page: list[SchemaMessage] = []
    size = position = 0
    for subject in registry.subjects():
        for version in registry.exact_versions(subject):
            position += 1
            if position <= request.offset:
                continue
            if size > PAGE_BYTES:
                return RegistryResponse(last=last, schemas=page, has_more=True)
            schema = registry.schema_of(version)
            size += len(schema.content.text)
            page.append(
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
        SettingsMessage(subject=str(setting.subject), config=dict(setting.config), mode=setting.mode)
        for setting in registry.all_settings()
    ]
    return RegistryResponse(last=last, schemas=page, settings=settings)


class Sightings:
    """The schemas or access rules that the source has had, by hash, and in how many checks in a row each was missing.

    The hashes are kept in the catalog, so that another controller continues with them; the counts restart at zero.
    """

    def __init__(self, seen: Iterable[str], owner: str) -> None:
        self.owner = owner
        """The claim of this node, which ends when another node makes one."""
        self._absences: dict[str, int] = dict.fromkeys(seen, 0)

    def __contains__(self, item_id: str) -> bool:
        return item_id in self._absences

    @property
    def has_absent(self) -> bool:
        """Whether something is missing that the source has had."""
        return any(self._absences.values())

    def compare(self, current: Set[str]) -> tuple[frozenset[str], frozenset[str]]:
        """Process one complete response of the source; return what is new in it, and what is to be deleted here."""
        for item_id, times in self._absences.items():
            self._absences[item_id] = 0 if item_id in current else times + 1
        missing = frozenset(item_id for item_id, times in self._absences.items() if times >= ABSENT_TIMES)
        return frozenset(current - self._absences.keys()), missing

    def apply(self, change: SightingChange) -> None:
        """Apply a change that was stored. An item that is forgotten and declared here again is not the source's."""
        self._absences.update(dict.fromkeys(change.seen, 0))
        for item_id in change.forgotten:
            self._absences.pop(item_id, None)


class DeclaredCopies:
    """Keeps schemas and access rules equal to the source's, on the controller of the target."""

    def __init__(self, run: MirrorRun, source: Source) -> None:
        self._run = run
        self._source = source
        self._schemas = run.service.schemas
        self._rules = run.service.rules
        self._last = _UNKNOWN
        """The latest change of the source's registry that was copied."""
        self._sightings_by_kind: dict[str, Sightings] = {}
        """The items that were seen, by kind; empty before this node has made a claim, and after another node did."""
        self._claiming = asyncio.Lock()

    async def sync_schemas(self) -> None:
        """Copy the source's registry if it has changed."""
        seen = await self._sightings(SCHEMAS)
        pages: list[SchemaMessage] = []
        first, size = _UNKNOWN, 0
        # What is missing has to be looked for again, although nothing has changed since.
        since = _UNKNOWN if seen.has_absent else self._last
        while True:
            request = RegistryRequest(since=since, offset=len(pages))
            page = await self._source.ask(None, request, waits=True)
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
                # Pages are cut by position, which a change shifts: start over at the next check.
                return
            first = page.last
            pages += page.schemas
            size += sum(len(schema.schema) for schema in page.schemas)
            if not page.has_more:
                break
            if not page.schemas or size > REGISTRY_CHARACTERS_MAX:
                raise ProtocolViolation(
                    f"the schema registry of the source does not end after {len(pages)} versions with {size} characters"
                )
        self._run.notes.pop("schemas behind", None)
        versions = {_version_id(version.subject, version.version): version for version in map(_to_version, pages)}
        settings = [
            SubjectSettings(subject=QualifiedSubject.parse(setting.subject), config=setting.config, mode=setting.mode)
            for setting in page.settings
        ]
        subjects = versions.keys() | {_settings_id(setting.subject) for setting in settings}
        async with self._sighting_change(SCHEMAS, seen, subjects) as change:
            here = self._versions_here()
            to_delete = [here[item_id] for item_id in change.forgotten if item_id in here]
            set_here = [setting.subject for setting in self._schemas.all_settings()]
            settings += [
                SubjectSettings(subject=subject) for subject in set_here if _settings_id(subject) in change.forgotten
            ]
            schemas = [_to_schema(page) for page in pages]
            await self._schemas.follow(
                schemas, list(versions.values()), settings, to_delete=to_delete, sightings=change
            )
        own = [place for item_id, place in self._versions_here().items() if item_id not in seen]
        self._update_note("schemas", "schemas", [f"{subject} version {version}" for subject, version in own])
        self._last = page.last

    async def sync_acls(self) -> None:
        """Copy the source's access rules if they have changed."""
        rules = require_enforced(self._rules)
        seen = await self._sightings(ACLS)
        try:
            by_id = {_acl_id(acl): acl for acl in await self._source.acls()}
        except RequestRefused as error:
            if error.code != ErrorCode.security_disabled:
                raise
            raise InvalidMirror(
                "the source has no access rules to mirror, because its clients need not authenticate; start its nodes "
                f"with --auth required, or run `millstream mirror update {self._run.mirror.name} --set acls=false`"
            ) from None
        here = {_acl_id(acl): acl for acl in rules.snapshot.acls}
        async with self._sighting_change(ACLS, seen, by_id.keys()) as change:
            to_delete = [here[item_id] for item_id in change.forgotten if item_id in here]
            await rules.follow(by_id.values(), to_delete, change)
        own = [acl for item_id, acl in here.items() if item_id not in seen and item_id not in change.forgotten]
        self._update_note("acls", "access rules", list(map(str, own)))

    def _versions_here(self) -> dict[str, tuple[QualifiedSubject, int]]:
        return {
            _version_id(subject, version.version): (subject, version.version)
            for subject in self._schemas.subjects()
            for version in self._schemas.exact_versions(subject)
        }

    async def _sightings(self, kind: str) -> Sightings:
        """Return the sightings at the source, and claim them for this node."""
        async with self._claiming:
            if not self._sightings_by_kind:
                owner = uuid.uuid4().hex
                sightings = await self._run.service.mirrors.claim_sightings(
                    self._run.mirror, source=self._source.cluster_id, owner=owner
                )
                self._sightings_by_kind = {
                    owned_kind: Sightings(sightings.get(owned_kind, ()), owner) for owned_kind in (SCHEMAS, ACLS)
                }
                self._last = _UNKNOWN
            return self._sightings_by_kind[kind]

    @asynccontextmanager
    async def _sighting_change(self, kind: str, seen: Sightings, current: Set[str]) -> AsyncIterator[SightingChange]:
        """Yield the changes of a response of the source, which have to be stored together with the copies."""
        fresh, missing = seen.compare(current)
        change = SightingChange(
            mirror_id=self._run.mirror.mirror_id, owner=seen.owner, kind=kind, seen=fresh, forgotten=missing
        )
        try:
            yield change
        except NotCoordinator:
            # Another node was the controller; if this one is again, it begins with what is stored now.
            if self._sightings_by_kind.get(kind) is seen:
                self._sightings_by_kind = {}
            raise
        seen.apply(change)

    def _update_note(self, key: str, noun: str, unknown: Sequence[str]) -> None:
        if unknown:
            self._run.notes[key] = (
                f"{noun} that the source does not have stay here: {listed(unknown)}; "
                "delete those that were deleted at the source yourself"
            )
        else:
            self._run.notes.pop(key, None)


def _to_version(message: SchemaMessage) -> SubjectVersion:
    subject = QualifiedSubject.parse(message.subject)
    return SubjectVersion(subject=subject, version=message.version, schema_id=message.id, is_deleted=message.deleted)


def _to_schema(message: SchemaMessage) -> StoredSchema:
    content = SchemaContent(
        schema_type=message.schema_type,
        text=message.schema,
        references=tuple(SchemaReference(*reference) for reference in message.references),
        metadata=message.metadata,
        rule_set=message.rule_set,
    )
    context = QualifiedSubject.parse(message.subject).context
    return StoredSchema(context=context, schema_id=message.id, guid=message.guid, content=content)


def _version_id(subject: QualifiedSubject, version: int) -> str:
    return _hash([subject.context, subject.name, version])


def _settings_id(subject: QualifiedSubject) -> str:
    return _hash([subject.context, subject.name])


def _acl_id(acl: Acl) -> str:
    return _hash(
        [acl.resource_type, acl.resource_name, acl.pattern, acl.principal, acl.host, acl.operation, acl.permission]
    )


def _hash(parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
