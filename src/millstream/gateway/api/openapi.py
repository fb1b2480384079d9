"""The OpenAPI document, generated from the routes and the types that validate requests, and the page `/docs`, which
shows it without scripts or external resources.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from http import HTTPStatus
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from millstream import __version__
from millstream.gateway.api.problem import CONTENT_TYPE as PROBLEM
from millstream.gateway.api.route import EVENT_STREAM, JSON, PREFIX, NoFields, Route

VERSION: Final = "3.1.0"

_REF: Final = "#/components/schemas/{name}"

_REFUSAL_REF: Final = "#/components/responses/"

_REFUSALS: Final = {
    HTTPStatus.BAD_REQUEST: "The request is malformed.",
    HTTPStatus.UNAUTHORIZED: "The node requires authentication, and the request has no valid credential.",
    HTTPStatus.FORBIDDEN: "The caller lacks a permission, or a browser sent the request for a page of another origin.",
    HTTPStatus.NOT_FOUND: "The resource does not exist.",
    HTTPStatus.CONFLICT: "The request conflicts with the current state, for example because the name is taken.",
    HTTPStatus.UNPROCESSABLE_ENTITY: "The request is well-formed but invalid.",
    HTTPStatus.TOO_MANY_REQUESTS: "Too many requests are in progress; `Retry-After` says when to try again.",
    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE: "The path and the headers of the request are too large.",
    HTTPStatus.INTERNAL_SERVER_ERROR: "The gateway failed.",
    HTTPStatus.BAD_GATEWAY: "The broker's response was invalid.",
    HTTPStatus.SERVICE_UNAVAILABLE: "The broker is temporarily unable to do this; try again.",
    HTTPStatus.GATEWAY_TIMEOUT: "The broker did not respond in time; the request may have been executed.",
}

_SECURITY: Final = {
    "basic": {
        "type": "http",
        "scheme": "basic",
        "description": "A user and a password, or the id of an API token and its secret.",
    },
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "A JSON web token of an issuer that the node trusts, or an API token.",
    },
}
"""Credentials that callers may send; a node without authentication needs none."""

_BODY_REFUSALS: Final = {
    HTTPStatus.REQUEST_TIMEOUT: "The body did not arrive in time.",
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: "The body, or a message in it, is too large.",
    HTTPStatus.UNSUPPORTED_MEDIA_TYPE: "The content type is not supported here.",
}

_STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}"
    "h2{margin-top:2.5rem;border-bottom:1px solid #ccc}summary{cursor:pointer;padding:.3rem 0}"
    "code,pre{font:14px ui-monospace,monospace}pre{background:#f5f5f5;padding:.7rem;overflow:auto}"
    "table{border-collapse:collapse}td,th{text-align:left;vertical-align:top;padding:.2rem 1rem .2rem 0}"
    "details{border-bottom:1px solid #eee}details>div{padding:0 0 1rem 1rem}b{display:inline-block;min-width:4.5rem}"
)

_STYLE_HASH: Final = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

DOCS_HEADERS: Final = {
    "content-security-policy": f"default-src 'none'; style-src 'sha256-{_STYLE_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
}


class Problem(msgspec.Struct, frozen=True):
    """An error, as RFC 9457 defines it; some types have further members."""

    type: str
    title: str
    status: Annotated[int, Meta(ge=400, le=599)]
    detail: str
    instance: str


def openapi_document(routes: Iterable[Route[Any, Any]]) -> dict[str, Any]:
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
            "description": "Publish, receive and settle messages, and administer topics, subscriptions and pipelines.",
        },
        "paths": paths,
        "security": [*({name: []} for name in _SECURITY), {}],
        "components": {
            "schemas": schemas.components,
            "responses": _refusals(schemas),
            "securitySchemes": _SECURITY,
        },
    }


class _Schemas:
    """The JSON schemas of all types that routes use."""

    def __init__(self, routes: Iterable[Route[Any, Any]]) -> None:
        types: list[Any] = [Problem]
        for route in routes:
            types += [body for body in (route.body, *route.responses, *route.forms.values()) if _has_schema(body)]
        unique = list(dict.fromkeys(types))
        schemas, self.components = msgspec.json.schema_components(unique, ref_template=_REF)
        for component in self.components.values():
            # Indented lines of a docstring would be code blocks: descriptions are Markdown.
            if (text := component.get("description")) is not None:
                component["description"] = " ".join(text.split())
        self._of = dict(zip(unique, schemas, strict=True))

    def of(self, kind: Any) -> dict[str, Any]:
        schema: dict[str, Any] = self._of[kind]
        return schema


def _has_schema(kind: Any) -> bool:
    return kind is not None and kind is not bytes and kind is not NoFields


def _operation(route: Route[Any, Any], schemas: _Schemas) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": _operation_id(route),
        "tags": [route.section],
        "summary": route.summary,
        "responses": _responses(route, schemas),
    }
    parameters = [
        *(
            {"name": name, "in": "path", "required": True, "schema": msgspec.json.schema(kind)}
            for name, kind in route.names.items()
        ),
        *_parameters(route.query, "query"),
        *([] if route.headers is None else _parameters(route.headers, "header")),
    ]
    if parameters:
        operation["parameters"] = parameters
    if route.body is not NoFields:
        forms: Mapping[str, Any] = route.forms or {JSON: route.body}
        content = {name: {"schema": schemas.of(kind)} if _has_schema(kind) else {} for name, kind in forms.items()}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _operation_id(route: Route[Any, Any]) -> str:
    words = re.findall(r"\w+", route.path)
    return "_".join([route.method.lower(), *words])


def _responses(route: Route[Any, Any], schemas: _Schemas) -> dict[str, Any]:
    described: dict[HTTPStatus, str] = {route.usual_status: "Success.", **route.more}
    responses: dict[str, Any] = {}
    for status, description in described.items():
        response: dict[str, Any] = {"description": description}
        if route.streams:
            response["content"] = {EVENT_STREAM: {"schema": {"type": "string"}}}
        elif route.responses:
            schemas_of_responses = [schemas.of(kind) for kind in route.responses]
            response["content"] = {
                JSON: {
                    "schema": schemas_of_responses[0]
                    if len(schemas_of_responses) == 1
                    else {"anyOf": schemas_of_responses}
                }
            }
        responses[str(int(status))] = response
    for status in sorted([*_REFUSALS, *([] if route.body is NoFields else _BODY_REFUSALS)]):
        responses[str(int(status))] = {"$ref": _REFUSAL_REF + _refusal_name(status)}
    return responses


def _refusals(schemas: _Schemas) -> dict[str, Any]:
    """Describe the error responses that every route may give."""
    content = {PROBLEM: {"schema": schemas.of(Problem)}}
    described = sorted({**_REFUSALS, **_BODY_REFUSALS}.items())
    return {
        _refusal_name(status): {"description": description, "content": content} for status, description in described
    }


def _refusal_name(status: HTTPStatus) -> str:
    return status.phrase.title().replace(" ", "")


def _parameters(kind: type, where: str) -> list[dict[str, Any]]:
    schema = msgspec.json.schema(kind)
    properties = schema["$defs"][kind.__name__]["properties"]
    required = schema["$defs"][kind.__name__]["required"]
    parameters: list[dict[str, Any]] = []
    for name, described in properties.items():
        description = described.pop("description", None)
        parameter = {"name": name, "in": where, "required": name in required, "schema": _without_null(described)}
        parameters.append(parameter if description is None else {**parameter, "description": description})
    return parameters


def _without_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Drop null from the schema of a parameter, which is present or absent but never null."""
    choices = [alternative for alternative in schema.get("anyOf", ()) if alternative != {"type": "null"}]
    kept = {name: value for name, value in schema.items() if name != "anyOf" and (name, value) != ("default", None)}
    return {**kept, **choices[0]} if len(choices) == 1 else {**kept, **({"anyOf": choices} if choices else {})}


