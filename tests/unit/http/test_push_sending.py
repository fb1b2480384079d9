"""Requests to a real endpoint, and how its responses settle messages."""

from __future__ import annotations

import asyncio
import shutil
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep, time
from uuid import UUID

import pytest

from millstream.core.errors import BrokerUnreachable
from millstream.core.ids import Offset
from millstream.core.subscription import AT_MOST_ONCE, Subscription, SubscriptionSettings, Verb
from millstream.gateway.api.record_reader import ReadRecords
from millstream.gateway.push import endpoint as pace
from millstream.gateway.push import pusher as pushing
from millstream.gateway.push.address import Addresses
from millstream.gateway.push.endpoint import EndpointResponse
from millstream.gateway.push.event import Content
from millstream.gateway.push.process import BrokerConnections
from millstream.gateway.push.push_messages import PushSubscription, push_subscription
from millstream.gateway.push.pusher import RECEIVE_BYTES, Pusher, Settler
from millstream.gateway.push.sender import Sender, Target, trusted
from millstream.protocol.private.leasing import LeaseRequests, LeaseResponse, fresh_until
from millstream.protocol.private.subscription_messages import (
    LeasedRange,
    PartitionMessages,
    ReceiveRequest,
    ReceiveResponse,
)
from millstream.protocol.private.subscriptions import LeasedMessage
from millstream.protocol.records.batch import COMPRESSION_ZSTD
from millstream.protocol.records.record import NewRecord, Record, encode_batch
from millstream_testing.waiting import until
from millstream_testing.webhook import Request, Response, Webhook

KEY = b"0123456789abcdef"
CONTENT = Content(b"m1", [(b"content-type", b"text/plain")], b"hello")
WAIT_S = 200.0
LEASE_MS = 600
"""Long enough that a busy machine does not let it expire before it is extended."""


@pytest.fixture
async def hook() -> AsyncIterator[Webhook]:
    async with Webhook() as made:
        yield made


def sender(
    hook: Webhook, *, timeout_s: float = WAIT_S, private_allowed: bool = True, url: str = "", is_once: bool = False
) -> Sender:
    headers = {"Authorization": "Bearer x"}
    target = Target(url=url or hook.url, headers=headers, keys=(KEY,), timeout_s=timeout_s, is_once=is_once)
    return Sender(target, trusted(), private_allowed=private_allowed)


async def post(hook: Webhook, **how: object) -> EndpointResponse:
    sending = sender(hook, **how)  # type: ignore[arg-type]
    try:
        return await sending.post(CONTENT)
    finally:
        await sending.close()


# -- requests ----------------------------------------------------------------------------------------------------


async def test_a_message_is_sent_signed_over_a_reused_connection(hook: Webhook) -> None:
    sending = sender(hook)
    for _ in range(3):
        assert (await sending.post(CONTENT)).status == 204
    await sending.close()
    (request, *_) = hook.requests
    assert request.body == b"hello"
    assert request.headers["authorization"] == "Bearer x"
    assert request.headers["host"] == hook.url.split("/")[2]
    assert request.headers["webhook-id"] == "m1"
    assert request.is_signed_by(KEY)
    assert hook.connections == 1


async def test_a_connection_closed_while_idle_is_not_a_failure(hook: Webhook) -> None:
    sending = sender(hook)
    assert (await sending.post(CONTENT)).status == 204
    await hook.stop()
    await hook.start()
    assert (await sending.post(CONTENT)).status == 204
    await sending.close()


async def test_an_unreachable_endpoint_is_reported_as_such(hook: Webhook) -> None:
    await hook.stop()
    response = await post(hook)
    assert response.status == 0
    assert response.text


async def test_an_endpoint_that_disconnects_or_hangs(hook: Webhook) -> None:
    hook.respond = lambda _request: Response(None)
    assert (await post(hook)).status == 0
    # Connecting has its own timeout, which a busy machine may exceed: here, the connection already exists.
    hook.respond = lambda _request: Response()
    sending = sender(hook)
    assert (await sending.post(CONTENT)).status == 204
    sending._target = replace(sending._target, timeout_s=0.1)
    hook.respond = lambda _request: Response(after_s=WAIT_S)
    response = await sending.post(CONTENT)
    await sending.close()
    assert (response.status, response.text) == (0, "no response within 0.1 s")


