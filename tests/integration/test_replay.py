"""`millstream replay` on a real broker: the messages, their order, and how a killed replay is resumed."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from millstream.core.errors import InvalidRequest, NotFound
from millstream.pipelines.jobs.replay import Progress, Replay, ReplayOrder, add_headers
from millstream_testing.command import CommandLine
from millstream_testing.committed_messages import Committed, committed_records
from millstream_testing.server import Server

WAIT_S = 60.0
KEYS = 7
KILLS = 5
MILLSTREAM = (sys.executable, "-m", "millstream.cli.main")

Headers = st.lists(st.tuples(st.sampled_from(["a", "message-id"]), st.none() | st.binary(max_size=3)), max_size=3)


@given(st.lists(st.none() | Headers, max_size=5))
def test_headers_are_kept_and_origin_and_a_missing_id_are_added(given_headers: list[Any]) -> None:
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    header_lists = [
        None if header is None else [{"key": key, "value": value} for key, value in header] for header in given_headers
    ]
    names = [f"{at}".encode() for at in range(len(header_lists))]
    added = add_headers(
        pa.array(header_lists, kind), pa.array(names, pa.binary()), pa.array(names, pa.binary())
    ).to_pylist()
    for at, (before, after) in enumerate(zip(given_headers, added, strict=True)):
        name = f"{at}".encode()
        expected = [*(before or []), ("replayed-from", name)]
        if not any(key == "message-id" and value for key, value in before or []):
            expected.append(("message-id", name))
        assert [(message["key"], message["value"]) for message in after] == expected


@pytest.fixture
def topics(server: Server, topic: str) -> tuple[str, str]:
    millstream = CommandLine(server.kafka)
    assert millstream("topic", "create", topic, "--partitions", "3").code == 0
    assert millstream("topic", "create", f"{topic}-again", "--partitions", "2").code == 0
    producer = Producer({"bootstrap.servers": server.kafka})
    now_ms = int(time.time() * 1000)
    for number in range(3000):
        # Of two days, unordered.
        sent_ms = now_ms - number * 7919 % 48 * 3_600_000
        headers: list[tuple[str, str | bytes | None]] = [("h", str(number))]
        producer.produce(topic, f'{{"n": {number}}}', str(number % KEYS), headers=headers, timestamp=sent_ms)
    assert producer.flush(WAIT_S) == 0
    return topic, f"{topic}-again"


def check(server: Server, topics: tuple[str, str], numbers: list[int]) -> None:
    """Check that exactly these messages arrived, in key order, with their origin."""
    source = {
        f"{topics[0]}/{record.partition}/{record.offset}": record
        for record in committed_records(server.kafka, topics[0])
    }
    arrived = committed_records(server.kafka, topics[1])
    seen: dict[bytes | None, list[int]] = {}
    for record in arrived:
        seen.setdefault(record.key, []).append(number_of(record))
        headers = dict(record.headers)
        original = source[(headers["replayed-from"] or b"").decode()]
        assert (original.key, original.value, original.timestamp_ms) == (record.key, record.value, record.timestamp_ms)
        assert (headers["message-id"] or b"").decode().endswith(f"/{original.partition}/{original.offset}")
        assert headers["h"] == str(number_of(record)).encode()
    assert sorted(number_of(record) for record in arrived) == numbers
    assert all(numbers == sorted(numbers) for numbers in seen.values())


def number_of(record: Committed) -> int:
    return int((record.value or b"").split(b":")[1].rstrip(b"}"))


def test_an_interrupted_replay_resumes_and_publishes_everything_once(
    server: Server, topics: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millstream.pipelines.jobs.replay.STEP_MESSAGES", 400)
    order = ReplayOrder(topic=topics[0], into=topics[1], where="payload.n >= 100")
    counted = Replay(order, server.kafka).run(dry=True)
    assert (counted.examined, counted.written) == (3000, 2900)

    def interrupt(at: Progress) -> None:
        if at.examined >= 1000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Replay(order, server.kafka).run(interrupt)
    # Messages published meanwhile are not part of it.
    producer = Producer({"bootstrap.servers": server.kafka})
    producer.produce(topics[0], '{"n": 5000}', "0", headers=[("h", "5000")])
    assert producer.flush(WAIT_S) == 0
    done = Replay(order, server.kafka).run()
    assert 0 < done.examined < 2100
    assert Replay(order, server.kafka).run() == Progress(0, 0, 0)
    check(server, topics, list(range(100, 3000)))


def end_of(brokers: str, topic: str) -> int:
    """Return the sum of the end offsets; a topic that is being written to has no end that a consumer could reach."""
    consumer = Consumer({"bootstrap.servers": brokers, "group.id": "unused", "log_level": 0})
    try:
        numbers = consumer.list_topics(topic, timeout=WAIT_S).topics[topic].partitions
        return sum(
            consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=WAIT_S)[1] for number in numbers
        )
    finally:
        consumer.close()


@pytest.mark.trial
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("source", "partition_by"), [("--from-topic", ""), ("--from-table", ""), ("--from-table", "hour(timestamp)")]
)
def test_a_repeatedly_killed_replay_publishes_everything_once(
    server: Server, topics: tuple[str, str], tmp_path: Path, source: str, partition_by: str
) -> None:
    millstream = CommandLine(server.kafka)
    if source == "--from-table":
        name = f"land-{topics[0]}"
        create = ["pipeline", "create", "land", name, "--topic", topics[0], "--lake", str(tmp_path), "--stopped"]
        assert millstream(*create, *(["--partition-by", partition_by] if partition_by else [])).code == 0
        subprocess.run([*MILLSTREAM, "pipeline", "run", name, "--once", "--brokers", server.kafka], check=True)
    command = [*MILLSTREAM, "replay", source, topics[0], "--into", topics[1]]
    command += ["--rate", "400/s", "--brokers", server.kafka, "--name", uuid.uuid4().hex]
    kills = 0
    while kills < KILLS:
        before = end_of(server.kafka, topics[1])
        with subprocess.Popen(command) as process:
            # The machine may be slow, so a process is killed once it has made progress.
            while process.poll() is None and end_of(server.kafka, topics[1]) == before:
                time.sleep(0.2)
            time.sleep(random.random())
            process.kill()
            ended = process.wait()
        assert ended in (0, -signal.SIGKILL)
        if ended == 0:
            break
        kills += 1
    assert kills
    assert subprocess.run(command, check=False).returncode == 0
    check(server, topics, list(range(3000)))


def test_an_invalid_replay_is_refused(server: Server, topics: tuple[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="into the same topic"):
        Replay(ReplayOrder(topic=topics[0], into=topics[0]), server.kafka)
    with pytest.raises(NotFound, match="does not exist"):
        Replay(ReplayOrder(topic=topics[0], into=f"{topics[0]}-none"), server.kafka).run()
    with pytest.raises(NotFound, match="no pipeline lands"):
        Replay(ReplayOrder(topic=topics[0], into=topics[1], from_table=True), server.kafka).run()
    millstream = CommandLine(server.kafka)
    given_time = ("replay", "--from-topic", topics[0], "--into", topics[1], "--since")
    assert "would change when the replay resumes" in millstream(*given_time, "7d").err
    assert "must be a time such as" in millstream(*given_time, "start").err
    neither = millstream("replay", "--into", topics[1])
    assert "either --from-topic or --from-table" in neither.err
    wrong = millstream("replay", "--from-topic", topics[0], "--into", topics[1], "--where", "payload.n >")
    assert wrong.code == 2, wrong.err


def test_damage_is_reported_with_flags_of_the_command(start_server: Callable[..., Server]) -> None:
    server = start_server()
    millstream = CommandLine(server.kafka)
    created = [millstream("topic", "create", name, "--json").document for name in ("harmed", "again")]
    millstream("publish", "harmed", "x" * 1000)
    server.stop()
    (segment,) = (server.data / "partitions" / created[0]["id"] / "0").glob("*.log")
    with segment.open("r+b") as file:
        file.seek(200)
        file.write(b"\xff\xff\xff")
    server.start()
    command = [*MILLSTREAM, "replay", "--from-topic", "harmed", "--into", "again", "--dry-run"]
    refused = subprocess.run([*command, "--brokers", server.kafka], capture_output=True, text=True, timeout=WAIT_S)
    assert refused.returncode == 1
    assert "harmed-0: offsets 0 to 0 cannot be read" in refused.stderr
    assert "failOn" not in refused.stderr
    assert "--from-table harmed" in refused.stderr