def docs_page(document: Mapping[str, Any]) -> bytes:
    info = document["info"]
    title = f"{info['title']} {info['version']}"
    services = [
        f"<!doctype html><html lang=en><head><meta charset=utf-8><title>{escape(title)}</title>",
        f"<style>{_STYLE}</style></head><body><h1>{escape(title)}</h1><p>{escape(info['description'])}</p>",
        '<p>For programs: <a href="/openapi.json">/openapi.json</a></p>',
        *_operations(document),
        "<h2>Types</h2>",
        *(_type_section(name, schema) for name, schema in sorted(document["components"]["schemas"].items())),
        "</body></html>\n",
    ]
    return "".join(services).encode()


def _operations(document: Mapping[str, Any]) -> Iterator[str]:
    by_tag: dict[str, list[tuple[str, str, Mapping[str, Any]]]] = {}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            by_tag.setdefault(operation["tags"][0], []).append((method.upper(), path, operation))
    for tag, operations in by_tag.items():
        yield f"<h2>{escape(tag.capitalize())}</h2>"
        for method, path, operation in operations:
            yield (
                f'<details id="{escape(operation["operationId"])}"><summary><b>{method}</b> <code>{escape(path)}</code>'
                f" {escape(operation['summary'])}</summary><div>"
            )
            yield from _parameter_rows(operation.get("parameters", ()))
            if "requestBody" in operation:
                yield f"<p>Body</p>{_contents(operation['requestBody']['content'])}"
            yield from _response_rows(operation["responses"], document["components"]["responses"])
            yield "</div></details>"


