"""Schemas: subjects and their versions; register, compare, delete, and choose which schemas are compatible."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from http import HTTPStatus
from typing import Any, Final

from millstream.client.admin.schemas import SchemaClient, difference, explain_reasons, parse_reference, readable
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import NotAuthorized, SchemaRegistryError
from millstream.core.schema import AVRO, JSON_SCHEMA, LEVELS, PROTOBUF, subject_topic
from millstream.gateway.api.problem import Refused, invalid
from millstream.gateway.console.visit import Checked, Page, PageRoute, Response, Visit, address, change, done
from millstream.protocol.private.schema_messages import (
    CheckSchemaRequest,
    ConfigureRequest,
    DeleteSubjectRequest,
    GetSubjectRequest,
    ListSubjectsRequest,
    RegisterSchemaRequest,
)

SCHEMA_CHARACTERS_MAX: Final = 1024 * 1024
DIFF_LINES_MAX: Final = 2000
DEFAULT: Final = "default"
_FILES: Final = {AVRO: "schema.avsc", JSON_SCHEMA: "schema.json", PROTOBUF: "schema.proto"}
_TOPIC: Final = ResourceType.TOPIC


async def list_all(visit: Visit) -> Response:
    client = SchemaClient(visit.services.client)
    subjects = (await client.subjects(ListSubjectsRequest())).subjects
    names = sorted(name for name in subjects if visit.search.lower() in name.lower())
    rows = []
    for name in visit.on_page(names):
        try:
            rows.append(await client.version(name))
        except SchemaRegistryError:
            # Deleted meanwhile.
            continue
    settings = None
    with suppress(NotAuthorized):
        settings = await client.settings(default_to_global=True)
    context = {
        **visit.paging(len(names)),
        "subjects": rows,
        "level": "" if settings is None else (settings.config or {}).get("compatibilityLevel", ""),
        "levels": LEVELS,
        "types": list(_FILES),
        "may_configure": await visit.may_change(Operation.ALTER_CONFIGS, ResourceType.CLUSTER),
        "may_register": not visit.settings.read_only,
    }
    return Page("schemas.html", context)


async def register(visit: Visit) -> Response:
    """Register a schema, or say what registering it would do."""
    subject, kind = visit.text("subject", length_max=1024), visit.choice("type", list(_FILES))
    text = visit.text("schema", length_max=SCHEMA_CHARACTERS_MAX)
    lines = visit.text("references", length_max=65_536).splitlines()
    if not subject or not text:
        raise invalid("enter a subject and a schema")
    client = SchemaClient(visit.services.client)
    references = [parse_reference(line.strip()) for line in lines if line.strip()]
    body: dict[str, Any] = {"subject": subject, "schema": text, "schema_type": kind, "references": references}
    if visit.text("only") == "check":
        await _check_compatible(client, body)
        return Checked("It is compatible and could be registered.")
    try:
        made = await client.register(RegisterSchemaRequest(**body))
    except SchemaRegistryError as error:
        if error.code == HTTPStatus.CONFLICT:
            await _check_compatible(client, body)
        raise
    flags = [word for line in lines if line.strip() for word in ("--reference", line.strip())]
    text = f"Version {made.version} of {subject} is registered with id {made.id}"
    return done(address("schemas", subject), text, "schema", "register", subject, _FILES[kind], *flags)


async def _check_compatible(client: SchemaClient, body: Mapping[str, Any]) -> None:
    """Refuse a schema that cannot become the next version of its subject, and say why."""
    reasons = (await client.try_out(CheckSchemaRequest(**body, compiled=True))).reasons
    if reasons:
        explained = explain_reasons(reasons, body["schema"])
        raise Refused(
            HTTPStatus.CONFLICT,
            f"The schema cannot become the next version of {body['subject']}. {explained.rule}",
            field="schema",
            reasons=explained.changes,
            raw="\n".join(reasons),
        )


async def show(visit: Visit) -> Response:
    """Show a version of a subject, and how it differs from the one before."""
    name, version = visit.names["subject"], visit.text("version") or "latest"
    client = SchemaClient(visit.services.client)
    versions = (await client.subject(GetSubjectRequest(subject=name))).versions
    response = await client.version(name, version)
    config = (await client.settings(name, default_to_global=True)).config or {}
    earlier = [version for version in versions if version < response.version]
    lines: list[str] = []
    if earlier:
        lines = difference(await client.version(name, str(earlier[-1])), response)[2 : DIFF_LINES_MAX + 2]
    topic = subject_topic(name)
    await visit.look_up((Operation.DELETE, _TOPIC, topic), (Operation.ALTER_CONFIGS, _TOPIC, topic))
    context = {
        "name": name,
        "versions": versions,
        "found": response,
        "text": readable(response),
        "earlier": earlier[-1] if earlier else None,
        "lines": [(line, {"+": "added", "-": "removed", "@": "place"}.get(line[:1], "")) for line in lines],
        "level": config.get("compatibilityLevel", ""),
        "levels": LEVELS,
        "default": DEFAULT,
        "may_delete": await visit.may_change(Operation.DELETE, _TOPIC, topic),
        "may_configure": await visit.may_change(Operation.ALTER_CONFIGS, _TOPIC, topic),
    }
    return Page("schema.html", context)


async def configure(visit: Visit) -> Response:
    """Set the compatibility level of a subject, or of all subjects without one."""
    name, level = visit.names.get("subject", ""), visit.choice("level", (DEFAULT, *LEVELS))
    if level == DEFAULT:
        request = ConfigureRequest(subject=name, reset_config=True)
    else:
        request = ConfigureRequest(subject=name, config={"compatibilityLevel": level})
    await SchemaClient(visit.services.client).configure(request)
    to = address("schemas", name) if name else address("schemas")
    text = f"The compatibility of {name or 'subjects without their own level'} is set"
    return done(to, text, "schema", "compatibility", *((name,) if name else ()), "--set", level)


async def delete(visit: Visit) -> Response:
    name, version = visit.names["subject"], visit.text("version")
    visit.confirm(name)
    client = SchemaClient(visit.services.client)
    deleted = await client.delete(DeleteSubjectRequest(subject=name, version=version or None))
    flags = ("--version", version) if version else ()
    is_left = name in (await client.subjects(ListSubjectsRequest(prefix=name))).subjects
    numbers = ", ".join(map(str, deleted))
    to = address("schemas", name) if is_left else address("schemas")
    return done(to, f"Version {numbers} of {name} deleted", "schema", "delete", name, *flags)


ROUTES: Final = (
    PageRoute(path="/schemas", handle=list_all),
    change("/schemas", register),
    change("/schemas-compatibility", configure),
    PageRoute(path="/schemas/{subject}", handle=show),
    change("/schemas/{subject}/compatibility", configure),
    change("/schemas/{subject}/delete", delete),
)
