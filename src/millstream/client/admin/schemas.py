"""Operations on the schema registry, over Millstream's private requests."""

from __future__ import annotations

import difflib
import json
from typing import Final, TypeVar

import msgspec

from millstream.core.errors import InvalidRequest, ProtocolViolation, SchemaRegistryError
from millstream.core.schema import PROTOBUF
from millstream.protocol.private.message import decode_response, encode
from millstream.protocol.private.schema_messages import (
    CHECK_KEY,
    CONFIGURE_KEY,
    DELETE_KEY,
    GET_KEY,
    LIST_KEY,
    LOOKUP_KEY,
    REGISTER_KEY,
    SETTINGS_KEY,
    SUBJECT_KEY,
    CheckResponse,
    CheckSchema,
    Configure,
    DeletedResponse,
    DeleteSubject,
    GetSchema,
    GetSettings,
    GetSubject,
    ListSubjects,
    LookupSchema,
    RegisterSchema,
    RegistryResponse,
    SchemaMessage,
    SchemaResponse,
    SettingsResponse,
    SubjectResponse,
    SubjectsResponse,
)
from millstream.protocol.wire.client import Client

R = TypeVar("R", bound=RegistryResponse)

_EXAMINING: Final = frozenset({REGISTER_KEY, LOOKUP_KEY, CHECK_KEY})
"""Requests that wait until a schema is examined; other requests should not queue behind them."""


class SchemaClient:
    """Asks any node; each knows the whole registry. What it refuses is raised as `SchemaRegistryError`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def register(self, request: RegisterSchema) -> SchemaMessage:
        """Register a schema as the next version of a subject, unless a version has it already."""
        return _found((await self._ask(REGISTER_KEY, request, SchemaResponse)).schema)

    async def lookup(self, request: LookupSchema) -> SchemaMessage:
        """Find the version of a subject that has a schema."""
        return _found((await self._ask(LOOKUP_KEY, request, SchemaResponse)).schema)

    async def check(self, request: CheckSchema) -> list[str]:
        """Return why a schema is incompatible with a subject; empty if it is compatible."""
        return list((await self._ask(CHECK_KEY, request, CheckResponse)).reasons)

    async def try_out(self, request: CheckSchema) -> CheckResponse:
        """Return why a schema is incompatible with a subject, which may be new, and the schema for a codec."""
        return await self._ask(CHECK_KEY, msgspec.structs.replace(request, compiled=True), CheckResponse)

    async def get(self, request: GetSchema) -> SchemaResponse:
        """Return a schema by its id or guid."""
        return await self._ask(GET_KEY, request, SchemaResponse)

    async def subjects(self, request: ListSubjects) -> SubjectsResponse:
        """List subjects."""
        return await self._ask(LIST_KEY, request, SubjectsResponse)

    async def latest(self, prefix: str, *, deleted: bool = False) -> list[SchemaMessage]:
        """Return the latest version of each subject that starts with a prefix, however many they are."""
        found: list[SchemaMessage] = []
        while True:
            page = await self.subjects(
                ListSubjects(prefix=prefix, deleted=deleted, schemas=True, latest_only=True, offset=len(found))
            )
            if not page.schemas:
                return found
            found += page.schemas

    async def subject(self, request: GetSubject) -> SubjectResponse:
        """Return the versions of a subject, or one of them."""
        return await self._ask(SUBJECT_KEY, request, SubjectResponse)

    async def version(self, subject: str, version: str = "latest", *, deleted: bool = False) -> SchemaMessage:
        """Return one version of a subject."""
        return _found((await self.subject(GetSubject(subject=subject, version=version, deleted=deleted))).schema)

    async def delete(self, request: DeleteSubject) -> list[int]:
        """Delete a subject or one of its versions; return the numbers of those deleted."""
        return list((await self._ask(DELETE_KEY, request, DeletedResponse)).versions)

    async def settings(self, subject: str = "", *, default_to_global: bool = False) -> SettingsResponse:
        """Return configuration and mode of a subject or context."""
        request = GetSettings(subject=subject, default_to_global=default_to_global)
        return await self._ask(SETTINGS_KEY, request, SettingsResponse)

    async def configure(self, request: Configure) -> SettingsResponse:
        """Change configuration or mode; return what was set before."""
        return await self._ask(CONFIGURE_KEY, request, SettingsResponse)

    async def _ask(self, key: int, request: msgspec.Struct, kind: type[R]) -> R:
        body = await self._client.private(None, key, encode(request), waits=key in _EXAMINING)
        response = decode_response(body, kind)
        if response.code:
            raise SchemaRegistryError(response.message or "the registry refused the request", code=response.code)
        return response


def _found(schema: SchemaMessage | None) -> SchemaMessage:
    if schema is None:
        raise ProtocolViolation("the registry's answer has no schema")
    return schema


def parse_reference(text: str) -> tuple[str, str, int]:
    """Read NAME=SUBJECT:VERSION, or raise `InvalidRequest`."""
    name, equals, rest = text.partition("=")
    subject, colon, version = rest.rpartition(":")
    if not (name and equals and subject and colon and version.isdigit()):
        raise InvalidRequest(f"a reference is written NAME=SUBJECT:VERSION, not {text!r}")
    return name, subject, int(version)


def readable(schema: SchemaMessage) -> str:
    """Return a schema as readable text: JSON is indented."""
    if schema.schema_type == PROTOBUF:
        return schema.schema
    return json.dumps(json.loads(schema.schema), indent=2, ensure_ascii=False)


def difference(before: SchemaMessage, after: SchemaMessage) -> list[str]:
    """Return the lines in which two versions of a subject differ."""
    lines = difflib.unified_diff(
        readable(before).splitlines(),
        readable(after).splitlines(),
        f"{before.subject} version {before.version}",
        f"{after.subject} version {after.version}",
        lineterm="",
    )
    return list(lines)
