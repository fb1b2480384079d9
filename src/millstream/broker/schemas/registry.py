"""The schema registry: every schema, version and setting in memory, changed through the catalog.

Reads are served from memory, also while the catalog is unavailable. A change is prepared from the state in memory,
and stored only if the subject has not changed in the catalog since; otherwise it is prepared again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import msgspec

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.catalog.schema_store import SchemaTransaction
from millstream.broker.cluster.declarations import Declarations
from millstream.broker.schemas.annotations import (
    ANNOTATIONS,
    CONFLUENT_VERSION,
    has_defaults,
    merge,
    parse_config,
    parse_metadata,
    parse_rule_set,
    property_of,
    with_version,
    without_version,
)
from millstream.broker.schemas.worker import (
    MESSAGE_BYTES_MAX,
    CheckRequest,
    ParseRequest,
    RenderRequest,
    Request,
    WorkerResponse,
)
from millstream.core.child_pool import RESPONSE_S_MAX, ChildDied, ChildPool, ChildTimedOut
from millstream.core.errors import MillstreamError, SchemaRegistryError
from millstream.core.ids import CONTEXT_CHARACTERS_MAX, SUBJECT_CHARACTERS_MAX
from millstream.core.mirror import SightingChange
from millstream.core.schema import (
    AVRO,
    DEFAULT_CONTEXT,
    DEFAULT_LEVEL,
    FORWARD,
    GLOBAL_CONTEXT,
    IMPORT,
    IMPORTED_ID_MAX,
    LEVEL,
    MODES,
    NUMBER_MAX,
    READONLY,
    READONLY_OVERRIDE,
    READWRITE,
    SCHEMA_TYPES,
    QualifiedSubject,
    RegistryCode,
    SchemaChanges,
    SchemaContent,
    SchemaReference,
    StoredSchema,
    SubjectSettings,
    SubjectVersion,
)
from millstream.core.setting import with_changes
from millstream.protocol.schemas.formats import COMPILED, ParsedTexts, SchemaText

_logger = logging.getLogger(__name__)

WORKER_MODULE: Final = "millstream.broker.schemas.worker"


T = TypeVar("T")


class SchemaExaminer:
    """Parses and compares schemas of all formats."""

    def __init__(self, *, examine_s: float = RESPONSE_S_MAX) -> None:
        self._children = ChildPool(WORKER_MODULE, noun="schemas", response_s=examine_s)

    async def parse(self, schema: SchemaText) -> ParsedTexts:
        """Return the canonical and the normalized text of a schema; raise `SchemaRegistryError` if it is invalid."""
        canonical, normalized = await self._send_request(ParseRequest(schema))
        return ParsedTexts(canonical, normalized)

    async def check(self, schema: SchemaText, earlier: Sequence[SchemaText], level: str) -> Sequence[str]:
        """Return why a schema is incompatible with earlier ones, given newest first."""
        return await self._send_request(CheckRequest(schema, earlier, level)) if earlier and level != "NONE" else ()

    async def render(self, schema: SchemaText, form: str) -> str:
        """Return a schema in another format."""
        (text,) = await self._send_request(RenderRequest(schema, form))
        return text

    async def close(self) -> None:
        await self._children.close()

    async def _send_request(self, request: Request) -> Sequence[str]:
        body = msgspec.msgpack.encode(request)
        if len(body) > MESSAGE_BYTES_MAX:
            raise _invalid_schema_error(
                f"a schema with its references and earlier versions takes over {MESSAGE_BYTES_MAX} bytes"
            )
        try:
            response = msgspec.msgpack.decode(await self._children.request(body), type=WorkerResponse)
        except ChildTimedOut:
            limit_s = self._children.response_s
            raise _invalid_schema_error(
                f"the schema could not be examined within {limit_s:.0f} s; simplify it"
            ) from None
        except ChildDied:
            raise _invalid_schema_error("the schema takes too much memory to examine; simplify it") from None
        if response.invalid is not None:
            raise _invalid_schema_error(response.invalid)
        return response.texts


SCHEMA_BYTES_MAX: Final = 1024 * 1024
REGISTERED_BYTES_MAX: Final = 256 * 1024 * 1024
"""All schemas together, since every node holds them in memory."""
REFERENCES_MAX: Final = 1000
"""The schemas that one refers to, directly or not."""
ATTEMPTS_MAX: Final = 20
"""How often a change is prepared again because others changed the same subject."""
RENDERED_MAX: Final = 256
_RESERVED: Final = ("__GLOBAL", "__EMPTY")


class _SubjectChanged(MillstreamError):
    """The subject has changed while its change was prepared."""


class SubjectVersions(Sequence[SubjectVersion]):
    """The versions of one subject, deleted ones included, in their order."""

    def __init__(self, versions: Iterable[SubjectVersion]) -> None:
        self._versions = sorted(versions, key=lambda version: version.version)

    def __len__(self) -> int:
        return len(self._versions)

    def __getitem__(self, index: Any) -> Any:
        return self._versions[index]

    @property
    def live(self) -> list[SubjectVersion]:
        """The versions that are not deleted."""
        return [version for version in self._versions if not version.is_deleted]

    def select(self, *, deleted: bool = False, deleted_only: bool = False) -> list[SubjectVersion]:
        """Return the versions that are not deleted; with `deleted` all, with `deleted_only` the others."""
        if deleted_only:
            return [version for version in self._versions if version.is_deleted]
        return list(self._versions) if deleted else self.live


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewSchema:
    content: SchemaContent
    normalize: bool = False
    schema_id: int | None = None
    version: int | None = None
    """The number that the version is to have; -1 if only the latest one counts as already registered."""


class SchemaRegistry:
    def __init__(self, declarations: Declarations, *, examiner: SchemaExaminer | None = None) -> None:
        self._declarations = declarations
        self._examiner = examiner or SchemaExaminer()
        self._schemas: dict[tuple[str, int], StoredSchema] = {}
        self._by_guid: dict[str, dict[tuple[str, int], StoredSchema]] = {}
        self._subjects: dict[QualifiedSubject, dict[int, SubjectVersion]] = {}
        self._uses: dict[tuple[str, int], set[tuple[QualifiedSubject, int]]] = {}
        self._referrers: dict[tuple[QualifiedSubject, int], set[tuple[str, int]]] = {}
        self._settings: dict[QualifiedSubject, SubjectSettings] = {}
        self._rendered: dict[tuple[str, int, str], str] = {}
        self._max_ids: dict[str, int] = {}
        self._held_bytes = 0
        self._last = 0
        self._loads = 0
        # One read or change of the catalog at a time, so that they are applied in order.
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Read the changes of the catalog since the last call."""
        arrived = self._loads
        async with self._changing:
            if self._loads > arrived:
                # Another call began after this one, and has ended.
                return
            self._loads += 1
            self._apply(await self._declarations.call(Catalog.schema_changes, self._last))

    async def close(self) -> None:
        await self._examiner.close()

    # -- reading --------------------------------------------------------------------------------------------

    @property
    def last_change(self) -> int:
        """The number of the last change that this node knows."""
        return self._last

    def subjects(self) -> list[QualifiedSubject]:
        """Return every subject, also those all of whose versions are deleted, in order."""
        return sorted(self._subjects)

    def contexts(self) -> list[str]:
        """Return every context that has a subject, and the default one."""
        return sorted({".", *(subject.context for subject in self._subjects)})

    def exact_versions(self, subject: QualifiedSubject) -> SubjectVersions:
        """Return the versions of exactly this subject, even if its name is an alias."""
        return SubjectVersions(self._subjects.get(subject, {}).values())

    def versions(self, subject: QualifiedSubject) -> SubjectVersions:
        """Return the versions of a subject, or of the one that it is an alias of."""
        return self.exact_versions(self._resolve_alias(subject))

    async def find_versions(self, subject: QualifiedSubject, *, deleted: bool = False) -> SubjectVersions:
        """Return the versions of a subject; raise the error of an unknown subject."""
        return await self._find_exact(self._resolve_alias(subject), deleted=deleted)

    async def _find_exact(self, subject: QualifiedSubject, *, deleted: bool = False) -> SubjectVersions:
        resolved = await self._look_up(
            lambda: held if (held := self.exact_versions(subject)).select(deleted=deleted) else None
        )
        if resolved is None:
            raise _no_subject(subject)
        return resolved

    async def _look_up(self, find: Callable[[], T | None]) -> T | None:
        """Look something up, and again after reading the changes that other nodes have stored since."""
        resolved = find()
        if resolved is None:
            await self.load()
            resolved = find()
        return resolved

    async def find_version(self, subject: QualifiedSubject, version: str, *, deleted: bool = False) -> SubjectVersion:
        """Return one version of a subject: a number, or `latest`."""
        return await self._find_exact_version(self._resolve_alias(subject), version, deleted=deleted)

    async def _find_exact_version(
        self, subject: QualifiedSubject, version: str, *, deleted: bool = False
    ) -> SubjectVersion:
        number = parse_version(version)
        await self._find_exact(subject, deleted=deleted)
        chosen = await self._look_up(
            lambda: _select_version(self.exact_versions(subject).select(deleted=deleted), number)
        )
        if chosen is None:
            raise SchemaRegistryError(f"Version {version} not found.", code=RegistryCode.VERSION_NOT_FOUND)
        return chosen

    async def find_version_anywhere(
        self, subject: QualifiedSubject, version: str, *, deleted: bool = False
    ) -> SubjectVersion:
        """Return one version of a subject; one without a context may be in any that has it."""
        try:
            return await self.find_version(subject, version, deleted=deleted)
        except SchemaRegistryError:
            for other in self._in_other_contexts(subject):
                with suppress(SchemaRegistryError):
                    return await self._find_exact_version(other, version, deleted=deleted)
            raise

    def _in_other_contexts(self, subject: QualifiedSubject) -> list[QualifiedSubject]:
        """Return the subjects that a name without a context may stand for if the default one has no such subject."""
        if subject.context != DEFAULT_CONTEXT or not subject.name:
            return []
        subjects = [
            QualifiedSubject(context, subject.name) for context in self.contexts() if context != DEFAULT_CONTEXT
        ]
        return [candidate for candidate in subjects if candidate in self._subjects]

    async def find_schema(self, schema_id: int, subject: QualifiedSubject) -> StoredSchema:
        """Return the schema with an id in the context of a subject.

        A subject with a name must use the schema; only one without a context stands for any that does, or else for the
        default context.
        """
        schema = await self._look_up(lambda: self._schema(schema_id, subject))
        if schema is None:
            raise SchemaRegistryError(f"Schema {schema_id} not found", code=RegistryCode.SCHEMA_NOT_FOUND)
        return schema

    def _schema(self, schema_id: int, subject: QualifiedSubject) -> StoredSchema | None:
        for candidate in (subject, *self._in_other_contexts(subject)):
            key = (candidate.context, schema_id)
            if not candidate.name or any(place == candidate for place, _version in self._uses.get(key, ())):
                return self._schemas.get(key)
        return self._schemas.get((DEFAULT_CONTEXT, schema_id)) if subject.context == DEFAULT_CONTEXT else None

    async def find_by_guid(self, guid: str) -> list[StoredSchema]:
        """Return the schemas with a guid: one in each context that has this content."""
        schemas = await self._look_up(lambda: self._by_guid.get(guid))
        if not schemas:
            raise SchemaRegistryError(f"Schema {guid} not found", code=RegistryCode.SCHEMA_NOT_FOUND)
        return [schemas[key] for key in sorted(schemas)]

    def max_id(self, context: str) -> int:
        """Return the largest id that a schema of a context has had."""
        return self._max_ids.get(context, 0)

    def schema_of(self, version: SubjectVersion) -> StoredSchema:
        return self._schemas[version.subject.context, version.schema_id]

    def uses(self, schema: StoredSchema) -> list[SubjectVersion]:
        """Return the versions, deleted ones included, that have a schema."""
        return self.uses_of(schema.context, schema.schema_id)

    def uses_of(self, context: str, schema_id: int) -> list[SubjectVersion]:
        """Return the versions, deleted ones included, that have the schema with an id."""
        places = sorted(self._uses.get((context, schema_id), ()))
        return [self._subjects[subject][version] for subject, version in places]

    def referrers(self, version: SubjectVersion) -> list[int]:
        """Return the ids of the schemas that refer to a version and are in use."""
        keys = self._referrers.get((version.subject, version.version), set())
        return sorted({key[1] for key in keys if any(not use.is_deleted for use in self.uses(self._schemas[key]))})

    async def render(self, schema: StoredSchema, form: str) -> str:
        """Return the text of a schema in the format that a client asks for."""
        if form not in ("resolved", "serialized", COMPILED):
            return schema.content.text
        key = (schema.context, schema.schema_id, form)
        if key not in self._rendered:
            text = await self._text_of(schema.content, schema.context)
            rendered = await self._examiner.render(text, form)
            while len(self._rendered) >= RENDERED_MAX:
                del self._rendered[next(iter(self._rendered))]
            self._rendered[key] = rendered
        return self._rendered[key]

    async def compile(self, subject: QualifiedSubject, new: NewSchema) -> str:
        """Return a schema that is not registered, as codecs need it."""
        content = await self._parse(subject, new)
        return await self._examiner.render(await self._text_of(content, subject.context), COMPILED)

    # -- registering ----------------------------------------------------------------------------------------

    async def lookup(self, subject: QualifiedSubject, new: NewSchema, *, deleted: bool = False) -> SubjectVersion:
        """Find the version of a subject that has a schema; one without a context may be in any that has it."""
        subject = self._resolve_alias(subject)
        try:
            return await self._lookup_exact(subject, new, deleted=deleted)
        except SchemaRegistryError as error:
            if error.code in (RegistryCode.SUBJECT_NOT_FOUND, RegistryCode.SCHEMA_NOT_FOUND):
                for other in self._in_other_contexts(subject):
                    with suppress(SchemaRegistryError):
                        return await self._lookup_exact(other, new, deleted=deleted)
            raise

    async def _lookup_exact(self, subject: QualifiedSubject, new: NewSchema, *, deleted: bool) -> SubjectVersion:
        content = await self._parse(subject, new)
        await self._find_exact(subject, deleted=deleted)
        version = await self._matching(subject, content, deleted=deleted)
        if version is None:
            await self.load()
            version = await self._matching(subject, content, deleted=deleted)
        if version is None:
            raise SchemaRegistryError("Schema not found", code=RegistryCode.SCHEMA_NOT_FOUND)
        return version

    async def register(self, subject: QualifiedSubject, new: NewSchema) -> SubjectVersion:
        """Register a schema as the next version of a subject, unless one of its versions has it already."""
        subject = self._resolve_alias(subject)
        check_subject(subject, is_named=True)
        parsed = await self._parse(subject, await self._with_latest_text(subject, new))
        for _attempt in range(ATTEMPTS_MAX):
            since = self._last
            versions = self.exact_versions(subject)
            is_import = self.mode(subject) in (IMPORT, FORWARD)
            next_version = versions[-1].version + 1 if versions else 1
            content = parsed if is_import else self._complete(subject, parsed, versions.live)
            registered = await self._find_registered(subject, new, parsed, content)
            if registered is not None:
                return registered
            self._check_mode(subject, new)
            _check_size("a schema with its metadata and rules", content.size_bytes)
            self._check_room(content.size_bytes)
            if not is_import:
                if new.version is not None or property_of(content, CONFLUENT_VERSION) is not None:
                    metadata = with_version(content.metadata, next_version)
                    content = dataclasses.replace(content, metadata=metadata)
                await self._check_registration(subject, content, versions)
                if new.version not in (None, -1, next_version):
                    raise _invalid_schema_error("Version is not one more than previous version")
            version = next_version if new.version in (None, -1) else new.version
            parse_version(str(version))
            deleted = [old for old in versions if old.is_deleted and not self._referrers.get((subject, old.version))]
            work = _registration(
                SubjectVersion(subject=subject, version=version, schema_id=new.schema_id or 0),
                content,
                deleted=deleted,
                since=since,
            )
            try:
                await self._change(work)
            except _SubjectChanged:
                await self.load()
                continue
            _logger.info("schema registered", extra={"subject": str(subject), "version": version})
            return self._subjects[subject][version]
        raise SchemaRegistryError(
            f"subject {str(subject)!r} is being changed by too many clients; retry", code=RegistryCode.STORE_FAILED
        )

    async def _with_latest_text(self, subject: QualifiedSubject, new: NewSchema) -> NewSchema:
        """Use the text of the latest version for a schema without one, which changes only metadata or rules."""
        if new.content.text.strip():
            return new
        try:
            latest = self.schema_of(await self._find_exact_version(subject, "latest")).content
        except SchemaRegistryError:
            return new
        content = dataclasses.replace(latest, metadata=new.content.metadata, rule_set=new.content.rule_set)
        return dataclasses.replace(new, content=content)

    async def _find_registered(
        self, subject: QualifiedSubject, new: NewSchema, own: SchemaContent, completed: SchemaContent
    ) -> SubjectVersion | None:
        """Return the version that has a schema, as it was sent or with the additions of the settings."""
        live = self.exact_versions(subject).live
        if new.version is not None:
            is_import = self.mode(subject) in (IMPORT, FORWARD)
            live = [version for version in live[-1:] if new.version == -1] + [
                version for version in live if is_import and version.version == new.version
            ]
        for content in (completed,) if has_defaults(self.config(subject)) else (own, completed):
            for prior in reversed(live):
                if new.schema_id in (None, prior.schema_id) and await self._is_equal(content, self.schema_of(prior)):
                    return prior
        return None

    async def _is_equal(self, content: SchemaContent, stored: StoredSchema) -> bool:
        """Whether content equals a stored schema, which may include its version, and refer to parts sent inline."""
        other = stored.content
        if property_of(content, CONFLUENT_VERSION) is None:
            other = dataclasses.replace(other, metadata=without_version(other.metadata))
            content = dataclasses.replace(content, metadata=without_version(content.metadata))
        if (content.metadata, content.rule_set) != (other.metadata, other.rule_set):
            return False
        return await self._has_text(content, stored)

    async def _has_text(self, content: SchemaContent, stored: StoredSchema) -> bool:
        """Whether a stored schema has the text and the references of another, or is that text with them resolved."""
        other = stored.content
        if content.schema_type != other.schema_type:
            return False
        if content.schema_type == AVRO and other.references and not content.references:
            return content.text == await self.render(stored, "resolved")
        return (content.text, content.references) == (other.text, other.references)

    async def check(self, subject: QualifiedSubject, new: NewSchema, version: str | None) -> Sequence[str]:
        """Return why a schema is incompatible with one version, or with those that the subject's level covers."""
        subject = self._resolve_alias(subject)
        content = await self._parse(subject, new)
        level = self.level(subject)
        if version is None:
            versions = (await self._find_exact(subject)).live
        else:
            versions = [await self._find_exact_version(subject, version)]
        return await self._incompatibilities(subject, content, versions, level)

    async def _parse(self, subject: QualifiedSubject, new: NewSchema) -> SchemaContent:
        """Check a schema and bring its text into the form in which it is stored."""
        content = new.content
        if content.metadata is not None:
            content = dataclasses.replace(content, metadata=parse_metadata(content.metadata))
        if content.rule_set is not None:
            content = dataclasses.replace(content, rule_set=parse_rule_set(content.rule_set))
        if content.schema_type not in SCHEMA_TYPES:
            raise _invalid_schema_error(f"Invalid schema type {content.schema_type}")
        if not content.text.strip():
            raise _invalid_schema_error("Empty schema")
        _check_size("a schema with its metadata and rules", content.size_bytes)
        references = tuple([await self._resolve_latest(reference, subject.context) for reference in content.references])
        content = dataclasses.replace(content, references=references)
        texts = await self._examiner.parse(await self._text_of(content, subject.context))
        is_normal = new.normalize or bool(self.config(subject).get("normalize"))
        return dataclasses.replace(content, text=texts.normalized if is_normal else texts.canonical)

    async def _resolve_latest(self, reference: SchemaReference, context: str) -> SchemaReference:
        """Replace the number that means the latest version."""
        if reference.version >= 0:
            return reference
        latest = await self.find_version(_qualify(context, reference.subject), "latest")
        return reference._replace(version=latest.version)

    async def _text_of(self, content: SchemaContent, context: str, *, version: int = 0) -> SchemaText:
        """Add the texts of everything that a schema refers to, each after those that it refers to itself."""
        texts: dict[str, str] = {}
        # Each reference twice: first its own are added before it, then it is added itself.
        waiting = [(reference, context, False) for reference in reversed(content.references)]
        visited = 0
        while waiting:
            reference, here, is_ready = waiting.pop()
            visited += 1
            if visited > 2 * REFERENCES_MAX:
                raise _invalid_schema_error(f"a schema refers to at most {REFERENCES_MAX} others, directly or not")
            if reference.name in texts:
                continue
            referred = await self._find_referenced(reference, here)
            if is_ready:
                texts[reference.name] = referred.content.text
                continue
            waiting.append((reference, here, True))
            waiting += [(reference, referred.context, False) for reference in reversed(referred.content.references)]
        return SchemaText(
            schema_type=content.schema_type, text=content.text, references=list(texts.items()), version=version
        )

    async def _find_referenced(self, reference: SchemaReference, context: str) -> StoredSchema:
        try:
            subject = _qualify(context, reference.subject)
            return self.schema_of(await self.find_version(subject, str(reference.version), deleted=True))
        except SchemaRegistryError as error:
            raise _invalid_schema_error(
                f"the reference {reference.name!r} to version {reference.version} of subject {reference.subject!r} "
                f"cannot be resolved: {error}"
            ) from error

    async def _matching(
        self, subject: QualifiedSubject, content: SchemaContent, *, deleted: bool = False
    ) -> SubjectVersion | None:
        """Return the newest version with this content; without one, metadata and rules count only if they are given."""
        same_text = [
            (version, stored.content)
            for version in reversed(self.exact_versions(subject).select(deleted=deleted))
            if await self._has_text(content, stored := self.schema_of(version))
        ]
        exact = [
            version
            for version, other in same_text
            if content.metadata in (other.metadata, without_version(other.metadata))
            and content.rule_set == other.rule_set
        ]
        loose = [
            version
            for version, other in same_text
            if content.metadata in (None, other.metadata) and content.rule_set in (None, other.rule_set)
        ]
        return next(iter(exact or loose), None)

    def _check_mode(self, subject: QualifiedSubject, new: NewSchema) -> None:
        mode = self.mode(subject)
        self.check_writable(subject)
        if new.schema_id is not None and mode not in (IMPORT, FORWARD):
            raise _not_permitted(f"Subject {subject} is not in import mode")
        if new.schema_id is not None and not 1 <= new.schema_id <= IMPORTED_ID_MAX:
            raise _not_permitted(
                f"Schema id {new.schema_id} is not between 1 and {IMPORTED_ID_MAX}; the ids above are for schemas that "
                "are registered without an id"
            )
        if new.schema_id is None and mode != READWRITE:
            raise _not_permitted(f"Subject {subject} is not in read-write mode")

    def _check_room(self, added_bytes: int) -> None:
        if added_bytes > 0 and self._held_bytes + added_bytes > REGISTERED_BYTES_MAX:
            raise SchemaRegistryError(
                f"the registry holds {REGISTERED_BYTES_MAX} bytes of schemas and settings, its maximum; "
                "delete subjects permanently, or reset the configuration and mode of subjects and contexts",
                code=RegistryCode.TOO_LARGE,
            )

    def check_writable(self, subject: QualifiedSubject) -> None:
        """Raise an error if a subject is read-only."""
        if self.mode(subject) in (READONLY, READONLY_OVERRIDE):
            raise _not_permitted(f"Subject {subject} is in read-only mode")

    def _complete(
        self, subject: QualifiedSubject, content: SchemaContent, live: Sequence[SubjectVersion]
    ) -> SchemaContent:
        """Add the metadata and rules of the version before, and those that the settings add or override."""
        config = self.config(subject)
        latest = self.schema_of(live[-1]).content if live else None
        completed: dict[str, Any] = {}
        for name, key in ANNOTATIONS:
            own = getattr(content, name)
            if own is None and latest is not None:
                own = getattr(latest, name)
            completed[name] = merge([config.get(f"default{key}"), own, config.get(f"override{key}")])
        return dataclasses.replace(content, **completed)

    async def _check_registration(
        self, subject: QualifiedSubject, content: SchemaContent, versions: SubjectVersions
    ) -> None:
        messages = await self._incompatibilities(subject, content, versions.live, self.level(subject))
        if messages:
            raise SchemaRegistryError(
                f'Schema being registered is incompatible with an earlier schema for subject "{subject}", details: '
                f"[{', '.join(messages)}]",
                code=RegistryCode.INCOMPATIBLE,
            )

    async def _incompatibilities(
        self, subject: QualifiedSubject, content: SchemaContent, versions: Sequence[SubjectVersion], level: str
    ) -> Sequence[str]:
        if level == "NONE" or not versions:
            return ()
        group = self.config(subject).get("compatibilityGroup")
        new = await self._text_of(content, subject.context)
        earlier = []
        for version in reversed(versions):
            stored = self.schema_of(version).content
            if group and property_of(stored, group) != property_of(content, group):
                continue
            earlier.append(await self._text_of(stored, subject.context, version=version.version))
            if not level.endswith("_TRANSITIVE"):
                break
        return await self._examiner.check(new, earlier, level)

    # -- deleting -------------------------------------------------------------------------------------------

    async def delete_subject(self, subject: QualifiedSubject, *, permanent: bool = False) -> list[int]:
        """Delete all versions of a subject; permanently only those that are deleted already."""
        subject = self._resolve_alias(subject)
        versions = await self._find_exact(subject, deleted=True)
        self.check_writable(subject)
        if permanent and versions.live:
            raise SchemaRegistryError(
                f"Subject '{subject}' was not deleted first before being permanently deleted",
                code=RegistryCode.SUBJECT_NOT_SOFT_DELETED,
            )
        if not permanent and not versions.live:
            raise SchemaRegistryError(
                f"Subject '{subject}' was soft deleted.Set permanent=true to delete permanently",
                code=RegistryCode.SUBJECT_SOFT_DELETED,
            )
        affected = list(versions) if permanent else versions.live
        await self._delete(affected, permanent=permanent, with_settings=True)
        return [version.version for version in affected]

    async def delete_version(self, subject: QualifiedSubject, requested: str, *, permanent: bool = False) -> int:
        """Delete one version of a subject; permanently only if it is deleted already."""
        subject = self._resolve_alias(subject)
        parse_version(requested)
        self.check_writable(subject)
        # The last version that is not deleted, for a deletion that is not permanent.
        is_latest_live = requested == "latest" and not permanent and bool(self.exact_versions(subject).live)
        version = await self._find_exact_version(subject, requested, deleted=not is_latest_live)
        if permanent and not version.is_deleted:
            raise SchemaRegistryError(
                f"Subject '{subject}' Version {requested} was not deleted first before being permanently deleted",
                code=RegistryCode.VERSION_NOT_SOFT_DELETED,
            )
        if not permanent and version.is_deleted:
            raise SchemaRegistryError(
                f"Subject '{subject}' Version {requested} was soft deleted.Set permanent=true to delete permanently",
                code=RegistryCode.VERSION_SOFT_DELETED,
            )
        is_last = all(known.is_deleted or known == version for known in self.exact_versions(subject))
        await self._delete([version], permanent=permanent, with_settings=is_last)
        return version.version

    async def _delete(
        self, versions: Sequence[SubjectVersion], *, permanent: bool, with_settings: bool = False
    ) -> None:
        subject = versions[0].subject
        self._check_unreferred(versions)
        since = self._last
        after = [dataclasses.replace(version, is_deleted=not permanent, is_gone=permanent) for version in versions]

        def work(transaction: SchemaTransaction) -> None:
            if not transaction.is_unchanged(subject, since):
                raise _SubjectChanged
            for version in after:
                transaction.put_version(version)
            if with_settings and subject in self._settings:
                transaction.put_settings(SubjectSettings(subject=subject))

        try:
            await self._change(work)
        except _SubjectChanged as error:
            await self.load()
            raise SchemaRegistryError(
                f"subject {str(subject)!r} was changed at the same time; retry", code=RegistryCode.STORE_FAILED
            ) from error
        _logger.info(
            "schemas deleted",
            extra={"subject": str(subject), "versions": [version.version for version in after], "permanent": permanent},
        )

    def _check_unreferred(self, versions: Iterable[SubjectVersion]) -> None:
        for version in versions:
            if self.referrers(version):
                raise SchemaRegistryError(
                    "One or more references exist to the schema {magic=1,keytype=SCHEMA,"
                    f"subject={version.subject},version={version.version}}}.",
                    code=RegistryCode.REFERENCE_EXISTS,
                )

    # -- settings -------------------------------------------------------------------------------------------

    def settings(self, subject: QualifiedSubject) -> SubjectSettings:
        """Return the settings of exactly this subject or context."""
        return self._settings.get(subject) or SubjectSettings(subject=subject)

    def config(self, subject: QualifiedSubject) -> Mapping[str, Any]:
        merged: dict[str, Any] = {LEVEL: DEFAULT_LEVEL}
        for scope in _scopes(subject):
            merged.update(self.settings(scope).config)
        return merged

    def level(self, subject: QualifiedSubject) -> str:
        return str(self.config(subject)[LEVEL])

    def mode(self, subject: QualifiedSubject) -> str:
        """Return the mode that applies to a subject; one that overrides is that of the context."""
        modes = [mode for scope in _scopes(subject) if (mode := self.settings(scope).mode) is not None]
        if READONLY_OVERRIDE in modes[:2]:
            return READONLY_OVERRIDE
        return modes[-1] if modes else READWRITE

    async def configure(self, subject: QualifiedSubject, config: Mapping[str, Any] | None) -> SubjectSettings:
        """Change some of a subject's configuration (None resets a setting), or reset all; return the previous one."""
        changes = {} if config is None else parse_config(config)
        check_subject(subject)
        self.check_writable(subject)

        def changed(before: SubjectSettings) -> SubjectSettings:
            after = dataclasses.replace(before, config={} if config is None else with_changes(before.config, changes))
            _check_size("a configuration", after.size_bytes)
            return after

        return await self._change_settings(subject, changed)

    async def set_mode(self, subject: QualifiedSubject, mode: str | None, *, force: bool = False) -> SubjectSettings:
        """Change the mode of a subject or context, or reset it; return what was set before."""
        if mode is not None and mode not in MODES:
            raise SchemaRegistryError(
                f"Invalid mode. Valid values are {', '.join(MODES)}", code=RegistryCode.INVALID_MODE
            )
        check_subject(subject)
        if mode != IMPORT or force or self.mode(subject) == IMPORT:
            return await self._change_settings(subject, lambda before: dataclasses.replace(before, mode=mode))
        await self.load()
        held = [
            version
            for known in self._subjects
            if known.context == subject.context and subject.name in ("", known.name)
            for version in self._subjects[known].values()
        ]
        if any(not version.is_deleted for version in held):
            raise _not_permitted("Cannot import since found existing subjects")
        # Deleted versions make room for those that are imported.
        self._check_unreferred(held)
        gone = [dataclasses.replace(version, is_gone=True) for version in held]
        return await self._change_settings(subject, lambda before: dataclasses.replace(before, mode=mode), deleted=gone)

    async def _change_settings(
        self,
        subject: QualifiedSubject,
        change: Callable[[SubjectSettings], SubjectSettings],
        *,
        deleted: Sequence[SubjectVersion] = (),
    ) -> SubjectSettings:
        await self.load()
        before = self.settings(subject)
        after = change(before)
        if after == before and not deleted:
            return before
        self._check_room(after.size_bytes - before.size_bytes)

        def work(transaction: SchemaTransaction) -> None:
            for version in deleted:
                transaction.put_version(version)
            transaction.put_settings(after)

        await self._change(work)
        _logger.info("schema settings changed", extra={"subject": str(subject)})
        return before

    # -- memory ---------------------------------------------------------------------------------------------

    def all_settings(self) -> list[SubjectSettings]:
        """Return the configuration and mode of every subject and context that has any."""
        return [self._settings[subject] for subject in sorted(self._settings)]

    async def follow(
        self,
        schemas: Sequence[StoredSchema],
        versions: Sequence[SubjectVersion],
        settings: Sequence[SubjectSettings],
        *,
        to_delete: Collection[tuple[QualifiedSubject, int]],
        sightings: SightingChange,
    ) -> None:
        """Copy the registry of a mirror's source, including ids, in one transaction with its sightings.

        Versions among `to_delete` that the source does not have are deleted permanently. Others that only this registry
        has stay. Empty settings reset those of a subject.
        """
        await self.load()
        added: dict[tuple[str, int], StoredSchema] = {}
        for schema in schemas:
            known = self._schemas.get((schema.context, schema.schema_id))
            if known is None:
                added[schema.context, schema.schema_id] = schema
            elif known.content != schema.content:
                raise SchemaRegistryError(
                    f"schema id {schema.schema_id} belongs to another schema here than at the source of the mirror",
                    code=RegistryCode.NOT_PERMITTED,
                )
        followed = {(version.subject, version.version): version for version in versions}
        here = {
            (subject, version.version): version
            for subject in self._subjects
            for version in self._subjects[subject].values()
        }
        for place, version in followed.items():
            if place in here and here[place].schema_id != version.schema_id:
                raise SchemaRegistryError(
                    f"version {version.version} of {str(version.subject)!r} is another schema here than at the source",
                    code=RegistryCode.NOT_PERMITTED,
                )
        changed = [version for place, version in followed.items() if here.get(place) != version]
        deleted = [
            dataclasses.replace(here[place], is_gone=True)
            for place in to_delete
            if place in here and place not in followed
        ]
        other_settings = [setting for setting in settings if self.settings(setting.subject) != setting]

        def work(transaction: SchemaTransaction) -> None:
            for schema in added.values():
                transaction.add_schema(schema.context, schema.content, schema_id=schema.schema_id)
            for version in (*changed, *deleted):
                transaction.put_version(version)
            for setting in other_settings:
                transaction.put_settings(setting)

        if added or changed or deleted or other_settings:
            await self._change(work, sightings)
        elif sightings:
            await self._declarations.call(Catalog.store_sightings, sightings)

    async def _change(self, work: Callable[[SchemaTransaction], None], sightings: SightingChange | None = None) -> None:
        async with self._changing:
            self._apply(await self._declarations.change(Catalog.change_schemas, self._last, work, sightings))

    def _apply(self, changes: SchemaChanges) -> None:
        for schema in changes.schemas:
            key = (schema.context, schema.schema_id)
            if key in self._schemas:
                continue
            self._schemas[key] = schema
            self._max_ids[schema.context] = max(self.max_id(schema.context), schema.schema_id)
            self._by_guid.setdefault(schema.guid, {})[key] = schema
            self._held_bytes += schema.content.size_bytes
            for reference in schema.content.references:
                place = (_qualify(schema.context, reference.subject), reference.version)
                self._referrers.setdefault(place, set()).add(key)
        # Deletions come last, so that a schema that moves to another version is not dropped in between.
        for version in sorted(changes.versions, key=lambda version: version.is_gone):
            self._apply_version(version)
        for settings in changes.settings:
            self._held_bytes += settings.size_bytes - self.settings(settings.subject).size_bytes
            if settings.is_empty:
                self._settings.pop(settings.subject, None)
            else:
                self._settings[settings.subject] = settings
        self._last = changes.last

    def _apply_version(self, version: SubjectVersion) -> None:
        versions = self._subjects.setdefault(version.subject, {})
        before = versions.pop(version.version, None)
        if before is not None:
            self._uses[before.subject.context, before.schema_id].discard((before.subject, before.version))
        if not version.is_gone:
            versions[version.version] = version
            key = (version.subject.context, version.schema_id)
            self._uses.setdefault(key, set()).add((version.subject, version.version))
        elif not versions:
            del self._subjects[version.subject]
        if before is not None:
            self._drop_unused((before.subject.context, before.schema_id))

    def _drop_unused(self, key: tuple[str, int]) -> None:
        if self._uses.get(key):
            return
        self._uses.pop(key, None)
        schema = self._schemas.pop(key, None)
        if schema is None:
            return
        self._held_bytes -= schema.content.size_bytes
        with_guid = self._by_guid[schema.guid]
        with_guid.pop(key, None)
        if not with_guid:
            del self._by_guid[schema.guid]
        for reference in schema.content.references:
            self._referrers[_qualify(schema.context, reference.subject), reference.version].discard(key)

    def names_of(self, subject: QualifiedSubject) -> list[QualifiedSubject]:
        """Return a subject, and every one that it is an alias of, directly or not."""
        names = [subject]
        while (following := self._resolve_alias(names[-1])) not in names:
            names.append(following)
        return names

    def _resolve_alias(self, subject: QualifiedSubject) -> QualifiedSubject:
        """Return the subject of a name, with aliases resolved."""
        alias = self.settings(subject).config.get("alias")
        return _qualify(subject.context, alias) if isinstance(alias, str) and alias else subject


