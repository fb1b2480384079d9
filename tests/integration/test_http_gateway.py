"""The HTTP gateway of a real server: publish in every form, pull, settle, and refusals."""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest

from millstream.protocol.records.batch import COMPRESSION_ZSTD
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

PATIENCE_S = 60.0
MIB = 1024 * 1024
MESSAGES = "application/vnd.millstream.messages+json"
CLOUD_EVENT_XML = "application/cloudevents+xml"


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{server.http}/v1", timeout=PATIENCE_S) as client:
        yield client


def publish(http: httpx.Client, topic: str, body: bytes = b"hello", **headers: str) -> Any:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    response = http.post(f"/topics/{topic}/messages", content=body, headers=named)
    assert response.status_code == 201, response.text
    return response.json()


def subscribe(http: httpx.Client, topic: str, **options: Any) -> str:
    name = f"of-{topic}"
    body = {"name": name, "topics": [topic], "start": "start", **options}
    assert http.post("/subscriptions", json=body).status_code == 201
    return name


def pull(http: httpx.Client, name: str, **parameters: Any) -> list[dict[str, Any]]:
    response = http.post(f"/subscriptions/{name}/messages:pull", json={"wait_ms": 30_000, **parameters})
    assert response.status_code == 200, response.text
    messages: list[dict[str, Any]] = response.json()["messages"]
    return messages


def settle(http: httpx.Client, name: str, **output: Any) -> dict[str, Any]:
    response = http.post(f"/subscriptions/{name}/messages:settle", json=output)
    assert response.status_code == 200, response.text
    reported: dict[str, Any] = response.json()
    return reported


def test_a_message_is_published_pulled_and_accepted_once(http: httpx.Client, topic: str) -> None:
    reported = publish(http, topic, b"hello", message_key="k", message_header_region="eu", correlation_id="c-1")
    assert (reported["topic"], reported["partition"], reported["offset"]) == (topic, 0, 0)
    name = subscribe(http, topic)
    (message,) = pull(http, name)
    assert message["id"] == reported["id"]
    assert (message["key"], message["value"], message["attempt"]) == ("k", "hello", 1)
    assert message["headers"] == {"region": "eu", "correlation-id": "c-1"}
    assert settle(http, name, accept=[message["lease"]]) == {"results": [{"lease": message["lease"]}], "failed": 0}
    again = settle(http, name, accept=[message["lease"]])
    assert (again["failed"], again["results"][0]["status"]) == (1, 409)


def test_a_batch_holds_texts_json_bytes_and_nothing(http: httpx.Client, topic: str) -> None:
    messages = [
        {"json": {"total": 7}, "key": "k", "headers": {"region": "eu"}, "correlation_id": "c-2"},
        {"value": "plain"},
        {"base64": "/////w==", "key_base64": "/w==", "id": "m-1"},
        {"key": "gone"},
    ]
    response = http.post(
        f"/topics/{topic}/messages", content=json.dumps({"messages": messages}), headers={"content-type": MESSAGES}
    )
    assert response.status_code == 201
    assert [message["offset"] for message in response.json()["messages"]] == [0, 1, 2, 3]
    assert response.json()["messages"][2]["id"] == "m-1"
    first, second, third, fourth = (stored(http, topic, offset) for offset in range(4))
    assert (first["json"], first["key"]) == ({"total": 7}, "k")
    assert first["headers"] == {"content-type": "application/json", "correlation-id": "c-2", "region": "eu"}
    assert (second["value"], "key" in second) == ("plain", False)
    assert (third["base64"], third["key_base64"], third["id"]) == ("/////w==", "/w==", "m-1")
    assert not {"value", "json", "base64"} & fourth.keys()


def stored(http: httpx.Client, topic: str, offset: int) -> dict[str, Any]:
    response = http.get(f"/topics/{topic}/partitions/0/messages/{offset}")
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()
    return message


