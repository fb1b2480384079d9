"""Dead letters by command: redrives, letters held by others, and interrupted commands."""

from __future__ import annotations

import asyncio
import re
import time
from datetime import timedelta
from typing import Any

import pytest
from conformance.question import Broker
from kio.schema.delete_records.v2.request import DeleteRecordsPartition, DeleteRecordsRequest, DeleteRecordsTopic
from kio.schema.types import TopicName
from kio.static.primitive import i32, i32Timedelta, i64

from millstream.client.admin import dead_letter
from millstream.client.admin.dead_letter import HELD_MAX, LEASE_MS, DeadLetterClient, LetterPass, process_letters
from millstream.client.admin.topics import delete_topic
from millstream.core.errors import InvalidRequest, PolicyViolation
from millstream.core.subscription import ATTEMPTS, DEAD_LETTER_TOPIC, EARLIEST, LEASE, START, Verb
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.wire.client import Client
from millstream_testing.command import CommandLine
from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

LETTERS = 20


@pytest.fixture
def name(millstream: CommandLine, request: pytest.FixtureRequest) -> str:
    """A subscription with dead letters; its topic has the same name, and that of the letters ends in `-dead`."""
    name = re.sub("[^a-z0-9]+", "-", str(request.node.name))[-40:].strip("-")
    assert millstream("topic", "create", name).code == 0
    dead = ("--dead-letter", f"{name}-dead")
    assert millstream("subscription", "create", name, "--topic", name, "--start", "start", *dead).code == 0
    sent = millstream.process("publish", name, stdin=b"".join(b"%d\n" % number for number in range(LETTERS)))
    assert sent.code == 0, sent.err
    rejected: list[object] = []
    while len(rejected) < LETTERS:
        pulled = millstream("subscription", "pull", name, "-n", LETTERS, "--wait", 60, "--reject", "no", "--json")
        rejected += pulled.documents
    wait_until(lambda: open_letters(millstream, name) == LETTERS)
    return name


def open_letters(millstream: CommandLine, name: str) -> int:
    reported = millstream("dlq", "list", "--json").document["dead_letters"]
    return next(int(topic["letters"]) for topic in reported if topic["topic"] == f"{name}-dead")


def test_letters_beyond_the_limit_are_not_reported_as_unmatched(millstream: CommandLine, name: str) -> None:
    redriven = millstream("dlq", "redrive", name, "-n", 6)
    assert (redriven.code, redriven.out, redriven.err) == (0, f"Redrove 6 letters in {name}.\n", "")
    purged = millstream("dlq", "purge", name, "-n", 2, "--json").document
    assert purged == {"purged": 2, "skipped": 0, "held": 0, "held_back": 0, "uncertain": 0}
    filtered = millstream("dlq", "redrive", name, "--filter", "headers['dlq-offset'] = '19'", "--json").document
    reported = {"redriven": 1, "skipped": LETTERS - 9, "held": 0, "held_back": 0, "uncertain": 0}
    assert filtered == {**reported, "subscriptions": {name: 1}, "refused": 0, "reasons": []}
    assert open_letters(millstream, name) == LETTERS - 9
    deleted = millstream("topic", "delete", name, "--yes").err
    assert f"of which 7 messages are not delivered yet and {LETTERS - 9} messages are dead-lettered." in deleted


def pulled(millstream: CommandLine, name: str, count: int, *how: object) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    while len(messages) < count:
        messages += millstream("subscription", "pull", name, "-n", count, "--wait", 60, *how, "--json").documents
    return messages


def test_a_redrive_redelivers_the_originals_in_their_subscription_only(millstream: CommandLine, name: str) -> None:
    other = f"{name}-other"
    assert millstream("subscription", "create", other, "--topic", name, "--start", "start").code == 0
    originals = pulled(millstream, other, LETTERS, "--accept")
    before = millstream("topic", "describe", name, "--json").document["partitions"]
    assert millstream("dlq", "redrive", name).code == 0
    again = pulled(millstream, name, LETTERS, "--accept")

    def place(message: dict[str, Any]) -> tuple[int, int]:
        return message["partition"], message["offset"]

    assert [letter["attempt"] for letter in again] == [1] * LETTERS
    assert list(map(place, again)) == sorted(map(place, originals)), "in the order of their offsets"
    assert {letter["id"] for letter in again} == {original["id"] for original in originals}
    assert millstream("topic", "describe", name, "--json").document["partitions"] == before, "nothing was published"
    assert millstream("subscription", "pull", other, "--json").documents == []
    assert open_letters(millstream, name) == 0