def _registration(
    version: SubjectVersion, content: SchemaContent, *, deleted: Sequence[SubjectVersion], since: int
) -> Callable[[SchemaTransaction], None]:
    """Store a version, with a new id if it has none, unless its subject has changed since it was prepared.

    It takes the place of deleted versions with the same schema.
    """

    def work(transaction: SchemaTransaction) -> None:
        subject = version.subject
        if not transaction.is_unchanged(subject, since):
            raise _SubjectChanged
        if not version.schema_id:
            stored = transaction.find_schema(subject.context, content)
        else:
            stored = transaction.schema(subject.context, version.schema_id)
            if stored is not None and stored.content != content:
                raise _not_permitted(f"Overwrite new schema with id {version.schema_id} is not permitted.")
        if stored is None:
            stored = transaction.add_schema(subject.context, content, schema_id=version.schema_id or None)
        transaction.put_version(dataclasses.replace(version, schema_id=stored.schema_id))
        for deleted_version in deleted:
            if deleted_version.schema_id == stored.schema_id and deleted_version.version < version.version:
                transaction.put_version(dataclasses.replace(deleted_version, is_gone=True))

    return work


def parse_version(text: str) -> int | None:
    """Return the number of a version; None for the latest."""
    if text in ("latest", "-1"):
        return None
    if len(text) <= len(str(NUMBER_MAX)) and text.isascii() and text.isdigit() and 1 <= int(text) <= NUMBER_MAX:
        return int(text)
    raise SchemaRegistryError(
        f"The specified version '{text}' is not a valid version id. Allowed values are between [1, 2^31-1] and the "
        'string "latest"',
        code=RegistryCode.INVALID_VERSION,
    )