def test_events_are_stored_equally_in_every_mode(http: httpx.Client, topic: str) -> None:
    attributes = {"specversion": "1.0", "id": "e-1", "source": "/shop", "type": "order.created", "partitionkey": "c7"}
    binary = {f"ce-{name}": value for name, value in attributes.items()} | {"content-type": "application/json"}
    document = {**attributes, "datacontenttype": "application/json", "data": {"total": 7}}
    path = f"/topics/{topic}/messages"
    responses = [
        http.post(path, content=b'{"total":7}', headers=binary),
        http.post(path, content=json.dumps(document), headers={"content-type": "application/cloudevents+json"}),
        http.post(path, content=json.dumps([document]), headers={"content-type": "application/cloudevents-batch+json"}),
    ]
    assert [response.status_code for response in responses] == [201, 201, 201]
    assert [responses[0].json()["id"], responses[1].json()["id"]] == ["e-1", "e-1"]
    messages = [stored(http, topic, offset) for offset in range(3)]
    for message in messages:
        assert (message["id"], message["key"], message["json"]) == ("e-1", "c7", {"total": 7})
        assert message["headers"] == messages[0]["headers"]
    assert messages[0]["headers"]["ce_type"] == "order.created"


def test_a_duplicate_publish_is_reported_and_not_stored_again(http: httpx.Client, topic: str) -> None:
    def once(message_id: str) -> httpx.Response:
        path = f"/topics/{topic}/messages?deduplicate=true"
        return http.post(path, content=b"x", headers={"message-id": message_id})

    first, again, other = once("a"), once("a"), once("b")
    assert [response.status_code for response in (first, again, other)] == [201, 200, 201]
    assert again.json() == {**first.json(), "duplicate": True}
    assert other.json()["offset"] == first.json()["offset"] + 1
    assert http.post(f"/topics/{topic}/messages?deduplicate=true", content=b"x").status_code == 422


def test_an_old_lease_does_not_settle_a_newer_one_of_the_same_worker(http: httpx.Client, topic: str) -> None:
    publish(http, topic)
    name = subscribe(http, topic)
    (old,) = pull(http, name, worker="one")
    assert settle(http, name, release=[{"lease": old["lease"], "delay_ms": 0}])["failed"] == 0
    (new,) = pull(http, name, worker="one")
    reported = settle(http, name, accept=[old["lease"], new["lease"]])
    assert [result.get("status", 200) for result in reported["results"]] == [409, 200]


def test_messages_are_released_rejected_and_extended(http: httpx.Client, topic: str) -> None:
    for value in (b"again", b"never", b"longer"):
        publish(http, topic, value)
    name = subscribe(http, topic, dead_letter_topic=f"{topic}.dead")
    again, never, longer = pull(http, name, max=3)
    output = {
        "release": [{"lease": again["lease"], "delay_ms": 0}],
        "reject": [{"lease": never["lease"], "reason": "no good"}],
        "extend": [{"lease": longer["lease"], "delay_ms": 60_000}],
    }
    assert settle(http, name, **output)["failed"] == 0
    (once_more,) = pull(http, name, max=3)
    assert (once_more["value"], once_more["attempt"]) == ("again", 2)
    (letter,) = wait_until(lambda: http.get(f"/dead-letters/{name}").json().get("letters"))
    assert (letter["value"], letter["headers"]["dlq-reason"]) == ("never", "no good")
    redriven = http.post(f"/dead-letters/{name}/redrive", json={"filter": "headers['dlq-reason'] = 'no good'"})
    assert (redriven.json()["done"], redriven.json()["subscriptions"]) == (1, {name: 1})
    (back,) = pull(http, name, max=3)
    assert (back["value"], back["id"], back["offset"]) == ("never", never["id"], never["offset"])
    assert back["attempt"] == 1
    assert http.post(f"/dead-letters/{name}/purge", json={}).json()["done"] == 0
    assert topic in {
        letter["topic"].removesuffix(".dead") for letter in http.get("/dead-letters").json()["dead_letters"]
    }