def test_a_dry_run_counts_and_changes_nothing(server: Server, millstream: CommandLine, name: str) -> None:
    condition = ("--where", "headers['dlq-offset'] >= '5' AND headers['dlq-offset'] < '9'")
    counted = millstream("dlq", "redrive", name, *condition, "--dry-run", "--json").document
    assert counted == {
        "would_redrive": 4,
        "skipped": LETTERS - 4,
        "held": 0,
        "held_back": 0,
        "uncertain": 0,
        "subscriptions": {name: 4},
        "refused": 0,
        "reasons": [],
    }
    assert open_letters(millstream, name) == LETTERS
    asyncio.run(delete_records(server, name, LETTERS - 5))
    text = millstream("dlq", "redrive", name, "--dry-run").out
    gone = f"15 letters would stay open: topic '{name}' no longer has the original (15)."
    assert text == f"Would redrive 5 letters in {name}. {gone}\n"
    text = millstream("dlq", "redrive", name, "--to-topic", name, "--dry-run").out
    assert text == f"Would publish {LETTERS} letters to {name}.\n"
    assert open_letters(millstream, name) == LETTERS


def test_many_letters_are_redriven_in_rounds(
    millstream: CommandLine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letter, "BATCH", 3)
    monkeypatch.setattr(dead_letter, "ROUND_MAX", 4)
    monkeypatch.setattr(dead_letter, "SKIPPED_MAX", 2)
    # Every other letter matches; the others are held back for a while, and are not seen again.
    condition = "headers['dlq-offset'] IN ('1', '3', '5', '7', '9', '11', '13', '15', '17', '19')"
    counted = millstream("dlq", "redrive", name, "--where", condition, "--json").document
    assert (counted["redriven"], counted["skipped"], counted["subscriptions"]) == (10, 10, {name: 10})
    again = pulled(millstream, name, 10, "--accept")
    assert sorted(letter["offset"] for letter in again) == list(range(1, LETTERS, 2))
    assert open_letters(millstream, name) == 10


def test_open_letters_have_their_own_metrics(server: Server, millstream: CommandLine, name: str) -> None:
    assert f'millstream_dead_letters_open{{topic="{name}-dead"}} {LETTERS}.0' in server.metrics()
    assert millstream("dlq", "purge", name, "-n", 5).code == 0
    reported = server.metrics()
    assert f'millstream_dead_letters_open{{topic="{name}-dead"}} {LETTERS - 5}.0' in reported
    assert f'millstream_dead_letters_oldest_age_seconds{{topic="{name}-dead"}}' in reported
    assert "__dlq/" not in reported, "letters wait for people, not for workers"


def test_a_message_dead_lettered_again_can_be_redriven_again(millstream: CommandLine, name: str) -> None:
    for _ in range(2):
        assert millstream("dlq", "redrive", name).code == 0
        pulled(millstream, name, LETTERS, "--reject", "no")
        wait_until(lambda: open_letters(millstream, name) == LETTERS)


def test_a_letter_too_large_for_its_topic_is_reported_until_it_fits(millstream: CommandLine) -> None:
    name, dead = "narrow-letters", "narrow-letters-dead"
    assert millstream("topic", "create", name).code == 0
    assert millstream("topic", "create", dead, "--set", "max.message.bytes=2000").code == 0
    options = ("--topic", name, "--start", "start", "--dead-letter", dead)
    assert millstream("subscription", "create", name, *options).code == 0
    assert millstream.process("publish", name, stdin=b"x" * 5000 + b"\n").code == 0
    assert millstream("subscription", "pull", name, "--wait", 60, "--reject", "no").code == 0

    def listed() -> dict[str, Any]:
        reported = millstream("dlq", "list", "--json").document["dead_letters"]
        return next(topic for topic in reported if topic["topic"] == dead)

    wait_until(lambda: listed()["refused"] == 1)
    (reason,) = listed()["refusals"]
    advice = re.search(rf"millstream topic alter {dead} --set (max.message.bytes=\d+)", reason)
    assert advice is not None, reason
    assert f"1 message cannot be dead-lettered: {reason}\n" in millstream("dlq", "list").err
    (finding,) = [
        finding for finding in millstream("doctor", "--json").document["findings"] if finding["check"] == "dead letters"
    ]
    assert finding["detail"] == f"the dead letter topic of subscription {name} refuses 1 message"
    assert millstream("topic", "alter", dead, "--set", advice[1]).code == 0
    wait_until(lambda: listed()["letters"] == 1)
    assert (listed()["refused"], listed()["unreachable"]) == (0, [])


