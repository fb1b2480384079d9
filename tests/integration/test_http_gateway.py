"""The HTTP gateway of a real server: publish in every form, pull, settle, and what it refuses."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from millstream.testing.server import Server

PATIENCE_S = 60.0
MESSAGES = "application/vnd.millstream.messages+json"


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.http}/v1", timeout=PATIENCE_S) as client:
        yield client


def publish(http: httpx.Client, topic: str, body: bytes = b"hello", **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = http.post(f"/topics/{topic}/messages", content=body, headers=named)
    assert answer.status_code == 201, answer.text
    return answer.json()


def subscribe(http: httpx.Client, topic: str, name: str | None = None, **settings: str) -> str:
    name = name or f"of-{topic}"
    body = {"name": name, "topics": [topic], "settings": settings, "start": "start"}
    assert http.post("/subscriptions", json=body).status_code == 201
    return name


def pull(http: httpx.Client, name: str, **wanted: Any) -> list[dict[str, Any]]:
    answer = http.post(f"/subscriptions/{name}/messages:pull", json={"wait_ms": 30_000, **wanted})
    assert answer.status_code == 200, answer.text
    messages: list[dict[str, Any]] = answer.json()["messages"]
    return messages


def settle(http: httpx.Client, name: str, **said: Any) -> dict[str, Any]:
    answer = http.post(f"/subscriptions/{name}/messages:settle", json=said)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_a_message_is_published_pulled_and_accepted_once(http: httpx.Client, topic: str) -> None:
    told = publish(http, topic, b"hello", message_key="k", message_header_region="eu", correlation_id="c-1")
    assert (told["topic"], told["partition"], told["offset"]) == (topic, 0, 0)
    name = subscribe(http, topic)
    (message,) = pull(http, name)
    assert message["id"] == told["id"]
    assert (message["key"], message["value"], message["attempt"]) == ("k", "hello", 1)
    assert message["headers"] == {"region": "eu", "correlation-id": "c-1"}
    assert settle(http, name, accept=[message["lease"]]) == {"results": [{"lease": message["lease"]}], "failed": 0}
    again = settle(http, name, accept=[message["lease"]])
    assert (again["failed"], again["results"][0]["status"]) == (1, 409)