def test_nothing_is_lost_by_default(http: httpx.Client, topic: str) -> None:
    """A subscription with default settings keeps what fails repeatedly, and what is rejected becomes a dead letter."""
    for number in range(10):
        publish(http, topic, b"%d" % number)
    name = subscribe(http, topic)
    (first, *others) = pull(http, name, max=10)
    assert len(others) == 9
    settle(http, name, reject=[{"lease": first["lease"], "reason": "unreadable"}])
    for _ in range(6):
        if others:
            settle(http, name, release=[{"lease": message["lease"]} for message in others])
        # Without a backoff, all would be delivered again at once.
        others = pull(http, name, max=10, wait_ms=500)
    # A rejected message is in the backlog until it is in its topic.
    wait_until(lambda: backlog(http, name) <= 9)
    assert backlog(http, name) == 9
    (letter,) = wait_until(lambda: http.get(f"/dead-letters/{name}-dlq").json().get("letters"))
    assert letter["value"] == first["value"]


def backlog(http: httpx.Client, name: str) -> int:
    return sum(queue["backlog"] for queue in http.get(f"/subscriptions/{name}").json()["queues"])


def test_every_verb_accepts_a_lease_or_an_object(http: httpx.Client, topic: str) -> None:
    for number in range(8):
        publish(http, topic, b"%d" % number)
    name = subscribe(http, topic)
    leases = [message["lease"] for message in pull(http, name, max=8)]
    verbs = ("accept", "release", "reject", "extend")
    output = {verb: [leases[2 * at], {"lease": leases[2 * at + 1]}] for at, verb in enumerate(verbs)}
    reported = settle(http, name, **output)
    assert (reported["failed"], [result["lease"] for result in reported["results"]]) == (0, leases)


def test_open_letters_are_deleted_only_with_force(http: httpx.Client, topic: str) -> None:
    publish(http, topic)
    name = subscribe(http, topic)
    (message,) = pull(http, name)
    assert settle(http, name, reject=[message["lease"]])["failed"] == 0
    dead = http.get(f"/subscriptions/{name}").json()["settings"]["millstream.dead.letter.topic"]
    wait_until(lambda: http.get(f"/dead-letters/{name}").json().get("letters"))
    for path in (f"/topics/{dead}", f"/subscriptions/{name}"):
        refused = http.delete(path)
        assert (refused.status_code, "1 open dead letter" in refused.json()["detail"]) == (409, True)
    assert http.delete(f"/subscriptions/{name}?force=true").status_code == 204
    refused = http.post(f"/dead-letters/{dead}/redrive", json={})
    assert (refused.status_code, "to_topic" in refused.json()["detail"]) == (409, True)
    published = http.post(f"/dead-letters/{dead}/redrive", json={"to_topic": topic}).json()
    assert (published["done"], published["topics"]) == (1, {topic: 1})
    assert http.delete(f"/topics/{dead}").status_code == 200


@pytest.mark.parametrize("body", [b'{"total":', b"", b"nonsense", b'{"a":1}}', b'"\xff"'])
def test_invalid_json_is_refused(http: httpx.Client, topic: str, body: bytes) -> None:
    path = f"/topics/{topic}/messages"
    for kind in ("application/json; charset=utf-8", "application/vnd.shop.order+json"):
        refused = http.post(path, content=body, headers={"content-type": kind})
        assert (refused.status_code, "not JSON" in refused.json()["detail"]) == (400, True)
    assert http.post(path, content=body, headers={"content-type": "text/plain"}).status_code == 201


CONTEXT = {
    "correlation-id": "c-1",
    "traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    "tracestate": "a=b",
    "baggage": "user=7",
}


OWN_BAGGAGE = {"baggage": "own"}


def test_context_headers_of_a_request_are_stored_with_each_message(http: httpx.Client, topic: str) -> None:
    event = {"specversion": "1.0", "id": "e", "source": "/s", "type": "t", "data": 1}
    bodies: list[tuple[str, Any]] = [
        (
            MESSAGES,
            {"messages": [{"value": "a"}, {"value": "b", "correlation_id": "own", "headers": {"baggage": "own"}}]},
        ),
        ("application/cloudevents+json", event),
        ("application/cloudevents-batch+json", [event]),
        ("text/plain", "plain"),
    ]
    for media, body in bodies:
        sent = http.post(
            f"/topics/{topic}/messages", content=json.dumps(body), headers={"content-type": media, **CONTEXT}
        )
        assert sent.status_code == 201, sent.text
    for offset in range(5):
        own = {"correlation-id": "own", **OWN_BAGGAGE} if offset == 1 else {}
        assert stored(http, topic, offset)["headers"].items() >= {**CONTEXT, **own}.items()