def test_letters_with_deleted_originals_stay_open_and_can_be_published(
    server: Server, millstream: CommandLine, name: str
) -> None:
    asyncio.run(delete_records(server, name, LETTERS - 5))
    refused = millstream("dlq", "redrive", name)
    assert (refused.code, refused.out) == (5, f"Redrove 5 letters in {name}.\n")
    assert f"{LETTERS - 5} letters are left open: topic {name!r} no longer has the original" in refused.err
    assert "--to-topic" in refused.err
    assert open_letters(millstream, name) == LETTERS - 5
    published = millstream("dlq", "redrive", name, "--to-topic", name, "--json").document
    counts = {"redriven": LETTERS - 5, "skipped": 0, "held": 0, "held_back": 0, "uncertain": 0}
    assert published == {**counts, "topics": {name: LETTERS - 5}}
    assert len(pulled(millstream, name, LETTERS, "--accept")) == LETTERS


async def delete_records(server: Server, topic: str, offset: int) -> None:
    async with Client.connect(server.kafka) as client:
        partition = DeleteRecordsPartition(partition_index=i32(0), offset=i64(offset))
        request = DeleteRecordsRequest(
            topics=(DeleteRecordsTopic(name=TopicName(topic), partitions=(partition,)),),
            timeout=i32Timedelta.parse(timedelta(seconds=30)),
        )
        response = await client.send(None, request)
        assert response.topics[0].partitions[0].error_code == 0


def test_a_republished_message_has_the_time_of_the_redrive(millstream: CommandLine, name: str) -> None:
    """Otherwise its topic could delete it before delivery, when the letter is already closed."""
    for times in ("1", "2"):
        began_ms = int(time.time() * 1000)
        only = ("--filter", "headers['message-id'] LIKE '%/0/3'")
        assert millstream("dlq", "redrive", name, "--to-topic", name, *only).code == 0
        stored = millstream("tail", name, "--from", "start", "--json").documents
        reported = [message for message in stored if message["value"] == "3"]
        first, last = reported[0], reported[-1]
        assert last["timestamp_ms"] >= began_ms
        story = {key: text for key, text in last["headers"] if key.startswith("dlq-")}
        assert story == {"dlq-redriven": times, "dlq-timestamp": str(first["timestamp_ms"])}
        # It is dead-lettered again, and keeps that time.
        assert len(pulled(millstream, name, 1, "--reject", "no")) == 1
        wait_until(lambda: open_letters(millstream, name) == LETTERS)


def test_a_forged_letter_redelivers_nothing(millstream: CommandLine, name: str) -> None:
    """Anyone who may write to one dead letter topic can publish what looks like the letter of another subscription."""
    forged = f"{name}-forged"
    assert millstream("topic", "create", forged).code == 0
    options = ("--topic", name, "--start", "start", "--dead-letter", forged)
    assert millstream("subscription", "create", f"{name}-other", *options).code == 0
    letter = millstream("dlq", "show", name, "-n", 1, "--json").document
    headers = [f"--header={key}={value}" for key, value in letter["headers"]]
    assert millstream("publish", forged, "forged", *headers).code == 0
    reason = f"topic '{forged}' is not the dead letter topic of subscription '{name}'"
    counted = millstream("dlq", "redrive", forged, "--dry-run").out
    assert f"Would redrive 0 letters. 1 letter would stay open: {reason}" in counted
    refused = millstream("dlq", "redrive", forged)
    assert (refused.code, refused.out) == (5, "Redrove 0 letters.\n")
    assert reason in refused.err
    assert millstream("subscription", "pull", name, "--json").documents == []
    # The subscription says itself which topic its letters are in.
    assert millstream("subscription", "update", name, "--dead-letter", forged).code == 0
    assert millstream("dlq", "redrive", f"{name}-dead").code == 5
    assert millstream("dlq", "redrive", forged).out == f"Redrove 1 letter in {name}.\n"
    assert len(pulled(millstream, name, 1, "--accept")) == 1


