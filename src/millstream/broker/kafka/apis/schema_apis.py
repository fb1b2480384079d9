"""Private requests about schemas, which mirror Confluent's REST API.

A subject is authorized as the topic that it is for: `orders-key` and `orders-value` as `orders`, any other as a topic
of its own name. A refusal of the registry has Confluent's code.
"""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, TypeVar

import msgspec

from millstream.broker.kafka.api import ClientInfo, Need, PrivateApi
from millstream.broker.schemas.registry import NewSchema, SchemaRegistry
from millstream.broker.security.changes import CREATE, DELETE, UPDATE, single_change
from millstream.broker.security.rights import Rights
from millstream.core.acl import CLUSTER_NAME, Operation, ResourceType
from millstream.core.errors import CatalogUnavailable, SchemaRegistryError
from millstream.core.schema import (
    IMPORT,
    QualifiedSubject,
    RegistryCode,
    SchemaContent,
    SchemaReference,
    StoredSchema,
    SubjectVersion,
    subject_topic,
)
from millstream.protocol.private.schema_messages import (
    CheckResponse,
    CheckSchemaRequest,
    ConfigureRequest,
    DeletedResponse,
    DeleteSubjectRequest,
    GetSchemaRequest,
    GetSettingsRequest,
    GetSubjectRequest,
    ListSubjectsRequest,
    LookupSchemaRequest,
    RegisterSchemaRequest,
    RegistryResponse,
    SchemaBody,
    SchemaMessage,
    SchemaResponse,
    SettingsResponse,
    SubjectResponse,
    SubjectsResponse,
)

EVERY_CONTEXT: Final = ":*:"
LISTED_AT_ONCE: Final = 500
SCHEMAS_MAX: Final = 1000
SCHEMAS_CHARACTERS_MAX: Final = 16 * 1024 * 1024
"""How many schemas one response lists; the rest is requested with an offset."""

T = TypeVar("T")
RequestT = TypeVar("RequestT")
RegistryResponseT = TypeVar("RegistryResponseT", bound=RegistryResponse)


def subject_need(operation: Operation, subject: str) -> Need:
    """Return the permissions for a request about a subject; one about a context needs them on the cluster."""
    if not QualifiedSubject.parse(subject).name:
        return (operation, ResourceType.CLUSTER, CLUSTER_NAME)
    return (operation, ResourceType.TOPIC, subject_topic(subject))


def may_describe(rights: Rights, subject: str) -> bool:
    return rights.topic(Operation.DESCRIBE, subject_topic(subject))


class RegistryApi(PrivateApi[RequestT, RegistryResponseT]):
    """A request to the registry; a refusal carries the registry's own code."""

    def __init__(self, registry: SchemaRegistry) -> None:
        self._registry = registry

    async def handle(self, request: RequestT) -> RegistryResponseT:
        """Respond, also with the registry's refusal."""
        try:
            return await self.respond(request)
        except SchemaRegistryError as error:
            refused: RegistryResponseT = self.response_type(code=error.code, message=str(error))
            return refused

    @abstractmethod
    async def respond(self, request: RequestT) -> RegistryResponseT:
        """Carry out a request."""

    async def needs_on(
        self, operation: Operation, subject: str, references: Iterable[SchemaReference] = ()
    ) -> list[Need]:
        """Return the permissions for a request about a subject, or its alias target; DESCRIBE on references."""
        qualified = QualifiedSubject.parse(subject)
        if not self._registry.versions(qualified):
            # The request itself will look in the catalog too, where the subject may have become an alias.
            with suppress(CatalogUnavailable):
                await self._registry.load()
        names = self._registry.names_of(qualified)
        referenced = {
            target
            for reference in references
            for name in names
            for target in self._registry.names_of(name.sibling(reference.subject))
        }
        return [
            *(subject_need(operation, str(name)) for name in names),
            *(subject_need(Operation.DESCRIBE, str(name)) for name in sorted(referenced)),
        ]

    async def message_of(self, version: SubjectVersion, form: str = "") -> SchemaMessage:
        return msgspec.structs.replace(
            await self.message_of_schema(self._registry.schema_of(version), form),
            subject=str(version.subject),
            version=version.version,
            deleted=version.is_deleted,
        )

    async def message_of_schema(self, schema: StoredSchema, form: str = "") -> SchemaMessage:
        content = schema.content
        return SchemaMessage(
            id=schema.schema_id,
            guid=schema.guid,
            schema_type=content.schema_type,
            schema=await self._registry.render(schema, form),
            references=content.references,
            metadata=content.metadata,
            rule_set=content.rule_set,
        )