def test_responses_end_with_a_newline_and_docs_are_a_separate_page(http: httpx.Client, topic: str) -> None:
    root = str(http.base_url).removesuffix("/v1/").removesuffix("/v1")
    pages = [
        f"{root}/",
        f"{root}/healthz",
        f"{root}/openapi.json",
        f"{root}/nothing",
        "/topics",
        "/topics/no-such-topic",
    ]
    for path in pages:
        response = http.get(path)
        assert (response.text[-1:], response.json() is not None) == ("\n", True), path
    docs = http.get(f"{root}/docs")
    assert (docs.status_code, docs.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert docs.headers["content-security-policy"].startswith("default-src 'none'; style-src 'sha256-")
    document = http.get(f"{root}/openapi.json").json()
    assert all(path in docs.text for path in document["paths"])
    assert "<script" not in docs.text
    assert not re.search(r"(src|href)=.?(https?:)?//", docs.text), "nothing is fetched from elsewhere"


def test_a_client_that_disconnects_leases_nothing(http: httpx.Client, topic: str) -> None:
    publish(http, topic, b"first")
    name = subscribe(http, topic)
    (first,) = pull(http, name)
    hasty = httpx.Timeout(PATIENCE_S, read=0.5)
    with httpx.Client(base_url=str(http.base_url), timeout=hasty) as client, pytest.raises(httpx.ReadTimeout):
        client.post(f"/subscriptions/{name}/messages:pull", json={"wait_ms": 60_000})
    publish(http, topic, b"second")
    (second,) = pull(http, name)
    assert (second["value"], second["attempt"]) == ("second", 1)
    assert settle(http, name, accept=[first["lease"], second["lease"]])["failed"] == 0


def events(lines: Iterator[str]) -> Iterator[dict[str, str]]:
    event: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            event[name] = value
        else:
            yield event
            event = {}


def test_a_stream_of_a_topic_resumes_where_it_ended(http: httpx.Client, topic: str) -> None:
    publish(http, topic, b"one")
    publish(http, topic, b'{\n"two": 2}', content_type="application/json")
    with http.stream("GET", f"/topics/{topic}/events?from=start") as response:
        assert response.headers["content-type"] == "text/event-stream"
        heard = events(response.iter_lines())
        assert next(heard) == {"": "listening"}
        first, second = next(heard), next(heard)
        publish(http, topic, b"three")
        third = next(heard)
    assert (first["event"], first["id"]) == ("message", "0:1")
    assert json.loads(first["data"])["value"] == "one"
    assert json.loads(second["data"])["json"] == {"two": 2}
    assert json.loads(third["data"])["value"] == "three"
    with http.stream("GET", f"/topics/{topic}/events", headers={"last-event-id": first["id"]}) as response:
        heard = events(response.iter_lines())
        next(heard)
        assert next(heard) == second


def test_messages_of_a_stream_are_settled_like_pulled_ones(http: httpx.Client, topic: str) -> None:
    name = subscribe(http, topic)
    with http.stream("GET", f"/subscriptions/{name}/events") as response:
        heard = events(response.iter_lines())
        next(heard)
        publish(http, topic, b"hello")
        message = json.loads(next(heard)["data"])
        assert settle(http, name, accept=[message["lease"]])["failed"] == 0
    assert message["value"] == "hello"
    missing = http.get("/subscriptions/nobody-made-this/events")
    assert (missing.status_code, "GET /v1/subscriptions" in missing.json()["detail"]) == (404, True)


def test_topics_over_http(http: httpx.Client, topic: str) -> None:
    made = http.post("/topics", json={"topic": topic, "partitions": 2, "owner": "shop"})
    assert (made.status_code, made.json()["topic"], made.json()["partitions"]) == (201, topic, 2)
    assert http.post("/topics", json={"name": topic}).status_code == 409
    changed = http.patch(f"/topics/{topic}", json={"partitions": 3, "settings": {"retention.ms": "60000"}})
    described = http.get(f"/topics/{topic}").json()
    moved = "New messages of a key may go to a different partition than earlier ones."
    assert changed.json() == {**described, "notes": [moved]}
    assert (len(described["partitions"]), described["owner"]) == (3, "shop")
    assert described["overrides"]["retention.ms"] == "60000"
    assert topic in {topic["topic"] for topic in http.get("/topics").json()["topics"]}
    deleted = http.delete(f"/topics/{topic}")
    assert (deleted.status_code, deleted.json()) == (200, {"topic": topic, "notes": []})
    assert http.get(f"/topics/{topic}").status_code == 404


def test_subscriptions_over_http(http: httpx.Client, topic: str) -> None:
    publish(http, topic)
    name = f"a/b {topic}"
    body = {"name": name, "topics": [topic], "start": "start", "lease_ms": 5000, "filter": "key IS NULL"}
    assert http.post("/subscriptions", json=body).status_code == 201
    assert http.post("/subscriptions", json=body).status_code == 409
    path = f"/subscriptions/{quote(name, safe='')}"
    assert http.post(f"{path}/pause").json() == {"subscription": name, "paused": True}
    assert http.post(f"{path}/resume").json()["paused"] is False
    reported = http.patch(path, json={"attempts": 9, "filter": None}).json()
    assert reported["overrides"]["share.delivery.count.limit"] == "9"
    assert "millstream.filter" not in reported["overrides"]
    response = http.post(f"{path}/messages:pull", json={"wait_ms": 30_000})
    assert len(response.json()["messages"]) == 1
    moved = http.post(f"{path}/seek", json={"to": "start"})
    assert moved.json()["queues"] == [{"topic": topic, "partition": 0, "offset": 0}]
    assert name in {subscription["subscription"] for subscription in http.get("/subscriptions").json()["subscriptions"]}
    (note,) = http.delete(f"/topics/{topic}").json()["notes"]
    assert note == f"Subscription {name} reads {topic}, of which 1 message is not delivered yet."
    assert http.delete(path).status_code == 204
    assert http.get(path).status_code == 404


def test_groups_clients_transactions_and_the_cluster_over_http(http: httpx.Client, topic: str) -> None:
    publish(http, topic)
    group = f"group-{topic}"
    moved = http.post(f"/groups/{group}/reset", json={"to": "end", "topics": [topic]})
    assert moved.json()["offsets"] == [{"topic": topic, "partition": 0, "before": None, "after": 1}]
    assert http.get(f"/groups/{group}").json()["lag"] == 0
    assert group in {group["group"] for group in http.get("/groups").json()["groups"]}
    assert http.delete(f"/groups/{group}").status_code == 204
    assert http.get(f"/groups/{group}").status_code == 404
    assert len(http.get("/cluster").json()["nodes"]) == 1
    clients = http.get("/clients?interval_ms=0&all=true").json()["clients"]
    assert "millstream-gateway" in {client["client_id"] for client in clients}
    assert isinstance(http.get("/transactions").json()["transactions"], list)
    assert http.get("/transactions?state=Nonsense").status_code == 422
    assert http.get("/transactions/nobody").status_code == 404
    assert http.get("/hanging-transactions").json() == {"transactions": []}


@pytest.mark.parametrize(
    ("method", "path", "sent", "status"),
    [
        ("POST", "/topics/a topic/messages", {"content": b"x"}, 422),
        ("POST", "/topics/t/messages", {"content": b"x" * (8 * 1024 * 1024 + 1)}, 413),
        ("POST", "/topics/t/messages", {"content": b"x", "headers": {"message-partition": "7"}}, 404),
        ("POST", "/topics/t/messages", {"content": b"x", "headers": {"message-delay": "soon"}}, 422),
        ("POST", "/topics/t/messages", {"content": b"x", "headers": {"message-kee": "typo"}}, 422),
        ("POST", "/topics/t/messages", {"content": b"{", "headers": {"content-type": MESSAGES}}, 400),
        ("POST", "/topics/t/messages", {"content": b"{", "headers": {"content-type": "application/json"}}, 400),
        ("POST", "/topics/t/messages", {"content": b'{"messages":[]}', "headers": {"content-type": MESSAGES}}, 422),
        ("POST", "/topics/t/messages?deduplicate=perhaps", {"content": b"x"}, 422),
        ("POST", "/topics/t/messages", {"content": b"x", "headers": {"sec-fetch-site": "cross-site"}}, 403),
        ("POST", "/topics/t/messages", {"content": b"x", "headers": {"origin": "http://elsewhere.example"}}, 403),
        ("POST", "/topics/t/messages", {"content": b"x", "headers": {"origin": "null"}}, 403),
        ("POST", "/subscriptions", {"data": {"name": "x"}}, 415),
        ("POST", "/topics/t/messages", {"content": b"x", "headers": {"content-encoding": "gzip"}}, 415),
        ("POST", "/topics/t/messages", {"content": b"<x/>", "headers": {"content-type": CLOUD_EVENT_XML}}, 415),
        ("POST", "/subscriptions", {"content": b"{", "headers": {"content-type": "application/json"}}, 400),
        ("POST", "/subscriptions", {"json": {"name": "s", "topics": []}}, 422),
        ("POST", "/subscriptions", {"json": {"name": "s", "topics": ["t"], "filter": "payload.total > 'cheap'"}}, 422),
        ("POST", "/subscriptions/s/messages:settle", {"json": {"accept": ["nonsense"]}}, 422),
        ("POST", "/subscriptions/nobody/messages:pull", {"json": {}}, 404),
        ("GET", "/topics/t/partitions/one/messages/0", {}, 422),
        ("GET", "/topics/nobody/events", {}, 404),
        ("GET", "/nothing", {}, 404),
        ("PUT", "/topics", {}, 405),
        ("POST", "/topics", {"json": {"partitions": 1}}, 422),
        ("POST", "/topics", {"json": {"topic": "a", "name": "a"}}, 422),
    ],
)
def test_a_refusal_is_a_problem_with_its_reason(
    http: httpx.Client, method: str, path: str, sent: dict[str, Any], status: int
) -> None:
    response = http.request(method, path, **sent)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert response.json()["status"] == status
    assert response.json()["detail"]


@pytest.mark.parametrize(
    ("sent", "status"), [(b"nonsense\r\n\r\n", 400), (b"GET / HTTP/1.1\r\nx: " + b"y" * 70_000, 431)]
)
def test_a_malformed_request_is_a_problem_too(server: Server, sent: bytes, status: int) -> None:
    host, port = server.http.rsplit(":", 1)
    with socket.create_connection((host, int(port)), PATIENCE_S) as connection:
        connection.sendall(sent)
        response = b""
        while piece := connection.recv(65536):
            response += piece
    head, _, body = response.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status)
    assert b"application/problem+json" in head
    assert json.loads(body)["status"] == status


