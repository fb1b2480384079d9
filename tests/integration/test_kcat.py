"""kcat, the command-line client that many people try first."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from millstream_testing.server import Server

pytestmark = pytest.mark.skipif(shutil.which("kcat") is None, reason="kcat is not installed on this machine")


def kcat(server: Server, *arguments: str, stdin: str = "") -> str:
    done = subprocess.run(
        ["kcat", "-b", server.kafka, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_produce_consume_and_list(server: Server, topic: str) -> None:
    lines = "".join(f"key{number}:value {number}\n" for number in range(100))
    kcat(server, "-P", "-t", topic, "-K:", stdin=lines)
    assert kcat(server, "-C", "-t", topic, "-o", "beginning", "-e", "-q", "-K:") == lines
    document = json.loads(kcat(server, "-L", "-J"))
    assert topic in [topic["topic"] for topic in document["topics"]]
    assert [broker["name"] for broker in document["brokers"]] == [server.kafka]


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_every_compression(server: Server, topic: str, codec: str) -> None:
    lines = "".join(f"value {number}\n" for number in range(1000))
    kcat(server, "-P", "-t", topic, "-z", codec, stdin=lines)
    assert kcat(server, "-C", "-t", topic, "-e", "-q", "-X", "check.crcs=true") == lines


def test_from_an_offset_a_time_and_the_end(server: Server, topic: str) -> None:
    kcat(server, "-P", "-t", topic, stdin="a\nb\nc\n")
    assert kcat(server, "-C", "-t", topic, "-o", "1", "-e", "-q") == "b\nc\n"
    assert kcat(server, "-C", "-t", topic, "-o", "-1", "-e", "-q") == "c\n"
    assert kcat(server, "-C", "-t", topic, "-o", "s@0", "-e", "-q") == "a\nb\nc\n"
    assert kcat(server, "-C", "-t", topic, "-o", "end", "-e", "-q") == ""
    assert kcat(server, "-Q", "-t", f"{topic}:0:0").split() == [topic, "[0]", "offset", "0"]


def test_headers_and_an_idempotent_producer(server: Server, topic: str) -> None:
    kcat(server, "-P", "-t", topic, "-H", "a=1", "-H", "b=2", "-X", "enable.idempotence=true", stdin="x\n")
    assert kcat(server, "-C", "-t", topic, "-e", "-q", "-f", "%h %s %o\n") == "a=1,b=2 x 0\n"


def test_a_balanced_consumer(server: Server, topic: str) -> None:
    kcat(server, "-P", "-t", topic, stdin="a\nb\nc\n")
    group = f"{topic}-group"
    earliest = ["-X", "auto.offset.reset=earliest", "-q"]
    assert kcat(server, "-G", group, "-c", "3", *earliest, topic).splitlines() == ["a", "b", "c"]