def references_of(body: SchemaBody[Any]) -> tuple[SchemaReference, ...]:
    """Return the references of a schema that a client sends."""
    return tuple(SchemaReference(*reference) for reference in body.references)


def new_schema(body: SchemaBody[Any], *, schema_id: int | None = None, version: int | None = None) -> NewSchema:
    """Convert what a client sends."""
    content = SchemaContent(
        schema_type=body.schema_type,
        text=body.schema,
        references=references_of(body),
        metadata=body.metadata,
        rule_set=body.rule_set,
    )
    return NewSchema(content=content, normalize=body.normalize, schema_id=schema_id, version=version)


class SchemaRegister(RegistryApi[RegisterSchemaRequest, SchemaResponse]):
    """Registers a schema as the next version of a subject.

    A schema that a version of the subject has already is not registered again, unless its `version` is given, which is
    the next one, or any in IMPORT mode; -1 is the latest. Only IMPORT mode takes an `id`. Without a text, the schema is
    that of the latest version. A refusal has Confluent's code: 409 if the schema is incompatible, 42201 if invalid,
    42210 if its rules are.
    """

    changes = single_change("schema", CREATE, name="subject")

    async def needs(self, request: RegisterSchemaRequest) -> Sequence[Need]:
        """Require WRITE on the subject's topic, as producers have, and DESCRIBE on its references'."""
        return await self.needs_on(Operation.WRITE, request.subject, references_of(request))

    async def respond(self, request: RegisterSchemaRequest) -> SchemaResponse:
        new = new_schema(request, schema_id=request.id, version=request.version)
        version = await self._registry.register(QualifiedSubject.parse(request.subject), new)
        return SchemaResponse(schema=await self.message_of(version))


class SchemaLookup(RegistryApi[LookupSchemaRequest, SchemaResponse]):
    """Finds the version of a subject that has a schema.

    A refusal has Confluent's code: 40401 for an unknown subject, 40403 if none of its versions has the schema.
    """

    changes = None

    async def needs(self, request: LookupSchemaRequest) -> Sequence[Need]:
        return await self.needs_on(Operation.DESCRIBE, request.subject, references_of(request))

    async def respond(self, request: LookupSchemaRequest) -> SchemaResponse:
        subject = QualifiedSubject.parse(request.subject)
        version = await self._registry.lookup(subject, new_schema(request), deleted=request.deleted)
        return SchemaResponse(schema=await self.message_of(version, request.format))


class SchemaCheck(RegistryApi[CheckSchemaRequest, CheckResponse]):
    """Checks whether a schema is compatible with a subject.

    Without a version, the schema is checked against those that the subject's level covers. It is compatible if there
    are no reasons against it. `compiled` asks for the schema as codecs need it, to try it on stored messages.
    """

    changes = None

    async def needs(self, request: CheckSchemaRequest) -> Sequence[Need]:
        return await self.needs_on(Operation.DESCRIBE, request.subject, references_of(request))

    async def respond(self, request: CheckSchemaRequest) -> CheckResponse:
        subject = QualifiedSubject.parse(request.subject)
        new = new_schema(request)
        if not request.compiled:
            return CheckResponse(reasons=await self._registry.check(subject, new, request.version))
        compiled = await self._registry.compile(subject, new)
        is_new = not self._registry.versions(subject).live
        reasons = () if is_new else await self._registry.check(subject, new, request.version)
        return CheckResponse(reasons=reasons, compiled=compiled)


