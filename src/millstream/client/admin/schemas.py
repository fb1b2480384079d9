"""Operations on the schema registry, over Millstream's private requests."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple, TypeVar

import msgspec

from millstream.core.errors import InvalidRequest, ProtocolViolation, SchemaRegistryError
from millstream.core.schema import PROTOBUF
from millstream.protocol.private.message import Request, request_private
from millstream.protocol.private.schema_messages import (
    CheckResponse,
    CheckSchemaRequest,
    ConfigureRequest,
    DeleteSubjectRequest,
    GetSchemaRequest,
    GetSettingsRequest,
    GetSubjectRequest,
    ListSubjectsRequest,
    LookupSchemaRequest,
    RegisterSchemaRequest,
    RegistryResponse,
    SchemaMessage,
    SchemaResponse,
    SettingsResponse,
    SubjectResponse,
    SubjectsResponse,
)
from millstream.protocol.wire.client import Client

R = TypeVar("R", bound=RegistryResponse)

_EXAMINING: Final = (RegisterSchemaRequest, LookupSchemaRequest, CheckSchemaRequest)
"""Requests that wait until a schema is examined; other requests should not queue behind them."""


class SchemaClient:
    """Asks any node; each knows the whole registry. A refusal is raised as `SchemaRegistryError`."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def register(self, request: RegisterSchemaRequest) -> SchemaMessage:
        """Register a schema as the next version of a subject, unless a version has it already."""
        return _require_schema((await self._request(request)).schema)

    async def lookup(self, request: LookupSchemaRequest) -> SchemaMessage:
        return _require_schema((await self._request(request)).schema)

    async def check(self, request: CheckSchemaRequest) -> list[str]:
        """Return why a schema is incompatible with a subject; empty if it is compatible."""
        return list((await self._request(request)).reasons)

    async def try_out(self, request: CheckSchemaRequest) -> CheckResponse:
        """Return why a schema is incompatible with a subject, which may be new, and the schema for a codec."""
        return await self._request(msgspec.structs.replace(request, compiled=True))

    async def get(self, request: GetSchemaRequest) -> SchemaResponse:
        return await self._request(request)

    async def subjects(self, request: ListSubjectsRequest) -> SubjectsResponse:
        return await self._request(request)

    async def latest(self, prefix: str, *, deleted: bool = False) -> list[SchemaMessage]:
        """Return the latest version of each subject that starts with a prefix, however many they are."""
        schemas: list[SchemaMessage] = []
        while True:
            page = await self.subjects(
                ListSubjectsRequest(prefix=prefix, deleted=deleted, schemas=True, latest_only=True, offset=len(schemas))
            )
            if not page.schemas:
                return schemas
            schemas += page.schemas

    async def subject(self, request: GetSubjectRequest) -> SubjectResponse:
        return await self._request(request)

    async def version(self, subject: str, version: str = "latest", *, deleted: bool = False) -> SchemaMessage:
        return _require_schema(
            (await self.subject(GetSubjectRequest(subject=subject, version=version, deleted=deleted))).schema
        )

    async def delete(self, request: DeleteSubjectRequest) -> list[int]:
        """Delete a subject or one of its versions; return the numbers of those deleted."""
        return list((await self._request(request)).versions)

    async def settings(self, subject: str = "", *, default_to_global: bool = False) -> SettingsResponse:
        return await self._request(GetSettingsRequest(subject=subject, default_to_global=default_to_global))

    async def configure(self, request: ConfigureRequest) -> SettingsResponse:
        """Change configuration or mode; return what was set before."""
        return await self._request(request)

    async def _request(self, request: Request[R]) -> R:
        response = await request_private(self._client, None, request, waits=isinstance(request, _EXAMINING))
        if response.code:
            raise SchemaRegistryError(response.message or "the registry refused the request", code=response.code)
        return response


def _require_schema(schema: SchemaMessage | None) -> SchemaMessage:
    if schema is None:
        raise ProtocolViolation("the registry's response has no schema")
    return schema