def test_a_stopping_server_ends_long_polls(start_server: Callable[..., Server], topic: str) -> None:
    server = start_server()
    with httpx.Client(base_url=f"http://{server.http}/v1", timeout=PATIENCE_S) as http:
        publish(http, topic)
        name = subscribe(http, topic)
        (message,) = pull(http, name)
        settle(http, name, accept=[message["lease"]])
        with ThreadPoolExecutor(1) as pool, http.stream("GET", f"/topics/{topic}/events") as stream:
            next(stream.iter_lines())
            waiting = pool.submit(pull, http, name, wait_ms=60_000)
            wait_until(lambda: http.get(f"/subscriptions/{name}").json()["queues"][0]["waiting_workers"] == 1)
            assert server.stop() == 0
            assert waiting.result() == []


def test_stalled_bodies_block_neither_health_nor_others(server: Server, http: httpx.Client, topic: str) -> None:
    address = server.http.rsplit(":", 1)
    stalled_number = 2100
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * stalled_number)), hard))
    head = f"POST /v1/topics/{topic}/messages HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100\r\n\r\nx".encode()
    with ExitStack() as stalled:
        for _ in range(stalled_number):
            connection = stalled.enter_context(socket.create_connection((address[0], int(address[1])), PATIENCE_S))
            connection.sendall(head)
        for path in ("/healthz", "/readyz"):
            response = httpx.get(f"http://{server.http}{path}", timeout=PATIENCE_S)
            assert response.status_code == 200, response.text
        deadline = time.monotonic() + PATIENCE_S
        # Others are admitted once the stalled ones have been silent for a few seconds.
        while True:
            with suppress(httpx.HTTPError):
                if httpx.get(f"http://{server.http}/v1/cluster", timeout=PATIENCE_S).status_code == 200:
                    break
            assert time.monotonic() < deadline
            time.sleep(0.1)
    publish(http, topic)