def test_letters_are_not_published_to_a_missing_topic(millstream: CommandLine, name: str) -> None:
    refused = millstream("dlq", "redrive", name, "--to-topic", "no-such-topic")
    assert (refused.code, "millstream topic create no-such-topic" in refused.err) == (3, True)
    assert millstream("topic", "describe", "no-such-topic").code == 3
    # A topic recreated under its name has other messages at the same offsets.
    assert millstream("topic", "delete", name, "--yes").code == 0
    refused = millstream("dlq", "redrive", name)
    assert (refused.code, f"topic {name!r} no longer has the original" in refused.err) == (5, True)
    assert millstream("topic", "create", name).code == 0
    assert millstream.process("publish", name, stdin=b"other\n" * LETTERS).code == 0
    refused = millstream("dlq", "redrive", name)
    assert (refused.code, "no longer has the original" in refused.err) == (5, True)
    assert len(millstream("dlq", "show", name, "-n", 50, "--json").documents) == LETTERS, "all were given back"


@pytest.mark.parametrize("how", ["update", "alter", "delete"])
def test_letters_of_no_subscription_any_more_stay_open(
    server: Server, millstream: CommandLine, name: str, how: str
) -> None:
    dead = f"{name}-dead"
    if how == "update":
        changed = millstream("subscription", "update", name, "--dead-letter", "none")
        assert (changed.code, f"Topic {dead} keeps {LETTERS} open dead letters" in changed.err) == (0, True)
    elif how == "alter":
        setting = {"name": DEAD_LETTER_TOPIC, "config_operation": 0, "value": "none"}
        group = {"resource_type": 32, "resource_name": name, "configs": [setting]}
        (altered,) = Broker(server.kafka).ask(44, 1, {"resources": [group]})["responses"]
        assert altered["error_code"] == "none"
    else:
        assert millstream("subscription", "delete", name, "--yes", "--force").code == 0
    letter = next(
        letter for letter in millstream("dlq", "list", "--json").document["dead_letters"] if letter["topic"] == dead
    )
    assert (letter["subscriptions"], letter["letters"], letter["unreachable"]) == ([], LETTERS, [])
    assert f'millstream_dead_letters_open{{topic="{dead}"}} {LETTERS}.0' in server.metrics()
    refused = millstream("topic", "delete", dead, "--yes")
    assert (refused.code, f"{LETTERS} open dead letters" in refused.err) == (5, True)
    with pytest.raises(PolicyViolation, match=f"{LETTERS} open dead letters"):
        asyncio.run(delete_by_kafka(server, dead))
    if how != "delete":
        assert millstream("subscription", "update", name, "--dead-letter", dead).code == 0
        assert millstream("dlq", "redrive", dead).code == 0
        assert len(pulled(millstream, name, LETTERS, "--accept")) == LETTERS


def test_open_letters_are_deleted_only_with_force(server: Server, millstream: CommandLine, name: str) -> None:
    dead = f"{name}-dead"
    refused = millstream("subscription", "delete", name, "--yes")
    assert (refused.code, f"{LETTERS} open dead letters" in refused.err, "--force" in refused.err) == (5, True, True)
    refused = millstream("topic", "delete", dead, "--yes")
    assert (refused.code, f"{LETTERS} open dead letters" in refused.err, "--force" in refused.err) == (5, True, True)
    with pytest.raises(PolicyViolation, match=f"{LETTERS} open dead letters"):
        asyncio.run(delete_by_kafka(server, dead))
    assert millstream("dlq", "purge", name, "-n", 5).code == 0
    refused = millstream("topic", "delete", dead, "--yes")
    assert (refused.code, f"{LETTERS - 5} open dead letters" in refused.err) == (5, True)
    assert millstream("subscription", "delete", name, "--yes", "--force").code == 0
    orphans = next(
        letter for letter in millstream("dlq", "list", "--json").document["dead_letters"] if letter["topic"] == dead
    )
    assert (orphans["subscriptions"], orphans["letters"], orphans["unreachable"]) == ([], LETTERS - 5, [])
    refused = millstream("dlq", "redrive", dead)
    assert (refused.code, "does not exist" in refused.err) == (5, True)
    assert millstream("topic", "delete", dead, "--yes", "--force").code == 0
    assert millstream("topic", "describe", dead).code == 3


async def delete_by_kafka(server: Server, topic: str) -> None:
    async with Client.connect(server.kafka) as client:
        await delete_topic(client, topic)


