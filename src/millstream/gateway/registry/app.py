"""The registry as an ASGI application: finds the route, checks content types, responds as Confluent's server does.

Every error is `{"error_code": …, "message": …}`; the first three digits of the code are the HTTP status. A path may
begin with `/contexts/CONTEXT`, which is then the context of every subject and id in it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated, Any, Final, NamedTuple
from urllib.parse import unquote

import msgspec
from msgspec import Meta

from millstream import __version__
from millstream.client.admin.schemas import SchemaClient
from millstream.core.errors import CatalogUnavailable, MillstreamError, SchemaRegistryError, StorageFailure
from millstream.core.json_problem import plain_problem
from millstream.core.schema import AVRO, CONFIG_KEYS, DEFAULT_LEVEL, LEVEL, NUMBER_MAX, SCHEMA_TYPES, RegistryCode
from millstream.gateway.api.dispatch import PathTree, Scope, Send, host_of, parse_pairs, send_response
from millstream.gateway.api.problem import Refused, retry_after, status_of
from millstream.gateway.api.route import JSON, Lane
from millstream.gateway.api.services import Services
from millstream.gateway.callers import Callers
from millstream.gateway.origin_check import OriginCheck
from millstream.gateway.pressure import ClientDisconnected, Receive, RequestMemory
from millstream.protocol.private.schema_messages import (
    CheckSchemaRequest,
    ConfigureRequest,
    DeleteSubjectRequest,
    GetSchemaRequest,
    GetSubjectRequest,
    ListSubjectsRequest,
    LookupSchemaRequest,
    RegisterSchemaRequest,
    SchemaMessage,
)

_logger = logging.getLogger(__name__)

INVALID_BODY: Final = 400
MISSING_BODY: Final = 422
_LEVEL_SENT: Final = "compatibility"
"""The name of the level in requests; responses call it `compatibilityLevel`."""
_NUMBER: Final = re.compile(r"-?[0-9]{1,10}")


class _Reference(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    subject: str
    version: int = -1


class _Schema(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    schema: str | None = None
    schema_type: str | None = None
    references: Sequence[_Reference] | None = None
    metadata: dict[str, Any] | None = None
    rule_set: dict[str, Any] | None = None
    id: int | None = None
    version: int | None = None


class _Mode(msgspec.Struct, frozen=True, kw_only=True):
    mode: Annotated[str, Meta(max_length=64)]


@dataclass(frozen=True, slots=True)
class RegistryRequest:
    names: Mapping[str, str]
    query: Mapping[str, Sequence[str]]
    body: bytes
    context: str
    """The context that the path begins with; empty if it names none."""

    def flag(self, name: str) -> bool:
        return self.text(name).lower() == "true"

    def text(self, name: str) -> str:
        """Return the value of a parameter; empty if it is not given."""
        values = self.query.get(name)
        return values[-1] if values else ""

    @property
    def subject(self) -> str:
        return self.qualified(self.names.get("subject", ""))

    @property
    def prefix(self) -> str:
        """The prefix of listed subjects: unless the request names a context, they may be in any."""
        if self.context or "subjectPrefix" in self.query:
            return self.qualified(self.text("subjectPrefix"))
        return ":*:"

    def qualified(self, subject: str) -> str:
        """Return a subject with the context of the path, unless it names one itself."""
        return subject if not self.context or subject.startswith(":.") else f":{self.context}:{subject}"

    def decode(self, kind: type[Any]) -> Any:
        if not self.body.strip():
            raise SchemaRegistryError("the body must not be null", code=MISSING_BODY)
        try:
            return msgspec.json.decode(self.body, type=kind)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise SchemaRegistryError(f"the body is invalid: {plain_problem(error)}", code=INVALID_BODY) from None

    @property
    def offset(self) -> int:
        """How many of a list are left out at the beginning."""
        return max(0, self._number("offset", 0))

    @property
    def limit(self) -> int:
        """How many of a list are returned; all if it is not positive."""
        return self._number("limit", -1)

    def page(self, listed: Sequence[Any]) -> Sequence[Any]:
        """Return the part of a list that `offset` and `limit` ask for."""
        return listed[self.offset :] if self.limit <= 0 else listed[self.offset : self.offset + self.limit]

    def _number(self, name: str, default: int) -> int:
        text = self.text(name)
        if text and not _NUMBER.fullmatch(text):
            raise SchemaRegistryError(f"{name} must be a whole number, not {text[:50]!r}", code=INVALID_BODY)
        return int(text or default)


class PlainText(NamedTuple):
    """A response that is no JSON: the text of a schema."""

    text: str


class RegistryRoute(NamedTuple):
    method: str
    path: str
    handle: Callable[[SchemaClient, RegistryRequest], Awaitable[Any]]


def _version_document(schema: SchemaMessage) -> dict[str, Any]:
    document: dict[str, Any] = {
        "subject": schema.subject,
        "version": schema.version,
        "id": schema.id,
        "guid": schema.guid,
        **schema.as_confluent(),
    }
    if schema.deleted:
        document["deleted"] = True
    return document


def _format(request: RegistryRequest) -> str:
    """Return the format that is asked for; one that Confluent's registry does not have is ignored, as there."""
    format = request.text("format")
    return format if format in ("resolved", "serialized") else ""