def test_a_briefly_busy_broker_is_healthy(start_server: Callable[..., Server]) -> None:
    server = start_server()
    assert httpx.get(f"http://{server.http}/healthz", timeout=PATIENCE_S).status_code == 200
    os.kill(server.pid, signal.SIGSTOP)
    try:
        # The first may use a cached response.
        while not (response := httpx.get(f"http://{server.http}/healthz", timeout=PATIENCE_S)).json()["warnings"]:
            assert response.status_code == 200
        assert response.status_code == 200
        assert "the broker's event loop has not responded for" in response.json()["warnings"][0]
        assert httpx.get(f"http://{server.http}/readyz", timeout=PATIENCE_S).status_code == 200
    finally:
        os.kill(server.pid, signal.SIGCONT)
    while httpx.get(f"http://{server.http}/healthz", timeout=PATIENCE_S).json()["warnings"]:
        pass


def gateway_peak_bytes(server: Server) -> int:
    """The peak memory of the gateway's process."""
    for pid in Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split():
        if b"millstream.gateway.process" in Path(f"/proc/{pid}/cmdline").read_bytes():
            (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
            return int(peak) * 1024
    raise AssertionError("no gateway runs")


def produce_batches(server: Server, topic: str, batches: list[bytes]) -> None:
    async def produce() -> None:
        async with Client.connect(server.kafka, client_id="test", timeout_s=PATIENCE_S) as client:
            for batch in batches:
                await client.produce(topic, 0, batch)

    asyncio.run(produce())


def test_large_decompressed_batches_stay_within_the_memory_of_the_gateway(
    start_server: Callable[..., Server], topic: str
) -> None:
    server = start_server(forked=False, decompressed_bytes_max=128 * MIB, compression_ratio_max=1_000_000)
    large = bytes(encode_batch([NewRecord(None, bytes(120 * MIB))], compression=COMPRESSION_ZSTD))
    many = bytes(encode_batch([NewRecord(None, b"x" * MIB)] * 50, compression=COMPRESSION_ZSTD))
    with httpx.Client(base_url=f"http://{server.http}/v1", timeout=PATIENCE_S) as http:
        publish(http, topic, b"first")
        before = gateway_peak_bytes(server)
        produce_batches(server, topic, [large, large, many, large, many])
        publish(http, topic, b"last")
        name = subscribe(http, topic, attempts=1)
        with ThreadPoolExecutor(3) as pool:
            # One message each, not the whole batch; the one of 120 MiB is not sent over HTTP at all.
            pulls = [pool.submit(pull, http, name, max=1) for _ in range(3)]
            pulled = [message for pull in pulls for message in pull.result()]
        assert sorted(message["offset"] for message in pulled) == [0, 3, 4]
        # More are leased than fit into the requested bytes; the rest is returned, and counts as not delivered.
        (again,) = pull(http, name, max=50, max_bytes=MIB)
        assert (again["offset"], again["attempt"]) == (5, 1)
        with http.stream("GET", f"/topics/{topic}/events?from=start") as stream:
            seen = [json.loads(line[6:])["offset"] for line in islice(data_lines(stream), 102)]
        assert seen == [0, *range(3, 53), *range(54, 105)]
        assert gateway_peak_bytes(server) - before < 400 * MIB


def data_lines(stream: httpx.Response) -> Iterator[str]:
    return (line for line in stream.iter_lines() if line.startswith('data: {"id"'))