class SchemaGet(RegistryApi[GetSchemaRequest, SchemaResponse]):
    """Returns a schema by its id or guid, and which versions have it.

    The subject says in which context the id is; without one it is the default context. `format` is `serialized` for the
    descriptor of a Protobuf schema, `resolved` for an Avro schema with its references written out.
    """

    changes = None

    async def needs(self, request: GetSchemaRequest) -> Sequence[Need]:
        """Require no right: the schema is only returned to clients that may describe one of the topics it is for."""
        return ()

    async def handle_from(self, client: ClientInfo, request: GetSchemaRequest) -> SchemaResponse:
        """Hide schemas and subjects that the client may not describe, as if they did not exist."""
        response, rights = await self.handle(request), client.rights
        if response.schema is None or rights is None or rights.cluster(Operation.DESCRIBE):
            return response
        # Deleted versions count, too: messages with their schemas can still be read.
        places = [use for place in response.ids for use in self._registry.uses_of(*place)]
        if not any(may_describe(rights, str(use.subject)) for use in places):
            missing = request.guid or request.id
            return SchemaResponse(code=RegistryCode.SCHEMA_NOT_FOUND, message=f"Schema {missing} not found")
        return msgspec.structs.replace(response, uses=[use for use in response.uses if may_describe(rights, use[0])])

    async def respond(self, request: GetSchemaRequest) -> SchemaResponse:
        if request.guid:
            schemas = await self._registry.find_by_guid(request.guid)
        else:
            schemas = [await self._registry.find_schema(request.id, QualifiedSubject.parse(request.subject))]
        uses = [use for schema in schemas for use in self._registry.uses(schema)]
        return SchemaResponse(
            schema=await self.message_of_schema(schemas[0], request.format),
            uses=[(str(use.subject), use.version) for use in uses if request.deleted or not use.is_deleted],
            ids=[(schema.context, schema.schema_id) for schema in schemas],
            max_id=self._registry.max_id(schemas[0].context),
        )


class SchemaList(RegistryApi[ListSubjectsRequest, SubjectsResponse]):
    """Lists subjects, their schemas, and contexts.

    Schemas are returned without the names of their subjects, and not more than fit into a response. A prefix
    `:.context:` lists a context, `:*:` all of them; otherwise the subjects of the default context are listed.
    """

    changes = None

    async def needs(self, request: ListSubjectsRequest) -> Sequence[Need]:
        """Require no right: the list contains the subjects whose topic the client may describe."""
        return ()

    def redact(self, response: SubjectsResponse, rights: Rights) -> SubjectsResponse:
        visible = [subject for subject in response.subjects if may_describe(rights, subject)]
        return msgspec.structs.replace(
            response,
            subjects=visible,
            schemas=[schema for schema in response.schemas if may_describe(rights, schema.subject)],
            contexts=sorted({".", *(QualifiedSubject.parse(subject).context for subject in visible)}),
        )

    async def respond(self, request: ListSubjectsRequest) -> SubjectsResponse:
        listed: list[SubjectVersion] = []
        subjects: list[str] = []
        for number, subject in enumerate(self._starting_with(request.prefix)):
            if not number % LISTED_AT_ONCE:
                # Let other tasks run between the parts of a long list.
                await asyncio.sleep(0)
            known = self._registry.exact_versions(subject)
            versions = known.select(deleted=request.deleted, deleted_only=request.deleted_only)
            if versions:
                subjects.append(str(subject))
                listed += versions[-1:] if request.latest_only else versions
        contexts = self._registry.contexts()
        if not request.schemas:
            return SubjectsResponse(subjects=_select_page(subjects, request), contexts=contexts)
        schemas: list[SchemaMessage] = []
        size = 0
        for version in _select_page(listed, request)[:SCHEMAS_MAX]:
            schemas.append(await self.message_of(version))
            size += len(schemas[-1].schema)
            if size > SCHEMAS_CHARACTERS_MAX:
                break
        return SubjectsResponse(schemas=schemas, contexts=contexts)

    def _starting_with(self, prefix: str) -> Iterable[QualifiedSubject]:
        if prefix.startswith(EVERY_CONTEXT):
            context, name = None, prefix.removeprefix(EVERY_CONTEXT)
        else:
            context, name = QualifiedSubject.parse(prefix)
        return (
            subject
            for subject in self._registry.subjects()
            if context in (None, subject.context) and subject.name.startswith(name)
        )


def _select_page(listed: Sequence[T], request: ListSubjectsRequest) -> Sequence[T]:
    return listed[request.offset :] if request.limit <= 0 else listed[request.offset : request.offset + request.limit]