def _sent(request: RegistryRequest) -> dict[str, Any]:
    """Return the schema in the body, as private requests carry it."""
    body: _Schema = request.decode(_Schema)
    return {
        "subject": request.subject,
        "schema": body.schema or "",
        "schema_type": body.schema_type or AVRO,
        "references": [(reference.name, reference.subject, reference.version) for reference in body.references or ()],
        "metadata": body.metadata,
        "rule_set": body.rule_set,
        "normalize": request.flag("normalize"),
    }


def _constant(response: Any) -> Callable[[SchemaClient, RegistryRequest], Awaitable[Any]]:
    async def respond(client: SchemaClient, request: RegistryRequest) -> Any:
        return response

    return respond


async def _contexts(client: SchemaClient, request: RegistryRequest) -> Any:
    return request.page((await client.subjects(ListSubjectsRequest(prefix=":*:", deleted=True))).contexts)


async def _subjects(client: SchemaClient, request: RegistryRequest) -> Any:
    listed = await client.subjects(
        ListSubjectsRequest(
            prefix=request.prefix,
            deleted=request.flag("deleted"),
            deleted_only=request.flag("deletedOnly"),
            offset=request.offset,
            limit=request.limit,
        )
    )
    return listed.subjects


async def _schemas(client: SchemaClient, request: RegistryRequest) -> Any:
    listed = await client.subjects(
        ListSubjectsRequest(
            prefix=request.prefix,
            deleted=request.flag("deleted"),
            schemas=True,
            latest_only=request.flag("latestOnly"),
            offset=request.offset,
            limit=request.limit,
        )
    )
    return [_version_document(schema) for schema in listed.schemas]


def _by_id(request: RegistryRequest) -> GetSchemaRequest:
    number = request.names["id"]
    if not (_NUMBER.fullmatch(number) and 0 <= int(number) <= NUMBER_MAX):
        raise SchemaRegistryError("HTTP 404 Not Found", code=404)
    subject = request.qualified(request.text("subject"))
    return GetSchemaRequest(id=int(number), subject=subject, format=_format(request), deleted=request.flag("deleted"))


async def _schema(client: SchemaClient, request: RegistryRequest) -> Any:
    response = await client.get(_by_id(request))
    if response.schema is None:
        raise SchemaRegistryError("Schema not found", code=RegistryCode.SCHEMA_NOT_FOUND)
    document = response.schema.as_confluent()
    if request.flag("fetchMaxId"):
        document["maxId"] = response.max_id
    document["guid"] = response.schema.guid
    return document


async def _schema_only(client: SchemaClient, request: RegistryRequest) -> Any:
    return PlainText((await _schema(client, request))["schema"])


