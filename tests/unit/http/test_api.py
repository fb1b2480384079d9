from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest

from millstream.core.errors import AuthenticationFailed, BrokerUnreachable, MillstreamError, NotLeader, UnknownTopic
from millstream.gateway.api.dispatch import Api, PathTree
from millstream.gateway.api.event_stream import event
from millstream.gateway.api.problem import Refused
from millstream.gateway.api.route import Lane, NoFields, Request, Route, StreamResponse
from millstream.gateway.api.services import Services
from millstream.gateway.app import ROUTES, build_app
from millstream.gateway.origin_check import OriginCheck
from millstream.gateway.pressure import Pressure, RequestMemory
from millstream_testing.producer_ledger import ProducerLedger


class ExampleRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    number: int = 1
    names: list[str] = []


class ExampleResponse(msgspec.Struct, frozen=True):
    number: int


class ScriptedRoutes:
    """Routes that block, fail and respond as scripted by a test."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.ended = False
        self.error: Exception | None = None
        self.responses = 0

    async def respond(self, services: Services, request: Request[Any, Any]) -> ExampleResponse:
        self.responses += 1
        if self.error is not None:
            raise self.error
        return ExampleResponse(request.query.number)

    async def take(self, services: Services, request: Request[Any, Any]) -> ExampleResponse:
        self.begun.set()
        await self.go_on.wait()
        return request.body if isinstance(request.body, ExampleResponse) else ExampleResponse(len(request.body))

    async def stream(self, services: Services, request: Request[Any, Any]) -> StreamResponse:
        return StreamResponse(self._pieces())

    async def _pieces(self) -> AsyncGenerator[bytes, None]:
        try:
            yield event("message", b"1")
            self.begun.set()
            await self.go_on.wait()
        finally:
            self.ended = True

    def routes(self) -> list[Route[Any, Any]]:
        shared: dict[str, Any] = {"summary": "", "tag": "", "response": ExampleResponse}
        return [
            Route(method="GET", path="/things", handle=self.respond, query=ExampleRequest, body=NoFields, **shared),
            Route(
                method="POST", path="/things/{name}", handle=self.take, query=NoFields, body=ExampleResponse, **shared
            ),
            Route(method="PUT", path="/raw", handle=self.take, query=NoFields, body=bytes, lane=Lane.PUBLISH, **shared),
            Route(
                method="GET",
                path="/stream",
                handle=self.stream,
                query=NoFields,
                body=NoFields,
                lane=Lane.WAIT,
                streams=True,
                **shared,
            ),
        ]


@pytest.fixture
async def scripted() -> ScriptedRoutes:
    return ScriptedRoutes()


@pytest.fixture
async def services() -> AsyncIterator[Services]:
    made = Services("127.0.0.1:1", pressure=Pressure((1, 1, 2), bytes_max=(1000, 1000, 500)))
    yield made
    await made.close()


@pytest.fixture
async def http(scripted: ScriptedRoutes, services: Services) -> AsyncIterator[httpx.AsyncClient]:
    api: Any = Api(scripted.routes(), services, OriginCheck())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://node/v1") as client:
        yield client


@pytest.mark.parametrize("cause", [{}, {"referer": "http://evil.example/"}])
async def test_an_image_of_another_page_leases_no_messages(services: Services, cause: dict[str, str]) -> None:
    api: Any = Api(ROUTES, services, OriginCheck())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://10.1.2.3:8080/v1") as client:
        path, browser = "/subscriptions/billing/events", {"accept-language": "en"}
        response = await client.get(path, headers=browser | cause)
        assert (response.status_code, "a page of this gateway" in response.text) == (403, True)
        own = await client.get(path, headers=browser | {"referer": "http://10.1.2.3:8080/console"})
        assert own.status_code != HTTPStatus.FORBIDDEN


@pytest.mark.parametrize("path", ["/v1%2fx/docs", "/%76%31/x", "/registry%2fx/subjects", "/console%2fx/login"])
async def test_encoded_paths_do_not_pass_for_others(services: Services, path: str) -> None:
    """A proxy that allows some paths only would take them for others than the gateway does."""

    async def respond(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nobody asks the console")

    async def ask() -> Any:
        raise AssertionError("nobody asks the broker")

    app: Any = build_app(ask, ask, services, console=respond)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://node") as client:
        response = await client.get(path)
    assert (response.status_code, "there is no page" in response.text) == (404, True)


async def test_request_fields_are_validated_by_the_types_of_the_route(http: httpx.AsyncClient) -> None:
    assert (await http.get("/things")).json() == {"number": 1}
    assert (await http.get("/things?number=7&names=a&names=b")).json() == {"number": 7}
    for query in ("number=x", "number=1&number=2", "other=1"):
        assert (await http.get(f"/things?{query}")).status_code == 422
    assert (await http.get("/things?names=%FF")).status_code == 400


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (UnknownTopic("no such topic"), 404, None),
        (NotLeader("nobody leads"), 503, "1"),
        (MillstreamError("something"), 500, None),
        (Refused(HTTPStatus.CONFLICT, "in the way", because="x"), 409, None),
        (ZeroDivisionError("secret"), 500, None),
    ],
)
async def test_errors_are_problem_documents(
    http: httpx.AsyncClient, scripted: ScriptedRoutes, error: Exception, status: int, retry_after: str | None
) -> None:
    scripted.error = error
    response = await http.get("/things")
    assert (response.status_code, response.headers.get("retry-after")) == (status, retry_after)
    assert response.headers["content-type"] == "application/problem+json"
    assert "secret" not in response.text
    assert (response.json()["instance"], response.json().get("because")) == (
        "/v1/things",
        "x" if status == 409 else None,
    )


class AcceptedCallers:
    """Callers that the node accepts whenever it is asked."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.verified = 0

    @asynccontextmanager
    async def acting_for(self, headers: Any, host: str) -> AsyncIterator[Any]:
        yield SimpleNamespace(services=self._services)

    async def verify_again(self, headers: Any, host: str) -> None:
        self.verified += 1