class SchemaSubject(RegistryApi[GetSubjectRequest, SubjectResponse]):
    """Returns the versions of a subject, or one of them.

    Without a version, the numbers of all are returned; with one, its schema and the ids of the schemas that refer to
    it. `metadata` asks for the latest version that has these properties.
    """

    changes = None

    async def needs(self, request: GetSubjectRequest) -> Sequence[Need]:
        return await self.needs_on(Operation.DESCRIBE, request.subject)

    async def respond(self, request: GetSubjectRequest) -> SubjectResponse:
        subject = QualifiedSubject.parse(request.subject)
        if request.metadata is not None:
            registered = await self._with_properties(subject, request.metadata, deleted=request.deleted)
            return SubjectResponse(schema=await self.message_of(registered, request.format))
        if request.version is None:
            versions = await self._registry.find_versions(subject, deleted=request.deleted or request.deleted_only)
            chosen = versions.select(deleted=request.deleted, deleted_only=request.deleted_only)
            return SubjectResponse(versions=[version.version for version in chosen])
        version = await self._registry.find_version_anywhere(subject, request.version, deleted=request.deleted)
        return SubjectResponse(
            schema=await self.message_of(version, request.format), referrers=self._registry.referrers(version)
        )

    async def _with_properties(
        self, subject: QualifiedSubject, properties: Mapping[str, str], *, deleted: bool
    ) -> SubjectVersion:
        versions = (await self._registry.find_versions(subject, deleted=deleted)).select(deleted=deleted)
        for version in reversed(versions):
            metadata = self._registry.schema_of(version).content.metadata or {}
            if properties.items() <= dict(metadata.get("properties") or {}).items():
                return version
        raise SchemaRegistryError("Schema not found", code=RegistryCode.SCHEMA_NOT_FOUND)


class SchemaDelete(RegistryApi[DeleteSubjectRequest, DeletedResponse]):
    """Deletes a subject or one of its versions.

    A deleted version is hidden, but its id still returns its schema. Permanent deletion is for versions that are
    deleted already. What other schemas refer to is not deleted.
    """

    changes = single_change("schema", DELETE, name="subject")

    async def needs(self, request: DeleteSubjectRequest) -> Sequence[Need]:
        return await self.needs_on(Operation.DELETE, request.subject)

    async def respond(self, request: DeleteSubjectRequest) -> DeletedResponse:
        subject, permanent = QualifiedSubject.parse(request.subject), request.permanent
        if request.version is None:
            return DeletedResponse(versions=await self._registry.delete_subject(subject, permanent=permanent))
        version = await self._registry.delete_version(subject, request.version, permanent=permanent)
        return DeletedResponse(versions=[version])


class SchemaSettings(RegistryApi[GetSettingsRequest, SettingsResponse]):
    """Returns configuration and mode of a subject or context.

    An empty subject is the default context, `:.name:` another one. For a subject, only its own settings are returned,
    unless `default_to_global` asks for those that apply to it.
    """

    changes = None

    async def needs(self, request: GetSettingsRequest) -> Sequence[Need]:
        return [subject_need(Operation.DESCRIBE_CONFIGS, request.subject)]

    async def respond(self, request: GetSettingsRequest) -> SettingsResponse:
        subject = QualifiedSubject.parse(request.subject)
        if request.default_to_global or not subject.name:
            return SettingsResponse(config=self._registry.config(subject), mode=self._registry.mode(subject))
        settings = self._registry.settings(subject)
        return SettingsResponse(config=settings.config or None, mode=settings.mode)


class SchemaConfigure(RegistryApi[ConfigureRequest, SettingsResponse]):
    """Changes or resets configuration or mode of a subject or context.

    IMPORT mode is for subjects and contexts without schemas, unless `force` is given; deleted versions are then deleted
    permanently.
    """

    changes = single_change("schema settings", UPDATE, name="subject")

    async def needs(self, request: ConfigureRequest) -> Sequence[Need]:
        """Require ALTER_CONFIGS on the subject's topic, or on the cluster for a context; DELETE for IMPORT.

        Mode IMPORT deletes permanently what is deleted already. An alias shows the schemas of its target to those who
        may describe the alias, so it requires DESCRIBE on the target.
        """
        subject = QualifiedSubject.parse(request.subject)
        needs = [subject_need(Operation.ALTER_CONFIGS, request.subject)]
        if request.mode == IMPORT and subject.name:
            needs.append(subject_need(Operation.DELETE, request.subject))
        alias = (request.config or {}).get("alias")
        if isinstance(alias, str) and alias:
            needs += await self.needs_on(Operation.DESCRIBE, str(subject.sibling(alias)))
        return needs

    async def respond(self, request: ConfigureRequest) -> SettingsResponse:
        subject = QualifiedSubject.parse(request.subject)
        before = self._registry.settings(subject)
        if request.config is not None or request.reset_config:
            before = await self._registry.configure(subject, None if request.reset_config else request.config)
        if request.mode is not None or request.reset_mode:
            mode = None if request.reset_mode else request.mode
            before = await self._registry.set_mode(subject, mode, force=request.force)
        return SettingsResponse(config=before.config or None, mode=before.mode)