async def _users(client: SchemaClient, request: RegistryRequest) -> Sequence[tuple[str, int]]:
    try:
        return (await client.get(_by_id(request))).uses
    except SchemaRegistryError as error:
        if error.code == RegistryCode.SCHEMA_NOT_FOUND:
            raise SchemaRegistryError("Schema not found", code=error.code) from None
        raise


async def _schema_subjects(client: SchemaClient, request: RegistryRequest) -> Any:
    return request.page(list(dict.fromkeys(subject for subject, _version in await _users(client, request))))


async def _schema_versions(client: SchemaClient, request: RegistryRequest) -> Any:
    users = await _users(client, request)
    return request.page([{"subject": subject, "version": version} for subject, version in users])


async def _by_guid(client: SchemaClient, request: RegistryRequest) -> Any:
    response = await client.get(GetSchemaRequest(guid=request.names["guid"].lower(), format=_format(request)))
    if response.schema is None:
        raise SchemaRegistryError("Schema not found", code=RegistryCode.SCHEMA_NOT_FOUND)
    return {**response.schema.as_confluent(), "guid": response.schema.guid}


async def _guid_ids(client: SchemaClient, request: RegistryRequest) -> Any:
    response = await client.get(GetSchemaRequest(guid=request.names["guid"].lower()))
    return [{"context": context, "id": number} for context, number in response.ids]


async def _lookup(client: SchemaClient, request: RegistryRequest) -> Any:
    lookup = LookupSchemaRequest(**_sent(request), deleted=request.flag("deleted"), format=_format(request))
    return _version_document(await client.lookup(lookup))


async def _register(client: SchemaClient, request: RegistryRequest) -> Any:
    body: _Schema = request.decode(_Schema)
    number = body.id if body.id is not None and body.id > 0 else None
    made = await client.register(RegisterSchemaRequest(**_sent(request), id=number, version=body.version or None))
    # Without the text: clients expect the text that they sent, a descriptor in the case of Protobuf.
    return {"id": made.id, "version": made.version, "guid": made.guid}


async def _versions(client: SchemaClient, request: RegistryRequest) -> Any:
    response = await client.subject(
        GetSubjectRequest(
            subject=request.subject, deleted=request.flag("deleted"), deleted_only=request.flag("deletedOnly")
        )
    )
    return request.page(response.versions)


async def _find_version(client: SchemaClient, request: RegistryRequest, *, deleted: bool) -> Any:
    version = request.names["version"]
    # The latest version is one that is not deleted, whatever else is asked for.
    deleted = deleted and version not in ("latest", "-1")
    return await client.subject(
        GetSubjectRequest(subject=request.subject, version=version, deleted=deleted, format=_format(request))
    )


async def _version(client: SchemaClient, request: RegistryRequest) -> Any:
    return _version_document((await _find_version(client, request, deleted=request.flag("deleted"))).schema)


async def _version_only(client: SchemaClient, request: RegistryRequest) -> Any:
    return PlainText((await _find_version(client, request, deleted=request.flag("deleted"))).schema.schema)


async def _referenced_by(client: SchemaClient, request: RegistryRequest) -> Any:
    return request.page((await _find_version(client, request, deleted=True)).referrers)


async def _with_metadata(client: SchemaClient, request: RegistryRequest) -> Any:
    keys, values = request.query.get("key", ()), request.query.get("value", ())
    query = GetSubjectRequest(
        subject=request.subject,
        metadata=dict(zip(keys, values, strict=False)),
        deleted=request.flag("deleted"),
        format=_format(request),
    )
    schema = (await client.subject(query)).schema
    if schema is None:
        raise SchemaRegistryError("Schema not found", code=RegistryCode.SCHEMA_NOT_FOUND)
    return _version_document(schema)


async def _delete_subject(client: SchemaClient, request: RegistryRequest) -> Any:
    return await client.delete(DeleteSubjectRequest(subject=request.subject, permanent=request.flag("permanent")))