@pytest.mark.parametrize("error", [AuthenticationFailed("expired"), BrokerUnreachable("closed")])
async def test_a_request_that_may_have_begun_is_not_repeated(
    scripted: ScriptedRoutes, services: Services, error: MillstreamError
) -> None:
    callers: Any = AcceptedCallers(services)
    api: Any = Api(scripted.routes(), services, OriginCheck(), callers)
    scripted.error = error
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://node/v1") as client:
        response = await client.get("/things")
    assert response.status_code == HTTPStatus.SERVICE_UNAVAILABLE
    assert (scripted.responses, callers.verified) == (1, 1)


async def test_requests_beyond_the_limit_get_retry_after(
    http: httpx.AsyncClient, scripted: ScriptedRoutes, services: Services
) -> None:
    first = asyncio.create_task(http.put("/raw", content=b"x" * 600))
    await scripted.begun.wait()
    second = await http.put("/raw", content=b"x")
    assert (second.status_code, second.headers["retry-after"]) == (429, "1")
    large = await http.post("/things/one", content=b"x" * 600, headers={"content-type": "application/json"})
    assert large.status_code == 429
    scripted.go_on.set()
    assert (await first).json() == {"number": 600}
    assert (await http.put("/raw", content=b"x")).status_code == 200
    assert (services.pressure.bytes, services.pressure.requests, services.pressure.rejected) == (
        [0, 0, 0],
        [0, 0, 0],
        2,
    )
    reported = {metric["name"]: metric["samples"] for metric in services.pressure.metrics()}
    assert reported["millstream_http_responses_total"] == [[2, {"status": "200"}], [2, {"status": "429"}]]


async def test_long_polls_do_not_count_against_publishers(services: Services) -> None:
    waiting, publishing = RequestMemory(services.pressure, Lane.WAIT), RequestMemory(services.pressure, Lane.PUBLISH)
    waiting.reserve(1000)
    with pytest.raises(Refused):
        RequestMemory(services.pressure, Lane.WAIT).reserve(1)
    publishing.reserve(1000)
    waiting.resize(10)
    RequestMemory(services.pressure, Lane.WAIT).reserve(990)
    with pytest.raises(Refused):
        waiting.resize(11)
    publishing.resize(0)
    waiting.resize(0)
    assert services.pressure.bytes == [0, 990, 0]


def test_one_principal_leaves_room_for_others() -> None:
    pressure = Pressure((8, 8, 8), bytes_max=(800, 800, 800))
    for _ in range(6):
        pressure.enter(Lane.WAIT, "User:alice")
    with pytest.raises(Refused, match="6 requests"):
        pressure.enter(Lane.WAIT, "User:alice")
    pressure.enter(Lane.PUBLISH, "User:alice")
    pressure.enter(Lane.WAIT, "User:bob")
    pressure.leave(Lane.WAIT, "User:alice")
    with pytest.raises(Refused):
        pressure.enter(Lane.WAIT, "User:alice")
    pressure.leave(Lane.WAIT, "User:bob")
    pressure.enter(Lane.WAIT, "User:alice")
    held, other = (RequestMemory(pressure, Lane.WAIT, f"User:{user}") for user in ("alice", "bob"))
    held.reserve(599)
    with pytest.raises(Refused):
        held.reserve(1)
    other.reserve(200)
    with pytest.raises(Refused):
        held.resize(600)
    held.resize(0)
    other.reserve(390)
    with pytest.raises(Refused):
        other.reserve(10)


def test_without_principals_a_lane_is_used_up() -> None:
    pressure = Pressure((8, 8, 8), bytes_max=(800, 800, 800))
    for _ in range(8):
        pressure.enter(Lane.WAIT)
    RequestMemory(pressure, Lane.WAIT).reserve(800)
    with pytest.raises(Refused):
        pressure.enter(Lane.WAIT)


