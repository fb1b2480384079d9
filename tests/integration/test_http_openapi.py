"""The API behaves as its OpenAPI page says for arbitrary requests."""

from __future__ import annotations

from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

from millstream.gateway.api.openapi import openapi_document
from millstream.gateway.app import ROUTES
from millstream_testing.server import Server

EXAMPLES = 4
PATIENCE_S = 60.0

schema = schemathesis.openapi.from_dict(openapi_document(ROUTES))
schema.config.phases.update(phases=["fuzzing"])
# A stream ends when its reader disconnects, which no request of this test does.
finite = schema.exclude(path_regex="/events$")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A separate server: these requests may create, change and delete any name."""
    with Server(tmp_path_factory.mktemp("openapi") / "data", settings={"pipelines-enabled": "false"}) as started:
        yield started


@finite.parametrize()
@settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_every_response_is_documented(case: schemathesis.Case[Any], server: Server) -> None:
    case.call_and_validate(
        base_url=f"http://{server.http}",
        timeout=PATIENCE_S,
        checks=[
            not_a_server_error,
            status_code_conformance,
            content_type_conformance,
            response_schema_conformance,
        ],
    )


def test_an_oversized_header_is_refused_as_documented(server: Server) -> None:
    case = finite["/v1/dead-letters/{name}"]["GET"].Case(
        path_parameters={"name": "orders"}, query={"filter": "x" * 70_000}
    )
    response = case.call(base_url=f"http://{server.http}", timeout=PATIENCE_S)
    assert response.status_code == HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
    case.validate_response(response, checks=[status_code_conformance, response_schema_conformance])


def test_the_page_names_every_route_once() -> None:
    document = openapi_document(ROUTES)
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len(operations) == len(ROUTES)
    assert len({operation["operationId"] for operation in operations}) == len(ROUTES)


def test_descriptions_are_plain_paragraphs() -> None:
    schemas = openapi_document(ROUTES)["components"]["schemas"].values()
    described = [schema["description"] for schema in schemas if "description" in schema]
    assert len(described) > 50
    assert [text for text in described if "\n" in text or "  " in text] == []