async def _delete_version(client: SchemaClient, request: RegistryRequest) -> Any:
    deletion = DeleteSubjectRequest(
        subject=request.subject, version=request.names["version"], permanent=request.flag("permanent")
    )
    return (await client.delete(deletion))[0]


async def _check(client: SchemaClient, request: RegistryRequest) -> Any:
    version, is_verbose = request.names.get("version"), request.flag("verbose")
    try:
        reasons = await client.check(CheckSchemaRequest(**_sent(request), version=version))
    except SchemaRegistryError as error:
        is_unknown = error.code in (RegistryCode.SUBJECT_NOT_FOUND, RegistryCode.VERSION_NOT_FOUND)
        if is_unknown and version in (None, "latest", "-1"):
            # A subject without versions is compatible with everything, unless one of them is named.
            reasons = []
        elif is_unknown:
            raise SchemaRegistryError(f"Version {version} not found.", code=RegistryCode.VERSION_NOT_FOUND) from None
        elif error.code == RegistryCode.INVALID_SCHEMA and is_verbose:
            reasons = [str(error)]
        else:
            raise
    document: dict[str, Any] = {"is_compatible": not reasons}
    if is_verbose:
        document["messages"] = reasons
    return document


async def _config(client: SchemaClient, request: RegistryRequest) -> Any:
    settings = await client.settings(request.subject, default_to_global=request.flag("defaultToGlobal"))
    if settings.config is None:
        raise SchemaRegistryError(
            f"Subject '{request.subject}' does not have subject-level compatibility configured",
            code=RegistryCode.CONFIG_NOT_FOUND,
        )
    return settings.config


async def _set_config(client: SchemaClient, request: RegistryRequest) -> Any:
    body: dict[str, Any] = request.decode(dict[str, Any])
    sent = {key: value for key, value in body.items() if key == _LEVEL_SENT or key in CONFIG_KEYS}
    config = {LEVEL if key == _LEVEL_SENT else key: value for key, value in sent.items()}
    level = config.get(LEVEL)
    if level is None and config.keys() <= {LEVEL}:
        # Without anything to set, the level is missing, which is refused as one that is unknown.
        config[LEVEL] = ""
    elif isinstance(level, str):
        config[LEVEL] = level.upper()
    await client.configure(ConfigureRequest(subject=request.subject, config=config))
    return sent


async def _reset_config(client: SchemaClient, request: RegistryRequest) -> Any:
    before = await client.configure(ConfigureRequest(subject=request.subject, reset_config=True))
    if before.config is None and request.names.get("subject"):
        raise SchemaRegistryError(f"Subject '{request.subject}' not found.", code=RegistryCode.SUBJECT_NOT_FOUND)
    return before.config or {LEVEL: DEFAULT_LEVEL}


async def _mode(client: SchemaClient, request: RegistryRequest) -> Any:
    settings = await client.settings(request.subject, default_to_global=request.flag("defaultToGlobal"))
    if settings.mode is None:
        raise SchemaRegistryError(
            f"Subject '{request.subject}' does not have subject-level mode configured",
            code=RegistryCode.MODE_NOT_FOUND,
        )
    return {"mode": settings.mode}


async def _set_mode(client: SchemaClient, request: RegistryRequest) -> Any:
    body: _Mode = request.decode(_Mode)
    mode = body.mode.upper()
    await client.configure(ConfigureRequest(subject=request.subject, mode=mode, force=request.flag("force")))
    return {"mode": mode}


async def _reset_mode(client: SchemaClient, request: RegistryRequest) -> Any:
    before = await client.configure(ConfigureRequest(subject=request.subject, reset_mode=True))
    if before.mode is None and request.names.get("subject"):
        raise SchemaRegistryError(f"Subject '{request.subject}' not found.", code=RegistryCode.SUBJECT_NOT_FOUND)
    return {"mode": before.mode or "READWRITE"}


