"""The OpenAPI page, made from the routes and the types that check what comes in."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from millstream import __version__
from millstream.http.problem import CONTENT_TYPE as PROBLEM
from millstream.http.route import EVENT_STREAM, JSON, PREFIX, Nothing, Route

VERSION: Final = "3.1.0"
_REF: Final = "#/components/schemas/{name}"
_REFUSAL_REF: Final = "#/components/responses/"

_REFUSALS: Final = {
    HTTPStatus.BAD_REQUEST: "What was sent cannot be read.",
    HTTPStatus.FORBIDDEN: "Pages of other sites may not use this.",
    HTTPStatus.NOT_FOUND: "There is no such thing.",
    HTTPStatus.CONFLICT: "Something is in the way.",
    HTTPStatus.UNPROCESSABLE_ENTITY: "What was sent can be read, but cannot be done.",
    HTTPStatus.TOO_MANY_REQUESTS: "Too much is under way; `Retry-After` says when to try again.",
    HTTPStatus.INTERNAL_SERVER_ERROR: "The gateway failed.",
    HTTPStatus.BAD_GATEWAY: "The broker's answer was not understood.",
    HTTPStatus.SERVICE_UNAVAILABLE: "The broker cannot do this now; it passes by itself.",
    HTTPStatus.GATEWAY_TIMEOUT: "The broker did not answer in time; whether it was done is not known.",
}
_BODY_REFUSALS: Final = {
    HTTPStatus.REQUEST_TIMEOUT: "The body did not arrive in time.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body, or a message in it, is too large.",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "The body is of a type that is not understood here.",
}


class Problem(msgspec.Struct, frozen=True):
    """What went wrong, as RFC 9457 has it; some kinds have members of their own."""

    type: str
    title: str
    status: Annotated[int, Meta(ge=400, le=599)]
    detail: str
    instance: str


def openapi_document(routes: Iterable[Route[Any, Any]]) -> dict[str, Any]:
    """The whole page."""
    listed = list(routes)
    schemas = _Schemas(listed)
    paths: dict[str, dict[str, Any]] = {}
    for route in listed:
        paths.setdefault(PREFIX + route.path, {})[route.method.lower()] = _operation(route, schemas)
    return {
        "openapi": VERSION,
        "info": {
            "title": "Millstream",
            "version": __version__,
            "description": "Publish, receive and settle messages, and look after topics, subscriptions and the rest.",
        },
        "paths": paths,
        "components": {"schemas": schemas.components, "responses": _refusals(schemas)},
    }


class _Schemas:
    """The schemas of all types that routes name."""

    def __init__(self, routes: Iterable[Route[Any, Any]]) -> None:
        types: list[Any] = [Problem]
        for route in routes:
            types += [one for one in (route.body, *route.answers, *route.forms.values()) if _has_schema(one)]
        unique = list(dict.fromkeys(types))
        found, self.components = msgspec.json.schema_components(unique, ref_template=_REF)
        self._of = dict(zip(unique, found, strict=True))

    def of(self, kind: Any) -> dict[str, Any]:
        schema: dict[str, Any] = self._of[kind]
        return schema


def _has_schema(kind: Any) -> bool:
    return kind is not None and kind is not bytes and kind is not Nothing


def _operation(route: Route[Any, Any], schemas: _Schemas) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _operation_id(route),
        "tags": [route.tag],
        "summary": route.summary,
        "responses": _responses(route, schemas),
    }
    parameters = [
        *(_path_parameter(name, kind) for name, kind in route.names.items()),
        *_parameters(route.query, "query"),
        *([] if route.headers is None else _parameters(route.headers, "header")),
    ]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not Nothing:
        forms: Mapping[str, Any] = route.forms or {JSON: route.body}
        content = {name: {"schema": schemas.of(kind)} if _has_schema(kind) else {} for name, kind in forms.items()}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _operation_id(route: Route[Any, Any]) -> str:
    words = re.findall(r"\w+", route.path)
    return "_".join([route.method.lower(), *words])


def _responses(route: Route[Any, Any], schemas: _Schemas) -> dict[str, Any]:
    told: dict[HTTPStatus, str] = {route.status: "Done.", **route.more}
    responses: dict[str, Any] = {}
    for status, description in told.items():
        response: dict[str, Any] = {"description": description}
        if route.streams:
            response["content"] = {EVENT_STREAM: {"schema": {"type": "string"}}}
        elif route.answers:
            found = [schemas.of(kind) for kind in route.answers]
            response["content"] = {JSON: {"schema": found[0] if len(found) == 1 else {"anyOf": found}}}
        responses[str(int(status))] = response
    for status in sorted([*_REFUSALS, *([] if route.body is Nothing else _BODY_REFUSALS)]):
        responses[str(int(status))] = {"$ref": _REFUSAL_REF + _refusal_name(status)}
    return responses


def _refusals(schemas: _Schemas) -> dict[str, Any]:
    """What every route may answer instead."""
    content = {PROBLEM: {"schema": schemas.of(Problem)}}
    told = sorted({**_REFUSALS, **_BODY_REFUSALS}.items())
    return {_refusal_name(status): {"description": said, "content": content} for status, said in told}


def _refusal_name(status: HTTPStatus) -> str:
    return status.phrase.title().replace(" ", "")


def _path_parameter(name: str, kind: Any) -> dict[str, Any]:
    return {"name": name, "in": "path", "required": True, "schema": msgspec.json.schema(kind)}


def _parameters(kind: type, where: str) -> list[dict[str, Any]]:
    schema = msgspec.json.schema(kind)
    properties = schema["$defs"][kind.__name__]["properties"]
    required = schema["$defs"][kind.__name__]["required"]
    found: list[dict[str, Any]] = []
    for name, described in properties.items():
        description = described.pop("description", None)
        parameter = {"name": name, "in": where, "required": name in required, "schema": _without_null(described)}
        found.append(parameter if description is None else {**parameter, "description": description})
    return found


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of a parameter, which is there or not, and never null."""
    choices = [one for one in schema.get("anyOf", ()) if one != {"type": "null"}]
    kept = {name: value for name, value in schema.items() if name != "anyOf" and (name, value) != ("default", None)}
    return {**kept, **choices[0]} if len(choices) == 1 else {**kept, **({"anyOf": choices} if choices else {})}