async def test_letters_held_by_another_command_are_reported(server: Server, millstream: CommandLine, name: str) -> None:
    own = f"__dlq/{name}-dead"
    async with Client.connect(server.kafka) as client:
        subscriptions = SubscriptionClient(client)
        # As an earlier version left it, with leases of ten minutes.
        old = {START: EARLIEST, ATTEMPTS: "0", LEASE: "600000"}
        await subscriptions.create(own, [f"{name}-dead"], old)
        held = await subscriptions.receive(own, "another", max_records=LETTERS, wait_ms=60_000)
        assert len(held) == LETTERS
        shown = await asyncio.to_thread(millstream, "dlq", "show", name)
        assert (shown.code, shown.out) == (0, "")
        assert f"{LETTERS} letters are held by another command and come back within a minute" in shown.err
        (reported,) = await subscriptions.describe([own])
        assert reported["settings"][LEASE] == str(LEASE_MS)


def test_an_interrupted_purge_mentions_the_letters_it_was_closing(
    millstream: CommandLine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle = SubscriptionClient.settle

    async def settle_and_lose_the_response(*given: Any, **named: Any) -> Any:
        response = await settle(*given, **named)
        if Verb.ACCEPT in given:
            raise InvalidRequest("the response was lost")
        return response

    monkeypatch.setattr(SubscriptionClient, "settle", settle_and_lose_the_response)
    failed = millstream("dlq", "purge", name)
    assert failed.code != 0
    assert f"0 letters processed before that; up to {LETTERS} more may have been processed" in failed.err


async def test_a_purge_remembers_no_letters(server: Server, name: str) -> None:
    async with Client.connect(server.kafka) as client:
        dlq, outcome = DeadLetterClient(client, f"{name}-dead", "purging", patience_s=10), LetterPass()
        await process_letters(dlq, None, outcome, keep=False)
    assert (outcome.done, outcome.in_progress) == (LETTERS, 0)
    assert not dlq._closed
    assert not dlq._held


def test_letters_held_back_by_a_count_are_reported(
    millstream: CommandLine, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dead_letter, "BATCH", 5)
    monkeypatch.setattr(dead_letter, "SKIPPED_MAX", 12)
    counted = millstream("dlq", "purge", name, "--dry-run")
    assert (counted.code, counted.out) == (0, f"Would close {LETTERS} letters.\n")
    assert "15 letters that stayed open can be processed by others after a minute" in counted.err
    purged = millstream("dlq", "purge", name, "--json")
    assert purged.document == {"purged": LETTERS - 15, "skipped": 0, "held": 15, "held_back": 0, "uncertain": 0}
    assert "15 letters are held by another command and come back within a minute" in purged.err
    assert open_letters(millstream, name) == 15


async def test_an_interrupted_command_returns_its_leases(server: Server, millstream: CommandLine, name: str) -> None:
    async with Client.connect(server.kafka) as client:
        dlq = DeadLetterClient(client, f"{name}-dead", "interrupted", patience_s=10)
        await dlq.open()
        holds = asyncio.Event()

        async def work() -> None:
            async with dlq.holding():
                async for _ in dlq.letters(lambda: HELD_MAX):
                    holds.set()
                    await asyncio.Event().wait()

        task = asyncio.create_task(work())
        await asyncio.wait_for(holds.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        subscriptions = SubscriptionClient(client)
        again = await subscriptions.receive(f"__dlq/{name}-dead", "next", max_records=LETTERS, wait_ms=60_000)
        assert [letter.attempt for letter in again] == [1] * LETTERS, "no worker has received them"
        await subscriptions.settle(f"__dlq/{name}-dead", "next", again, Verb.RETURN)
    purged = (await asyncio.to_thread(millstream, "dlq", "purge", name, "--json")).document
    assert purged == {"purged": LETTERS, "skipped": 0, "held": 0, "held_back": 0, "uncertain": 0}


def test_a_subscription_on_a_missing_topic_is_reported(millstream: CommandLine) -> None:
    name = "before-its-topic"
    reported = "does not exist yet; its messages are delivered once it is created."
    created = millstream("subscription", "create", name, "--topic", name)
    assert (created.code, created.err) == (0, f"Topic {name} {reported}\n")
    assert millstream("topic", "create", name).code == 0
    again = millstream("subscription", "create", name, "--topic", name, "--if-not-exists")
    assert (again.code, again.err) == (0, "")