ROUTES: Final = (
    RegistryRoute("GET", "/", _constant({})),
    RegistryRoute("GET", "/v1/metadata/id", _constant({"scope": {"path": [], "clusters": {}}, "id": ""})),
    RegistryRoute("GET", "/v1/metadata/version", _constant({"version": __version__, "commitId": ""})),
    RegistryRoute("GET", "/contexts", _contexts),
    RegistryRoute("GET", "/schemas", _schemas),
    RegistryRoute("GET", "/schemas/types", _constant(list(SCHEMA_TYPES))),
    RegistryRoute("GET", "/schemas/ids/{id}", _schema),
    RegistryRoute("GET", "/schemas/ids/{id}/schema", _schema_only),
    RegistryRoute("GET", "/schemas/ids/{id}/subjects", _schema_subjects),
    RegistryRoute("GET", "/schemas/ids/{id}/versions", _schema_versions),
    RegistryRoute("GET", "/schemas/guids/{guid}", _by_guid),
    RegistryRoute("GET", "/schemas/guids/{guid}/ids", _guid_ids),
    RegistryRoute("GET", "/subjects", _subjects),
    RegistryRoute("POST", "/subjects/{subject}", _lookup),
    RegistryRoute("DELETE", "/subjects/{subject}", _delete_subject),
    RegistryRoute("GET", "/subjects/{subject}/metadata", _with_metadata),
    RegistryRoute("GET", "/subjects/{subject}/versions", _versions),
    RegistryRoute("POST", "/subjects/{subject}/versions", _register),
    RegistryRoute("GET", "/subjects/{subject}/versions/{version}", _version),
    RegistryRoute("DELETE", "/subjects/{subject}/versions/{version}", _delete_version),
    RegistryRoute("GET", "/subjects/{subject}/versions/{version}/schema", _version_only),
    RegistryRoute("GET", "/subjects/{subject}/versions/{version}/referencedby", _referenced_by),
    RegistryRoute("POST", "/compatibility/subjects/{subject}/versions", _check),
    RegistryRoute("POST", "/compatibility/subjects/{subject}/versions/{version}", _check),
    RegistryRoute("GET", "/config", _config),
    RegistryRoute("PUT", "/config", _set_config),
    RegistryRoute("DELETE", "/config", _reset_config),
    RegistryRoute("GET", "/config/{subject}", _config),
    RegistryRoute("PUT", "/config/{subject}", _set_config),
    RegistryRoute("DELETE", "/config/{subject}", _reset_config),
    RegistryRoute("GET", "/mode", _mode),
    RegistryRoute("PUT", "/mode", _set_mode),
    RegistryRoute("DELETE", "/mode", _reset_mode),
    RegistryRoute("GET", "/mode/{subject}", _mode),
    RegistryRoute("PUT", "/mode/{subject}", _set_mode),
    RegistryRoute("DELETE", "/mode/{subject}", _reset_mode),
)


PREFIX: Final = "/registry"
CONTENT_TYPE: Final = "application/vnd.schemaregistry.v1+json"
_ACCEPTED: Final = (CONTENT_TYPE, "application/vnd.schemaregistry+json", JSON, "application/octet-stream")
_CONTEXTS: Final = b"/contexts/"


