from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest

from millstream import __version__
from millstream.core.errors import BrokerUnreachable
from millstream.gateway.app import build_app
from millstream.protocol.wire.node_status import STUCK_S, UNREADY_S, Health

STATUS: dict[str, Any] = {
    "node_id": 7,
    "version": "0.1.0",
    "state": "ready",
    "reasons": [],
    "warnings": [],
    "metrics": [
        {
            "name": "millstream_bytes_in_total",
            "kind": "counter",
            "help": "Bytes received.",
            "samples": [[12, {}]],
            "is_truncated": False,
        }
    ],
}


def responding(**changes: Any) -> Callable[[], Awaitable[dict[str, Any]]]:
    async def ask() -> dict[str, Any]:
        return {**STATUS, **changes}

    return ask


async def unreachable() -> dict[str, Any]:
    raise BrokerUnreachable("nobody listens on 127.0.0.1:9092")


async def get(
    path: str,
    ask: Callable[[], Awaitable[dict[str, Any]]],
    *,
    method: str = "GET",
    accept: str = "",
    silent_s: float = 0.0,
) -> httpx.Response:
    async def health() -> Health:
        return Health(await ask(), silent_s)

    transport = httpx.ASGITransport(build_app(ask, health), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://node") as client:
        return await client.request(method, path, headers={"accept": accept})


async def test_the_index_lists_the_endpoints() -> None:
    response = await get("/", unreachable)
    assert response.json() == {
        "name": "millstream",
        "version": __version__,
        "links": {
            "health": "/healthz",
            "readiness": "/readyz",
            "metrics": "/metrics",
            "api": "/openapi.json",
            "docs": "/docs",
            "registry": "/registry",
            "console": "/console",
        },
    }


async def test_health_is_ok_when_the_broker_responds() -> None:
    response = await get("/healthz", responding(reasons=["the node is starting"]))
    assert (response.status_code, response.json()) == (
        200,
        {"status": "ok", "node": 7, "nodes": [7], "version": "0.1.0", "warnings": []},
    )
    assert response.headers["cache-control"] == "no-store"


@pytest.mark.parametrize("path", ["/healthz", "/readyz", "/metrics"])
async def test_a_silent_broker_is_unhealthy(path: str) -> None:
    response = await get(path, unreachable)
    assert response.status_code == 503
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json() == {
        "type": "about:blank",
        "title": "Service Unavailable",
        "status": 503,
        "detail": "the broker does not respond: nobody listens on 127.0.0.1:9092",
        "instance": path,
        "reasons": ["the broker does not respond: nobody listens on 127.0.0.1:9092"],
    }


@pytest.mark.parametrize(
    ("silent_s", "health", "readiness"), [(UNREADY_S - 1, 200, 200), (UNREADY_S, 200, 503), (STUCK_S, 503, 503)]
)
async def test_a_busy_broker_is_alive_and_a_stuck_one_is_not(silent_s: float, health: int, readiness: int) -> None:
    for path, expected in (("/healthz", health), ("/readyz", readiness)):
        response = await get(path, responding(), silent_s=silent_s)
        assert response.status_code == expected
        (output,) = response.json()["warnings" if expected == 200 else "reasons"]
        assert output == f"the broker's event loop has not responded for {silent_s:.1f} s"


async def test_ready_without_reasons_against_it() -> None:
    response = await get("/readyz", responding())
    assert response.status_code == 200
    assert response.json() == {"status": "ready", "node": 7, "nodes": [7], "warnings": []}


async def test_health_checks_of_a_machine_name_all_its_nodes() -> None:
    for path in ("/healthz", "/readyz"):
        body = (await get(path, responding(nodes=[7, 1007]))).json()
        assert (body["node"], body["nodes"]) == (7, [7, 1007])


async def test_not_ready_lists_the_reasons() -> None:
    reasons = ["the node is stopping", "orders-0: the disk is full"]
    response = await get("/readyz", responding(reasons=reasons))
    assert response.status_code == 503
    assert response.json()["reasons"] == reasons
    assert response.json()["detail"] == "the broker is not ready: the node is stopping; orders-0: the disk is full"


async def test_metrics_are_prometheus_text() -> None:
    response = await get("/metrics", responding())
    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "millstream_bytes_in_total 12.0" in response.text.splitlines()


async def test_metrics_are_openmetrics_on_request() -> None:
    response = await get("/metrics", responding(), accept="application/openmetrics-text; version=1.0.0")
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")


async def test_an_unknown_path_is_a_helpful_problem() -> None:
    response = await get("/nothing", responding())
    assert response.status_code == 404
    assert response.json()["detail"] == "there is no page /nothing; GET / lists all pages"
    assert response.json()["instance"] == "/nothing"


async def test_a_wrong_method_lists_the_allowed_ones() -> None:
    response = await get("/healthz", responding(), method="POST")
    assert (response.status_code, response.json()["title"]) == (405, "Method Not Allowed")
    assert "GET" in response.headers["allow"]


async def test_an_internal_error_is_a_problem_without_internals() -> None:
    async def broken() -> dict[str, Any]:
        raise ZeroDivisionError("secret")

    response = await get("/readyz", broken)
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/problem+json"
    assert "secret" not in response.text