async def test_only_the_start_of_a_long_response_is_read(hook: Webhook) -> None:
    hook.respond = lambda _request: Response(500, {"retry-after": "9"}, b"no\r\n" + b"x" * 10_000_000)
    response = await post(hook)
    assert response.status == 500
    assert response.retry_after_s == 9
    assert response.text.startswith("no xxx")
    assert len(response.text) <= 300


async def test_redirects_are_followed_within_the_host(hook: Webhook) -> None:
    def respond(request: Request) -> Response:
        return Response(307, {"location": "/other"}) if request.path == "/hook" else Response(200)

    hook.respond = respond
    assert (await post(hook)).status == 200
    assert [request.body for request in hook.requests] == [b"hello"] * 2
    hook.respond = lambda _request: Response(308, {"location": "/hook"})
    assert "redirects more than" in (await post(hook)).text
    assert len(hook.requests) == 6


@pytest.mark.parametrize("place", ["http://example.com/hook", "//127.0.0.2/hook", "http://127.0.0.1:1/hook", "ftp:/x"])
async def test_redirects_to_another_host_are_not_followed(hook: Webhook, place: str) -> None:
    hook.respond = lambda _request: Response(307, {"location": place})
    response = await post(hook)
    assert response.status == 307
    assert "another host" in response.text
    assert len(hook.requests) == 1


async def test_private_addresses_are_not_connected_to(hook: Webhook) -> None:
    response = await post(hook, private_allowed=False)
    assert response.status == 0
    assert "push-private-addresses" in response.text
    assert not hook.requests


async def test_the_checked_address_is_connected_to(hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    async def found(_addresses: Addresses) -> list[str]:
        return ["127.0.0.1"]

    # An unresolvable name: only the checked address can lead to the endpoint.
    monkeypatch.setattr(Addresses, "find", found)
    port = hook.url.split(":")[2].split("/")[0]
    response = await post(hook, url=f"http://rebound.invalid:{port}/hook")
    assert response.status == 204
    assert hook.requests[0].headers["host"] == f"rebound.invalid:{port}"


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
async def test_certificates_are_checked_against_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"-keyout": tmp_path / "key.pem", "-out": tmp_path / "certificate.pem"}
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=hook.example"]
    made += ["-addext", "subjectAltName=DNS:hook.example"]
    for option, path in files.items():
        made += [option, str(path)]
    await asyncio.to_thread(subprocess.run, made, check=True, capture_output=True)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(files["-out"], files["-keyout"])
    trust = trusted()
    trust.load_verify_locations(files["-out"])

    async def found(_addresses: Addresses) -> list[str]:
        return ["127.0.0.1"]

    monkeypatch.setattr(Addresses, "find", found)
    async with Webhook(tls=server) as hook:
        port = hook.url.split(":")[2].split("/")[0]
        responses = {}
        for host in ("hook.example", "other.example"):
            target = Target(url=f"https://{host}:{port}/", headers={}, keys=(), timeout_s=WAIT_S)
            sending = Sender(target, trust, private_allowed=False)
            responses[host] = await sending.post(CONTENT)
            await sending.close()
    assert responses["hook.example"].status == 204
    assert responses["other.example"].status == 0
    assert "other.example" in responses["other.example"].text
    assert [request.headers["host"] for request in hook.requests] == [f"hook.example:{port}"]


# -- how messages are settled ------------------------------------------------------------------------------------