def parse_reference(text: str) -> tuple[str, str, int]:
    """Read NAME=SUBJECT:VERSION, or raise `InvalidRequest`."""
    name, equals, rest = text.partition("=")
    subject, colon, version = rest.rpartition(":")
    if not (name and equals and subject and colon and version.isdigit()):
        raise InvalidRequest(f"a reference must be written NAME=SUBJECT:VERSION, not {text!r}")
    return name, subject, int(version)


def readable(schema: SchemaMessage) -> str:
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


_REASON: Final = re.compile(
    r"\{errorType:(['\"])(?P<kind>\w+)\1, description:\1At (?P<path>.*?), (?P<text>(?:the|a|no) .*?)\1"
    r"(?:, additionalInfo:\1(?P<detail>.*)\1)?\}",
    re.DOTALL,
)
_CONTEXT: Final = tuple(
    re.compile(pattern, re.DOTALL)
    for pattern in (r"\{oldSchemaVersion: (\d+)\}", r"\{oldSchema: '(.*)'\}", r"\{.*, compatibility: '(\w+)'\}")
)
"""The version that the schema was compared with, its text or the beginning of it, and the compatibility level."""
_LEVELS: Final = {
    "BACKWARD": "a new schema has to read messages of the version before",
    "BACKWARD_TRANSITIVE": "a new schema has to read messages of every earlier version",
    "FORWARD": "the version before has to read messages of a new schema",
    "FORWARD_TRANSITIVE": "every earlier version has to read messages of a new schema",
    "FULL": "a new schema and the version before have to read messages of each other",
    "FULL_TRANSITIVE": "a new schema and every earlier version have to read messages of each other",
}


class Incompatibility(NamedTuple):
    """The reasons why a schema is incompatible with an earlier version, in sentences."""

    rule: str
    """The version it is incompatible with, and the compatibility level that forbids that."""
    changes: list[str]


def explain_reasons(reasons: Sequence[str], new: str) -> Incompatibility:
    """Explain the reasons that the registry gives, in Confluent's notation, for refusing a schema."""
    version, old, level = (_part(part, reasons) for part in _CONTEXT)
    rule = f"It is incompatible with version {version}: with compatibility level {level}, {_LEVELS.get(level, '')}."
    changes = []
    for reason in reasons:
        if match := _REASON.fullmatch(reason):
            changes.append(_explain(match, new, old, version))
        elif not reason.startswith("{"):
            changes.append(f"{reason}.")
    return Incompatibility(rule, changes)


def _part(pattern: re.Pattern[str], reasons: Sequence[str]) -> str:
    return next((match[1] for reason in reasons if (match := pattern.fullmatch(reason))), "")


def _explain(reason: re.Match[str], new: str, old: str, version: str) -> str:
    kind, text = reason["kind"], reason["text"]
    detail = reason["detail"] or kind.replace("_", " ").lower()
    # The reader's schema is named first, and the path leads through it.
    is_reader_new = text.find("new") < text.find("old")
    where = _field_at(reason["path"], new if is_reader_new else old)
    if kind == "READER_FIELD_MISSING_DEFAULT_VALUE":
        if is_reader_new:
            return f"{where} is new and has no default, and messages of version {version} do not have it."
        return f"{where} is removed; version {version} has no default for it, and new messages do not have it."
    if kind == "TYPE_MISMATCH":
        return f"{where} has another type: {detail}."
    return f"{where}: {text}." if detail in text else f"{where}: {text} ({detail})."


def _field_at(path: str, schema: str) -> str:
    """Return the field that a path names: by the numbers of an Avro schema's fields, by properties, or by tags."""
    parts = path.removeprefix("#").strip("/").split("/")
    names: list[str] = []
    try:
        node: Any = json.loads(schema)
    except ValueError:
        # Protobuf, or a schema that the reason shows in part.
        return f"Field {parts[-1]} of {parts[-2]}" if len(parts) > 1 and parts[-1].isdigit() else ".".join(parts)
    for before, part in zip(["", *parts], parts, strict=False):
        try:
            node = node[int(part)] if isinstance(node, list) else node[part]
        except (LookupError, TypeError, ValueError):
            node = None
        if before in ("properties", "required"):
            names.append(part)
        elif before == "fields" and isinstance(node, dict):
            names.append(str(node.get("name", part)))
    return f"Field {'.'.join(names)}" if names else "The schema"