async def test_the_gateway_does_not_call_a_broker_that_throttles_it(services: Services) -> None:
    services.pressure.check_pause(0.4)
    with pytest.raises(Refused) as refused:
        services.pressure.check_pause(2.5)
    assert (refused.value.status, refused.value.headers) == (429, {"retry-after": "3"})


async def test_requests_are_refused_while_the_broker_starts(scripted: ScriptedRoutes) -> None:
    services = Services("127.0.0.1:1", starting=lambda: "the logs are checked")
    api: Any = Api(scripted.routes(), services, OriginCheck())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://node/v1") as client:
        response = await client.get("/things")
    assert (response.status_code, response.json()["reasons"]) == (503, ["the logs are checked"])
    await services.close()


async def test_a_stream_ends_when_its_reader_disconnects(scripted: ScriptedRoutes, services: Services) -> None:
    api = Api(scripted.routes(), services, OriginCheck())
    gone = asyncio.Event()
    sent: list[Any] = []

    async def receive() -> Any:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"method": "GET", "path": "/v1/stream", "raw_path": b"/v1/stream", "query_string": b"", "headers": []}
    serving = asyncio.create_task(api(scope, receive, send))
    await scripted.begun.wait()
    gone.set()
    await serving
    assert scripted.ended
    assert b"".join(event.get("body", b"") for event in sent) == b": listening\n\nevent: message\ndata: 1\n\n"
    assert services.pressure.requests == [0, 0, 0]


async def test_a_stream_ends_when_the_gateway_stops(
    http: httpx.AsyncClient, scripted: ScriptedRoutes, services: Services
) -> None:
    listening = asyncio.create_task(http.get("/stream"))
    await scripted.begun.wait()
    services.stop()
    assert (await listening).text.endswith("data: 1\n\n")
    assert scripted.ended


@pytest.mark.parametrize("path", ["/v1/topics/t/messages", "/healthz"])
async def test_a_request_cancelled_by_a_stopping_gateway_gets_503(services: Services, path: str) -> None:
    asked = asyncio.Event()
    sent: list[Any] = []

    async def wait(*_: Any, **__: Any) -> Any:
        asked.set()
        await asyncio.Event().wait()

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    services.publisher.send = wait  # type: ignore[method-assign]
    app = build_app(wait, wait, services=services)
    method = "GET" if path == "/healthz" else "POST"
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
    }
    for is_stopped in (False, True):
        serving = asyncio.ensure_future(app(scope, receive, send))
        await asked.wait()
        asked.clear()
        services.stop() if is_stopped else None
        serving.cancel()
        await asyncio.wait([serving])
        assert serving.cancelled() is not is_stopped
    assert sent[0]["status"] == 503
    assert "the node is stopping" in json.loads(sent[1]["body"])["detail"]
    assert len(sent) == 2


@pytest.mark.parametrize(
    ("method", "path", "found"),
    [
        ("GET", b"/things", "/things"),
        ("POST", b"/things/a%2Fb", "/things/{name}"),
        ("POST", b"/things/%C3%A9", "/things/{name}"),
        ("DELETE", b"/things", 405),
        ("GET", b"/things/", 404),
        ("GET", b"/other", 404),
        ("POST", b"/things/%FF", 422),
    ],
)
async def test_paths_are_decoded_as_sent(scripted: ScriptedRoutes, method: str, path: bytes, found: str | int) -> None:
    tree: PathTree[Route[Any, Any]] = PathTree()
    for route in scripted.routes():
        tree.add(route.method, route.path, route)
    if isinstance(found, int):
        with pytest.raises(Refused) as refused:
            tree.find(method, path)
        assert refused.value.status == found
    else:
        served, names = tree.find(method, path)
        assert served.path == found
        assert names in ({}, {"name": "a/b"}, {"name": "é"})


async def test_a_publish_below_min_isr_gets_retry_after() -> None:
    async with ProducerLedger.started() as ledger:
        await ledger.warm_up()
        services = Services(ledger.broker.address)
        api: Any = Api(ROUTES, services, OriginCheck())
        async with httpx.AsyncClient(transport=httpx.ASGITransport(api), base_url="http://node/v1") as client:
            assert (await client.post("/topics/orders/messages", content=b"a")).status_code == 201
            ledger.give_time(services.publisher, 1)
            ledger.faults = ["too few replicas"] * 100
            refused = await client.post("/topics/orders/messages", content=b"b")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
            assert "NOT_ENOUGH_REPLICAS" in refused.json()["detail"]
            # A message that may have been stored is different: sending it again could store it twice.
            ledger.faults = ["after append"] + ["too few replicas"] * 100
            unknown = await client.post("/topics/orders/messages", content=b"c")
            assert (unknown.status_code, unknown.headers.get("retry-after")) == (504, None)
        ledger.faults = []
        await services.close()