def check_subject(subject: QualifiedSubject, *, is_named: bool = False) -> None:
    """Raise the error of an invalid subject; one that `is_named` cannot mean a context."""
    text = str(subject)
    is_too_long = len(subject.name) > SUBJECT_CHARACTERS_MAX or len(subject.context) > CONTEXT_CHARACTERS_MAX
    is_scope = is_named and (not subject.name.strip() or subject.name in _RESERVED or subject.context == GLOBAL_CONTEXT)
    if is_too_long or is_scope or any(ord(character) < 32 or 127 <= ord(character) < 160 for character in text):
        raise SchemaRegistryError(
            f"The specified subject '{text[:SUBJECT_CHARACTERS_MAX]}' is not a valid subject.",
            code=RegistryCode.INVALID_SUBJECT,
        )


def _select_version(versions: Sequence[SubjectVersion], number: int | None) -> SubjectVersion | None:
    if number is None:
        return versions[-1] if versions else None
    return next((version for version in versions if version.version == number), None)


def _qualify(context: str, subject: str) -> QualifiedSubject:
    """Return a subject by a name that a schema of this context uses."""
    return QualifiedSubject(context, "").sibling(subject)


def _scopes(subject: QualifiedSubject) -> list[QualifiedSubject]:
    """Return the scopes in which settings of a subject are looked up, the most specific last."""
    scopes = [QualifiedSubject(GLOBAL_CONTEXT, ""), QualifiedSubject(subject.context, "")]
    return [*scopes, subject] if subject.name else scopes


def _check_size(what: str, size_bytes: int) -> None:
    if size_bytes > SCHEMA_BYTES_MAX:
        raise SchemaRegistryError(f"{what} takes at most {SCHEMA_BYTES_MAX} bytes", code=RegistryCode.TOO_LARGE)


def _no_subject(subject: QualifiedSubject) -> SchemaRegistryError:
    return SchemaRegistryError(f"Subject '{subject}' not found.", code=RegistryCode.SUBJECT_NOT_FOUND)


def _invalid_schema_error(reason: str) -> SchemaRegistryError:
    return SchemaRegistryError(reason, code=RegistryCode.INVALID_SCHEMA)


def _not_permitted(reason: str) -> SchemaRegistryError:
    return SchemaRegistryError(reason, code=RegistryCode.NOT_PERMITTED)