class Ledger(Settler):
    """Records settlements."""

    def __init__(self) -> None:
        self.output: list[tuple[int, int, int | None]] = []
        self.reasons: list[str] = []
        self.lost: set[int] = set()
        """Messages that somebody else has."""
        self.changed = asyncio.Event()

    async def settle(self, message: LeasedMessage, verb: int, *, delay_ms: int | None = None, reason: str = "") -> bool:
        self.output.append((message.record.offset, verb, delay_ms))
        self.reasons.append(reason)
        self.changed.set()
        return message.record.offset not in self.lost

    async def until(self, is_enough: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_enough():
                self.changed.clear()
                await self.changed.wait()

    @property
    def ended(self) -> list[int]:
        """The offsets of released leases, with repetitions."""
        return [offset for offset, verb, _ in self.output if verb != Verb.EXTEND]

    def of(self, verb: int) -> list[int]:
        return [offset for offset, output, _ in self.output if output == verb]


class LeasableMessages:
    """Messages that can be leased."""

    def __init__(self, count: int, lease_ms: int) -> None:
        self._left = [_message(offset, lease_ms) for offset in range(count)]
        self._added = asyncio.Event()
        self.surplus: list[LeasedMessage] = []
        self.unreadable: list[tuple[LeasedMessage, str]] = []
        self.asked: list[int] = []

    def add(self, message: LeasedMessage) -> None:
        self._left.append(message)
        self._added.set()

    async def receive(self, receive_request: ReceiveRequest) -> ReadRecords:
        self.asked.append(receive_request.max_records)
        while not self._left:
            self._added.clear()
            await self._added.wait()
        taken, self._left = self._left[: receive_request.max_records], self._left[receive_request.max_records :]
        unpacked = ReadRecords(taken, self.surplus, self.unreadable)
        self.surplus, self.unreadable = [], []
        return unpacked


def _message(offset: int, lease_ms: int) -> LeasedMessage:
    record = Record(Offset(offset), 0, None, b"%d" % offset, ())
    place = (None, "orders", UUID(int=7), 0, 1, int(time() * 1000) + lease_ms)
    return LeasedMessage(*place, record, lease_ms, fresh_until(monotonic(), lease_ms))


def _declared(hook: Webhook, **settings: str) -> PushSubscription:
    overrides = {"millstream.push.url": hook.url} | {name.replace("_", "."): value for name, value in settings.items()}
    declared = Subscription(
        name="billing", subscription_id=UUID(int=1), topics=("orders",), overrides=overrides, created_ms=0
    )
    push = push_subscription(declared, SubscriptionSettings.from_strings(overrides))
    assert push is not None
    return push


class Run:
    """A running pusher."""

    def __init__(self, hook: Webhook, count: int, **settings: str) -> None:
        # However slow the machine is, only those leases are extended that a test wants to be.
        declared = _declared(hook, **{"share_record_lock_duration_ms": "3600000", **settings})
        self.ledger, self.shelf = Ledger(), LeasableMessages(count, declared.lease_ms)
        timeout_s = declared.timeout_ms / 1000
        self.pusher = Pusher(
            declared,
            "push/1",
            self.shelf.receive,
            self.ledger,
            sender(hook, timeout_s=timeout_s, is_once=declared.delivery == AT_MOST_ONCE),
            on_change=lambda: None,
        )
        self.running = asyncio.ensure_future(self.pusher.run())

    async def end(self) -> None:
        self.pusher.stop()
        await asyncio.wait_for(self.running, WAIT_S)


async def test_messages_are_accepted_at_a_growing_concurrency(hook: Webhook) -> None:
    run = Run(hook, 50)
    await run.ledger.until(lambda: len(run.ledger.ended) == 50)
    await run.end()
    assert sorted(run.ledger.of(Verb.ACCEPT)) == list(range(50))
    assert run.shelf.asked[0] == 1
    assert max(run.shelf.asked) > 1
    report = run.pusher.report()
    assert (report.state, report.accepted, report.in_flight) == ("up", 50, 0)
    assert report.concurrency > 1


async def test_a_refused_message_is_redelivered_later_and_others_continue(hook: Webhook) -> None:
    hook.respond = lambda request: Response(400, body=b"no such order") if request.body == b"3" else Response()
    run = Run(hook, 20)
    await run.ledger.until(lambda: len(run.ledger.ended) == 20)
    await run.end()
    assert run.ledger.of(Verb.RELEASE) == [3]
    assert (3, Verb.RELEASE, 1000) in run.ledger.output
    assert "the endpoint returned 400: no such order" in run.ledger.reasons
    assert run.pusher.report().state == "up"


async def test_an_endpoint_that_refuses_connections_costs_no_attempts(
    hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "PAUSE_S_MIN", 0.01)
    monkeypatch.setattr(pace, "PAUSE_S_MAX", 0.01)
    await hook.stop()
    run = Run(hook, 100)
    await until(lambda: run.pusher.report().unreachable >= 4 * pushing.PROBES_MAX)
    assert not run.ledger.output
    assert run.pusher.report().state == "down"
    assert run.pusher.report().in_flight == 1
    await hook.start()
    await run.ledger.until(lambda: len(run.ledger.ended) == 100)
    await run.end()
    assert run.pusher.report().state == "up"
    assert sorted(run.ledger.of(Verb.ACCEPT)) == list(range(100))


async def test_an_endpoint_that_goes_down_costs_a_single_message_no_attempt(
    hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "PAUSE_S_MIN", 0.01)
    monkeypatch.setattr(pace, "PAUSE_S_MAX", 0.01)
    run = Run(hook, 300)
    await run.ledger.until(lambda: len(run.ledger.of(Verb.ACCEPT)) == 300)
    assert run.pusher.report().concurrency > 10
    await hook.stop()
    run.shelf.add(_message(300, 60_000))
    await until(lambda: run.pusher.report().unreachable >= 4 * pushing.PROBES_MAX)
    assert (run.pusher.report().state, run.ledger.of(Verb.RELEASE)) == ("down", [])
    await hook.start()
    await run.ledger.until(lambda: 300 in run.ledger.of(Verb.ACCEPT))
    await run.end()


async def test_a_message_that_crashes_the_endpoint_is_not_retried_for_ever(
    hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "PAUSE_S_MIN", 0.001)
    monkeypatch.setattr(pace, "PAUSE_S_MAX", 0.001)
    hook.respond = lambda request: Response(None) if request.body in (b"0", b"1", b"2") else Response()
    run = Run(hook, 10)
    await run.ledger.until(lambda: len(run.ledger.ended) == 10)
    await run.end()
    assert sorted(run.ledger.of(Verb.RELEASE)) == [0, 1, 2]


@pytest.mark.parametrize("response", [Response(503), Response(404), Response(None)])
async def test_an_endpoint_that_fails_every_message_costs_no_attempts_once_that_is_known(
    hook: Webhook, monkeypatch: pytest.MonkeyPatch, response: Response
) -> None:
    monkeypatch.setattr(pace, "PAUSE_S_MIN", 0.001)
    monkeypatch.setattr(pace, "PAUSE_S_MAX", 0.001)
    hook.respond = lambda _request: response
    run = Run(hook, 40)
    await run.ledger.until(lambda: len(run.ledger.ended) == 40)
    assert len(run.ledger.of(Verb.RELEASE)) < pace.BLAMED_AFTER
    assert len(run.ledger.of(Verb.RETURN)) > 40 - pace.BLAMED_AFTER
    assert all(delay_ms for _, verb, delay_ms in run.ledger.output if verb == Verb.RETURN), "another one is tried first"
    # One success ends that; further failures are attributed to the message.
    hook.respond = lambda request: Response(500) if request.body == b"41" else Response()
    run.shelf.add(_message(40, 60_000))
    await run.ledger.until(lambda: 40 in run.ledger.of(Verb.ACCEPT))
    run.shelf.add(_message(41, 60_000))
    await run.ledger.until(lambda: len(run.ledger.ended) == 42)
    await run.end()
    assert (40 in run.ledger.of(Verb.ACCEPT), 41 in run.ledger.of(Verb.RELEASE)) == (True, True)


async def test_a_pause_that_ends_while_it_is_looked_at_does_not_end_the_push(
    hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "PAUSE_S_MIN", 0.001)
    monkeypatch.setattr(pace, "PAUSE_S_MAX", 0.001)
    room = pace.Endpoint.room

    def slow_room(endpoint: pace.Endpoint, under_way: int, now: float) -> int:
        free = room(endpoint, under_way, now)
        sleep(0.002)
        return free

    monkeypatch.setattr(pace.Endpoint, "room", slow_room)
    hook.respond = lambda _request: Response(503)
    run = Run(hook, 10)
    await run.ledger.until(lambda: len(run.ledger.ended) == 10)
    await run.end()


async def test_the_lease_of_a_slow_message_is_extended(hook: Webhook) -> None:
    hook.respond = lambda _request: Response(after_s=WAIT_S)
    run = Run(hook, 1, share_record_lock_duration_ms=str(LEASE_MS))
    await run.ledger.until(lambda: len(run.ledger.of(Verb.EXTEND)) >= 2)
    run.pusher.stop()
    run.pusher.return_unfinished()
    await asyncio.wait_for(run.running, WAIT_S)
    assert run.ledger.output[-1] == (0, Verb.RELEASE, 0)


async def test_a_message_queued_for_its_endpoint_when_push_ends_was_not_delivered(
    hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It is still queued when push ends, however slow the machine is.
    monkeypatch.setattr(pace, "PAUSE_S_MIN", WAIT_S)
    monkeypatch.setattr(pace, "PAUSE_S_MAX", WAIT_S)
    await hook.stop()
    run = Run(hook, 3)
    await until(lambda: run.pusher.report().state == "down")
    await run.end()
    assert run.ledger.output == [(0, Verb.RETURN, 0)]


async def test_requests_in_flight_complete_before_push_ends(hook: Webhook) -> None:
    hook.respond = lambda _request: Response(after_s=0.2)
    run = Run(hook, 5)
    await hook.until(lambda: bool(hook.requests))
    await run.end()
    assert run.ledger.of(Verb.ACCEPT) == [0]
    assert len(hook.requests) == 1


async def test_leases_of_requests_in_flight_are_extended_until_push_has_ended(hook: Webhook) -> None:
    hook.respond = lambda _request: Response(after_s=WAIT_S)
    run = Run(hook, 1, share_record_lock_duration_ms=str(LEASE_MS))
    await run.ledger.until(lambda: bool(run.ledger.of(Verb.EXTEND)))
    run.pusher.stop()
    before = len(run.ledger.output)
    await run.ledger.until(lambda: len(run.ledger.output) >= before + 2)
    run.pusher.return_unfinished()
    await asyncio.wait_for(run.running, WAIT_S)
    assert set(run.ledger.output[:-1]) == {(0, Verb.EXTEND, LEASE_MS)}
    assert run.ledger.output[-1] == (0, Verb.RELEASE, 0)


async def test_a_response_in_transit_for_longer_than_its_lease_is_confirmed_first(hook: Webhook) -> None:
    run = Run(hook, 0)
    run.ledger.lost = {1}
    for offset in range(3):
        run.shelf.add(_message(offset, 60_000)._replace(fresh_until=monotonic()))
    await run.ledger.until(lambda: len(run.ledger.of(Verb.ACCEPT)) == 2)
    await run.end()
    assert sorted(run.ledger.of(Verb.EXTEND)) == [0, 1, 2]
    assert sorted(request.body for request in hook.requests) == [b"0", b"2"]


async def test_excess_messages_are_returned_and_unreadable_ones_released_with_the_reason(hook: Webhook) -> None:
    run = Run(hook, 1)
    run.shelf.surplus = [_message(1, 60_000)]
    run.shelf.unreadable = [(_message(2, 60_000), "the message takes too much")]
    await run.ledger.until(lambda: bool(run.ledger.of(Verb.ACCEPT)))
    await run.end()
    assert run.ledger.output == [(1, Verb.RETURN, 0), (2, Verb.RELEASE, None), (0, Verb.ACCEPT, None)]
    assert run.ledger.reasons == ["", "the message takes too much", ""]
    assert [request.body for request in hook.requests] == [b"0"]


async def test_at_most_the_buffer_limit_is_read_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [NewRecord(None, bytes(RECEIVE_BYTES // 2))] * 3
    batches = bytes(encode_batch(values, compression=COMPRESSION_ZSTD))
    part = PartitionMessages("t", bytes(16), 0, [LeasedRange(0, 3, 1, 1000)], batches, 60_000)
    leased = LeaseResponse(ReceiveResponse(0, None, [part]), monotonic())

    async def respond(*_asked: object, **_limits: object) -> LeaseResponse:
        return leased

    monkeypatch.setattr(LeaseRequests, "receive", respond)
    line = BrokerConnections("127.0.0.1:1")
    try:
        unpacked = await line.receive(ReceiveRequest("billing", "push/1", 3, RECEIVE_BYTES, 0))
    finally:
        await line.close()
    assert [message.record.offset for message in unpacked.messages] == [0, 1]
    assert [message.record.offset for message in unpacked.surplus] == [2]


async def test_a_message_leased_by_another_worker_is_not_sent_again(
    hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pace, "PAUSE_S_MIN", 0.01)
    monkeypatch.setattr(pace, "PAUSE_S_MAX", 0.01)
    await hook.stop()
    run = Run(hook, 2, share_record_lock_duration_ms=str(LEASE_MS))
    # It may be extended twice at once: by the renewal loop, and before it is sent again.
    await run.ledger.until(lambda: 0 in run.ledger.of(Verb.EXTEND))
    run.ledger.lost = {0}
    await run.ledger.until(lambda: 1 in run.ledger.of(Verb.EXTEND))
    await hook.start()
    await run.ledger.until(lambda: bool(run.ledger.of(Verb.ACCEPT)))
    await run.end()
    assert [request.body for request in hook.requests] == [b"1"]


async def test_retry_after_is_respected(hook: Webhook) -> None:
    hook.respond = lambda _request: Response(429, {"retry-after": "3600"})
    run = Run(hook, 5, millstream_backoff_min_ms="10")
    await run.ledger.until(lambda: len(run.ledger.ended) == 1)
    assert run.ledger.output == [(0, Verb.RELEASE, 3_600_000)]
    await run.end()
    assert len(hook.requests) == 1


async def test_at_most_once_is_not_retried(hook: Webhook) -> None:
    hook.respond = lambda _request: Response(400)
    run = Run(hook, 3, millstream_delivery="at-most-once")
    await hook.until(lambda: len(hook.requests) == 3)
    await run.end()
    assert run.ledger.output == []


async def test_at_most_once_is_sent_once_to_a_silent_endpoint(hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "PAUSE_S_MIN", 0.001)
    monkeypatch.setattr(pace, "PAUSE_S_MAX", 0.001)
    hook.respond = lambda _request: Response(None)
    run = Run(hook, 8, millstream_delivery=AT_MOST_ONCE)
    await hook.until(lambda: b"7" in {request.body for request in hook.requests})
    await run.end()
    assert sorted(request.body for request in hook.requests) == [b"%d" % offset for offset in range(8)]
    assert run.pusher.report().state == "down"
    assert run.ledger.output == []


async def test_at_most_once_tries_the_next_address_when_a_connection_is_refused(
    hook: Webhook, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def found(_addresses: Addresses) -> list[str]:
        return ["127.0.0.9", "127.0.0.1"]

    monkeypatch.setattr(Addresses, "find", found)
    assert (await post(hook, is_once=True)).status == 204
    assert len(hook.requests) == 1


async def test_a_silent_node_is_asked_again(hook: Webhook) -> None:
    run = Run(hook, 3)
    receive, failures = run.shelf.receive, [BrokerUnreachable("away")] * 2

    async def fails(receive_request: ReceiveRequest) -> ReadRecords:
        if failures:
            raise failures.pop()
        return await receive(receive_request)

    run.pusher._receive = fails
    await run.ledger.until(lambda: len(run.ledger.of(Verb.ACCEPT)) == 3)
    await run.end()
    assert not failures


async def test_a_shortened_lease_is_extended_in_time(hook: Webhook) -> None:
    hook.respond = lambda _request: Response(after_s=WAIT_S)
    run = Run(hook, 0, share_record_lock_duration_ms="3600000")
    run.pusher._receive = LeasableMessages(1, lease_ms=LEASE_MS).receive
    await hook.until(lambda: bool(hook.requests))
    await run.pusher.change(_declared(hook, share_record_lock_duration_ms=str(LEASE_MS)), sender(hook))
    await run.ledger.until(lambda: len(run.ledger.of(Verb.EXTEND)) >= 2)
    run.pusher.stop()
    run.pusher.return_unfinished()
    await asyncio.wait_for(run.running, WAIT_S)


async def test_push_ends_when_lease_renewal_fails(hook: Webhook, monkeypatch: pytest.MonkeyPatch) -> None:
    async def breaks(_pusher: Pusher) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(Pusher, "_extend_leases", breaks)
    run = Run(hook, 0)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(run.running, WAIT_S)


def test_importing_push_has_no_side_effects() -> None:
    assert sys.modules.get("sniffio", pace) is not None