class RegistryApp:
    """Serves the registry's routes below a prefix."""

    def __init__(
        self, services: Services, site: OriginCheck, callers: Callers | None = None, *, prefix: str = PREFIX
    ) -> None:
        self._services = services
        self._site = site
        self._callers = callers
        """Authenticates callers; None where everyone may do everything."""
        self._prefix = prefix.encode()
        self._tree: PathTree[RegistryRoute] = PathTree()
        for route in ROUTES:
            self._tree.add(route.method, route.path, route)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            response = await self._authenticated(scope, receive)
        except ClientDisconnected:
            return
        except SchemaRegistryError as error:
            await self._send_error(send, error.code, str(error))
        except Refused as error:
            await self._send_error(send, error.status, _phrase(error), error.headers)
        except (CatalogUnavailable, StorageFailure) as error:
            await self._send_error(send, RegistryCode.STORE_FAILED, str(error))
        except MillstreamError as error:
            await self._send_error(send, status_of(error), str(error), retry_after(error))
        except Exception:
            _logger.exception("a request failed", extra={"path": scope["path"]})
            await self._send_error(send, HTTPStatus.INTERNAL_SERVER_ERROR, "the gateway failed; see its log")
        else:
            kind = _content_type(dict(scope["headers"]).get(b"accept", b""))
            content = response.text.encode() if isinstance(response, PlainText) else msgspec.json.encode(response)
            await self._send(send, HTTPStatus.OK, content, kind)

    async def _authenticated(self, scope: Scope, receive: Receive) -> Any:
        """Serve with the rights of the caller."""
        if self._callers is None:
            return await self._serve(self._services, scope, receive)
        async with self._callers.acting_for(scope["headers"], host_of(scope)) as caller:
            return await self._serve(caller.services, scope, receive)

    async def _serve(self, services: Services, scope: Scope, receive: Receive) -> Any:
        context, path = _split_context(scope["raw_path"].partition(b"?")[0].removeprefix(self._prefix))
        route, names = self._tree.find(scope["method"], path)
        services.check_started()
        headers = dict(scope["headers"])
        self._site.check(headers)
        if _content_type(headers.get(b"accept", b"")) is None:
            raise Refused(HTTPStatus.NOT_ACCEPTABLE, "HTTP 406 Not Acceptable")
        with RequestMemory(services.pressure, Lane.ADMIN, services.principal) as memory:
            body = b""
            if scope["method"] in ("POST", "PUT"):
                _check_body_type(headers)
                body = await memory.read(headers, receive)
            request = RegistryRequest(names, _query(scope["query_string"]), body, context)
            return await route.handle(SchemaClient(services.client), request)

    async def _send_error(self, send: Send, code: int, message: str, more: Mapping[str, str] | None = None) -> None:
        status = code if code < 1000 else code // 100
        content = msgspec.json.encode({"error_code": int(code), "message": message})
        await self._send(send, status, content, CONTENT_TYPE, more)

    async def _send(
        self, send: Send, status: int, content: bytes, kind: str | None, more: Mapping[str, str] | None = None
    ) -> None:
        self._services.pressure.count(status)
        headers = [(name.encode(), value.encode()) for name, value in (more or {}).items()]
        await send_response(send, status, (b"content-type", (kind or CONTENT_TYPE).encode()), content, headers)


def _split_context(path: bytes) -> tuple[str, bytes]:
    path = path.rstrip(b"/") or b"/"
    if not path.startswith(_CONTEXTS):
        return "", path
    named, slash, rest = path.removeprefix(_CONTEXTS).partition(b"/")
    name = unquote(named.decode("ascii", "replace")).strip(":")
    context = name if name.startswith(".") else f".{name}"
    return ("" if context == "." else context), slash + rest if slash else b"/"


def _query(text: bytes) -> dict[str, list[str]]:
    query: dict[str, list[str]] = {}
    for name, value in parse_pairs(text, "the query string"):
        query.setdefault(name, []).append(value)
    return query


def _content_type(accept: bytes) -> str | None:
    """Return the content type of a response; None if the client accepts none of those available."""
    accepted = [part.partition(";")[0].strip().lower() for part in accept.decode("latin-1").split(",") if part.strip()]
    if not accepted:
        return CONTENT_TYPE
    for media_type in accepted:
        if media_type in ("*/*", "application/*", CONTENT_TYPE, "application/vnd.schemaregistry+json"):
            return CONTENT_TYPE if media_type != "application/vnd.schemaregistry+json" else media_type
    return JSON if JSON in accepted else None


def _check_body_type(headers: dict[bytes, bytes]) -> None:
    kind = headers.get(b"content-type", b"").partition(b";")[0].strip().lower().decode("latin-1")
    if (kind and kind not in _ACCEPTED) or b"content-encoding" in headers:
        raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "HTTP 415 Unsupported Media Type")


def _phrase(error: Refused) -> str:
    """Return the error message of Confluent's server for requests that match none of its resources."""
    if error.status in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
        return f"HTTP {int(error.status)} {error.status.phrase}"
    return error.detail
