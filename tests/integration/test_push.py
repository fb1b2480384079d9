"""Push from a real server to a real endpoint: slow, failing, unreachable, and after a kill of the broker."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from millstream.core.subscription import ATTEMPTS, BACKOFF_MIN, DEAD_LETTER_TOPIC, LEASE, Verb
from millstream.gateway.api.record_reader import MESSAGE_BYTES_MAX
from millstream.protocol.private.publish_once import publish_once
from millstream.protocol.private.subscriptions import SubscriptionClient, delivery_state
from millstream.protocol.records.batch import COMPRESSION_ZSTD
from millstream.protocol.records.record import Headers, NewRecord, decode_records, encode_batch
from millstream.protocol.wire.client import Client
from millstream_testing.command import CommandLine
from millstream_testing.page import samples_of
from millstream_testing.push_trial import PROCESS, push_processes
from millstream_testing.server import Server
from millstream_testing.waiting import until
from millstream_testing.webhook import Request, Response, Webhook

SECRET = "a secret of the test, long enough".replace(" ", "-")
URL, SECRET_NAME, HEADERS = "millstream.push.url", "millstream.push.secret", "millstream.push.headers"
UNFINISHED = ("waiting", "leased", "delayed", "rejected")
WAIT_S = 120.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("push") / "data", settings={"push-private-addresses": "true"}) as running:
        yield running


class PushedTopic:
    """A topic whose messages are pushed to an endpoint of the test."""

    def __init__(self, client: Client, hook: Webhook, name: str) -> None:
        self.client = client
        self.hook = hook
        self.name = name
        self.subscriptions = SubscriptionClient(client)

    async def publish(self, *values: str, headers: Headers = ()) -> None:
        now_ms = int(time.time() * 1000)
        records = [NewRecord(b"c7", value.encode(), headers, now_ms) for value in values]
        await self.client.produce(self.name, 0, encode_batch(records))

    async def state(self, offset: int, *, wait_ms: int = 0) -> str:
        return (await delivery_state(self.client, self.name, self.name, 0, offset, wait_ms=wait_ms)).state

    async def ended(self, count: int) -> list[str]:
        """The outcomes of the first messages, once they are settled."""
        found = []
        async with asyncio.timeout(WAIT_S):
            for offset in range(count):
                while (state := await self.state(offset, wait_ms=10_000)) in (
                    "waiting",
                    "leased",
                    "delayed",
                    "rejected",
                ):
                    pass
                found.append(state)
        return found

    async def reported(self) -> dict[str, Any]:
        (described,) = await self.subscriptions.describe([self.name])
        return described

    async def pushed(self, **expected: object) -> dict[str, Any]:
        """Return the push status, once it is reported."""
        async with asyncio.timeout(WAIT_S):
            while True:
                reported = (await self.reported())["push"]
                if reported and all(reported[0][name] == value for name, value in expected.items()):
                    return dict(reported[0])
                await asyncio.sleep(0.1)


@asynccontextmanager
async def pushed_topic(
    server: Server, name: str, settings: Mapping[str, str] | None = None
) -> AsyncIterator[PushedTopic]:
    async with Webhook() as hook, Client.connect(server.kafka) as client:
        await client.metadata([name], create=True)
        made = PushedTopic(client, hook, name)
        await made.subscriptions.create(name, [name], {URL: hook.url, **(settings or {})})
        try:
            yield made
        finally:
            await made.subscriptions.delete(name, force=True)


async def test_a_message_is_pushed_signed_and_accepted(server: Server) -> None:
    async with pushed_topic(
        server, "signed", {SECRET_NAME: SECRET, HEADERS: '{"Authorization": "Bearer t0p"}'}
    ) as work:
        await work.publish('{"total": 7}', headers=(("message-id", b"o-1"),))
        await work.hook.until(lambda: bool(work.hook.requests), wait_s=WAIT_S)
        (request,) = work.hook.requests
        assert request.body == b'{"total": 7}'
        assert request.is_signed_by(SECRET.encode())
        assert request.headers["authorization"] == "Bearer t0p"
        assert (request.headers["ce-id"], request.headers["webhook-id"]) == ("o-1", "o-1")
        assert (request.headers["ce-subject"], request.headers["ce-source"]) == ("c7", "/topics/signed")
        assert await work.ended(1) == ["accepted"]


async def test_secrets_are_never_shown(server: Server, tmp_path: Path) -> None:
    secret, both, header = tmp_path / "secret", tmp_path / "both", tmp_path / "header"
    secret.write_text(SECRET)
    both.write_text(f"{SECRET}\n{SECRET}2\n")
    header.write_text("Bearer t0psecret\n")
    command = CommandLine(server.kafka)
    async with Webhook() as hook:
        create = ("subscription", "create", "hidden", "--topic", "hidden", "--push", hook.url)
        options = ("--push-secret", f"@{secret}", "--push-header", f"Authorization=@{header}")
        output = [
            await asyncio.to_thread(command, *create, *options),
            await asyncio.to_thread(command, "subscription", "update", "hidden", "--push-secret", f"@{both}", "--json"),
            await asyncio.to_thread(command, "subscription", "describe", "hidden"),
            await asyncio.to_thread(command, "subscription", "describe", "hidden", "--json"),
        ]
        reported = output[-1].document
        assert reported["overrides"][SECRET_NAME] == "(hidden)"
        assert reported["settings"][URL] == hook.url
        seen = "".join(str(line) for line in output) + server.log.read_text()
        assert SECRET not in seen
        assert "t0psecret" not in seen
        # Whoever may change the URL does not learn the headers.
        update = ("subscription", "update", "hidden", "--push")
        refused = await asyncio.to_thread(command, *update, "http://127.0.0.1:1/hook")
        assert refused.code != 0
        assert "millstream.push.headers is not sent elsewhere" in refused.err
        moved = hook.url + "/other"
        assert (await asyncio.to_thread(command, *update, moved)).code == 0, "another path of the same server"
        again = ("--push-header", f"Authorization=@{header}")
        assert (await asyncio.to_thread(command, *update, "http://127.0.0.1:1/hook", *again)).code == 0
        await asyncio.to_thread(command, "subscription", "delete", "hidden", "--yes")


async def test_failures_are_retried_and_then_dead_lettered(server: Server) -> None:
    settings = {ATTEMPTS: "3", BACKOFF_MIN: "10", DEAD_LETTER_TOPIC: "failing-dead"}
    async with pushed_topic(server, "failing", settings) as work:
        tries: dict[bytes, int] = {}

        def respond(request: Request) -> Response:
            tries[request.body] = tries.get(request.body, 0) + 1
            if request.body == b"poison":
                return Response(422, body=b"no such order")
            return Response(500) if request.body == b"twice" and tries[b"twice"] < 2 else Response(200)

        work.hook.respond = respond
        await work.publish("well", "poison", "twice")
        assert await work.ended(3) == ["accepted", "dead-lettered", "accepted"]
        assert tries == {b"well": 1, b"poison": 3, b"twice": 2}
        fetched = await work.client.fetch("failing-dead", 0, 0)
        (letter,) = decode_records(fetched.records)
        assert "422: no such order" in dict(letter.headers)["dlq-reason"].decode()  # type: ignore[union-attr]
        await work.pushed(refused=3, failed=1, state="up")


async def test_a_message_too_large_to_push_is_dead_lettered_and_others_continue(server: Server) -> None:
    async with pushed_topic(server, "large", {ATTEMPTS: "2", BACKOFF_MIN: "10", DEAD_LETTER_TOPIC: "none"}) as work:
        value = os.urandom(MESSAGE_BYTES_MAX // 64) + bytes(MESSAGE_BYTES_MAX)
        large = encode_batch([NewRecord(None, value)], compression=COMPRESSION_ZSTD)
        assert len(large) < 1024 * 1024
        await work.client.produce("large", 0, large)
        await work.publish("small")
        assert await work.ended(2) == ["dropped", "accepted"]
        assert [request.body for request in work.hook.requests] == [b"small"]
        assert "message cannot be pushed: the message has " in server.log.read_text()


async def test_an_unreachable_endpoint_is_retried_and_reported(server: Server) -> None:
    async with pushed_topic(server, "away", {ATTEMPTS: "3"}) as work:
        await work.hook.stop()
        await work.publish(*map(str, range(20)))
        down = await work.pushed(state="down")
        assert down["concurrency"] == 1
        assert down["last_error"].startswith("the endpoint cannot be reached")
        metrics = await asyncio.to_thread(server.metrics)
        assert 'millstream_push_endpoint_up{subscription="away"} 0.0' in metrics
        await work.hook.start()
        # No message has used up its attempts, and no dead letter topic would receive one.
        assert await work.ended(20) == ["accepted"] * 20
        assert (await work.pushed(state="up"))["concurrency"] > 1
        # However many it accepted before, a single message finds out that it is unreachable again, at no attempt.
        await work.hook.stop()
        await work.publish("20")
        await work.pushed(state="down")
        await work.hook.start()
        assert await work.ended(21) == ["accepted"] * 21
        assert work.hook.requests[-1].headers["ce-attempt"] == "1"


# Two of the names are numbers, which the resolver turns into addresses.
HERE = ("127.0.0.1", "localhost", "2130706433", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[::1]", "0.0.0.0", "[::]")
ELSEWHERE = (
    *("192.0.0.8", "3221225480", "168.63.129.16", "169.254.169.254", "10.0.0.1", "100.64.0.1"),
    *(
        "[fec0::1]",
        "[64:ff9b:1::7f00:1]",
        "[64:ff9b::7f00:1]",
        "[::127.0.0.1]",
        "[::ffff:0:127.0.0.1]",
        "[2002:7f00:1::]",
    ),
)


async def test_nothing_is_pushed_to_private_addresses_in_any_notation(
    start_server: Callable[..., Server],
) -> None:
    """The endpoint would receive the requests to any of the first ones."""
    guarded = start_server()
    async with Webhook() as hook, httpx.AsyncClient(base_url=f"http://{guarded.http}/v1", timeout=WAIT_S) as http:
        port = hook.url.partition("//")[2].partition("/")[0].rpartition(":")[2]
        names = {f"to-{number}": f"http://{host}:{port}/" for number, host in enumerate(HERE + ELSEWHERE)}
        for at, (name, url) in enumerate(names.items()):
            made = {"name": name, "topics": ["orders"], "push_url": url if at % 2 else "https://example.invalid/"}
            assert (await http.post("/subscriptions", json=made)).status_code == 201
            if not at % 2:
                assert (await http.patch(f"/subscriptions/{name}", json={"push_url": url})).status_code == 200
        assert (await http.post("/topics/orders/messages", content=b"x")).status_code == 201
        async with asyncio.timeout(WAIT_S):
            for name in names:
                while not (states := (await http.get(f"/subscriptions/{name}")).json()["push"]) or "private" not in (
                    states[0]["last_error"] or ""
                ):
                    await asyncio.sleep(0.1)
        assert (hook.connections, hook.requests) == (0, [])


async def test_a_slow_endpoint_keeps_its_leases(server: Server) -> None:
    async with pushed_topic(server, "slow", {LEASE: "4000"}) as work:
        work.hook.respond = lambda _request: Response(after_s=5.0)
        await work.publish("once")
        assert await work.ended(1) == ["accepted"]
        assert len(work.hook.requests) == 1


async def test_settings_change_during_delivery(server: Server) -> None:
    async with pushed_topic(server, "changing") as work, Webhook() as other:
        await work.publish("before")
        await work.ended(1)
        await work.subscriptions.alter(work.name, {URL: other.url, "millstream.push.format": "cloudevents-structured"})
        await work.publish('{"a": 1}')
        await other.until(lambda: bool(other.requests), wait_s=WAIT_S)
        assert json.loads(other.requests[0].body)["data"] == {"a": 1}
        assert work.hook.bodies == [b"before"]


async def test_the_documented_endpoint_works(server: Server, tmp_path: Path) -> None:
    (program,) = (sample for sample in samples_of(Path(__file__).parents[2] / "docs" / "push.md") if sample.file)
    (tmp_path / "hook.py").write_text(program.text)
    secret = "whsec_" + base64.b64encode(b"0123456789abcdef").decode()
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(tmp_path / "hook.py"), env={"WEBHOOK_SECRET": secret, "PORT": "0"}, stdout=PIPE, stderr=PIPE
    )
    try:
        async with pushed_topic(server, "documented", {SECRET_NAME: secret}) as work, asyncio.timeout(WAIT_S):
            assert process.stdout is not None
            url = f"http://127.0.0.1:{(await process.stdout.readline()).split()[-1].decode()}/"
            await work.subscriptions.alter(work.name, {URL: url})
            await work.publish("a trusted one", headers=(("message-id", b"m-1"),))
            assert await process.stdout.readline() == b"got m-1 a trusted one\n"
            async with httpx.AsyncClient(timeout=WAIT_S) as http:
                forged = {"webhook-id": "x", "webhook-timestamp": str(int(time.time())), "webhook-signature": "v1,AAAA"}
                assert (await http.post(url, content=b"x", headers=forged)).status_code == 401
            assert await work.ended(1) == ["accepted"]
    finally:
        process.kill()
        await process.communicate()


async def test_the_same_message_published_again_is_pushed_once(server: Server) -> None:
    async with pushed_topic(server, "once") as work:
        record = NewRecord(None, b"x", (("message-id", b"m-1"),), int(time.time() * 1000))
        first = await publish_once(work.client, work.name, 0, [record])
        again = await publish_once(work.client, work.name, 0, [record])
        assert (first[0].is_new, again[0].is_new) == (True, False)
        assert first[0].offset == again[0].offset
        assert await work.ended(1) == ["accepted"]
        assert work.hook.bodies == [b"x"]


async def test_the_push_process_runs_only_while_something_is_pushed(server: Server) -> None:
    async with pushed_topic(server, "process") as work:
        await work.publish("x")
        await work.ended(1)
        assert len(push_processes(server.pid)) == 1
    await until(lambda: not push_processes(server.pid))


async def test_messages_held_by_a_killed_process_are_redelivered_at_once(server: Server) -> None:
    async with pushed_topic(server, "held", {LEASE: "600000"}) as work:
        work.hook.respond = lambda request: Response(after_s=WAIT_S if request.headers["ce-attempt"] == "1" else 0)
        await work.publish("x")
        await work.hook.until(lambda: work.hook.in_flight == 1, wait_s=WAIT_S)
        for pid in push_processes(server.pid):
            os.kill(pid, signal.SIGKILL)
        assert await work.ended(1) == ["accepted"]
        assert [request.headers["ce-attempt"] for request in work.hook.requests] == ["1", "2"]


async def test_an_endpoint_gets_no_message_that_another_worker_has_accepted_meanwhile(server: Server) -> None:
    """The process is stopped with its response unread, until another worker has accepted the message."""
    async with pushed_topic(server, "late", {LEASE: "1000"}) as work, asyncio.timeout(WAIT_S):
        await work.publish("before")
        await work.ended(1)
        offset, attempt = 0, 1
        while attempt == 1:  # The process had not requested more yet.
            (pid,) = push_processes(server.pid)
            os.kill(pid, signal.SIGSTOP)
            try:
                await work.publish("first")
                (taken,) = await work.subscriptions.receive("late", "other", max_records=1, wait_ms=60_000)
                offset, attempt = taken.record.offset, taken.attempt
                assert await work.subscriptions.settle("late", "other", [taken], Verb.ACCEPT) == [None]
            finally:
                os.kill(pid, signal.SIGCONT)
            await work.publish("last")
            assert await work.ended(offset + 2) == ["accepted"] * (offset + 2)
        assert set(work.hook.bodies) == {b"before", b"last"}


async def test_every_message_arrives_although_the_broker_is_killed(tmp_path: Path) -> None:
    with Server(tmp_path / "data", settings={"push-private-addresses": "true"}) as killed:
        async with pushed_topic(killed, "killed", {LEASE: "2000"}) as work:
            await work.publish(*map(str, range(60)))
            await work.hook.until(lambda: len(work.hook.requests) >= 10, wait_s=WAIT_S)
            orphans = push_processes(killed.pid)
            assert len(orphans) == 1
            killed.kill_main()
            killed.restart(clean=False)
            assert await work.ended(60) == ["accepted"] * 60
            assert set(work.hook.bodies) == {str(number).encode() for number in range(60)}
            (counted,) = (await work.reported())["queues"]
            assert (counted["accepted"], counted["dropped"]) == (60, 0)
            await until(lambda: not any(_is_alive(pid) for pid in orphans))
        assert killed.stop() == 0


def _is_alive(pid: int) -> bool:
    try:
        return PROCESS in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