def _parameter_rows(parameters: Any) -> Iterator[str]:
    if parameters:
        yield "<p>Parameters</p><table>"
        for parameter in parameters:
            needed = " (required)" if parameter["required"] else ""
            description = escape(parameter.get("description", ""))
            yield (
                f"<tr><td><code>{escape(parameter['name'])}</code><td>{escape(parameter['in'])}{needed}"
                f"<td>{_type(parameter['schema'])}<td>{description}"
            )
        yield "</table>"


def _response_rows(responses: Mapping[str, Any], shared: Mapping[str, Any]) -> Iterator[str]:
    yield "<p>Responses</p><table>"
    for status, response in responses.items():
        described = shared[response["$ref"].rpartition("/")[2]] if "$ref" in response else response
        contents = _contents(described.get("content", {}))
        yield f"<tr><td><code>{status}</code><td>{escape(described['description'])}<td>{contents}"
    yield "</table>"


def _contents(contents: Mapping[str, Any]) -> str:
    rows = (
        f"<code>{escape(media)}</code>{': ' if content.get('schema') else ''}{_type(content.get('schema', {}))}"
        for media, content in contents.items()
    )
    return "<br>".join(rows)


def _type(schema: Any) -> str:
    """Describe a schema in a few words, with a link if it has a name."""
    if isinstance(schema, bool):
        return ""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f'<a href="#type-{name}">{name}</a>'
    if "anyOf" in schema:
        return " or ".join(_type(alternative) for alternative in schema["anyOf"])
    if "enum" in schema:
        return " or ".join(f"<code>{escape(json.dumps(choice))}</code>" for choice in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {})) or 'anything'}"
    return escape(str(schema.get("type", "")))


def _type_section(name: str, schema: Mapping[str, Any]) -> str:
    required = frozenset(schema.get("required", ()))
    rows = "".join(
        f"<tr><td><code>{escape(key)}</code><td>{'required' if key in required else ''}<td>{_type(member)}"
        f"<td>{escape(member.get('description', ''))}"
        for key, member in schema.get("properties", {}).items()
    )
    description = escape(schema.get("description", ""))
    return (
        f'<details id="type-{escape(name)}"><summary><code>{escape(name)}</code></summary>'
        f"<div><p>{description}</p><table>{rows}</table></div></details>"
    )
