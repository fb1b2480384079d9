"""The README's tour is run as it is written: every command, in order, in a folder of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from millstream.testing.server import Server

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"^```(sh|python) tour ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEFAULT_KAFKA, DEFAULT_HTTP = "127.0.0.1:9092", "127.0.0.1:8080"
COMMAND_S_MAX = 60.0


class Step(NamedTuple):
    """One command of the tour, or one file that the reader is asked to save."""

    language: str
    name: str
    text: str


def steps() -> Iterator[Step]:
    for language, name, text in BLOCK.findall(README.read_text(encoding="utf-8")):
        if language == "python":
            yield Step(language, name, text)
        else:
            yield from (Step("sh", "", line) for line in text.splitlines())


@pytest.fixture
def environment(server: Server, tmp_path: Path) -> dict[str, str]:
    """The reader's terminal: `millstream` and `python` are on the path, and the node runs elsewhere than by default."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, words in (("millstream", "-m millstream.cli.main "), ("python", "")):
        script = commands / name
        script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
        script.chmod(0o755)
    return {**os.environ, "PATH": f"{commands}:{os.environ['PATH']}", "MILLSTREAM_BROKERS": server.kafka}


def test_the_tour_works_as_written(server: Server, tmp_path: Path, environment: dict[str, str]) -> None:
    said: list[str] = []
    for step in steps():
        text = step.text.replace(DEFAULT_KAFKA, server.kafka).replace(DEFAULT_HTTP, server.http)
        if step.language == "python":
            (tmp_path / step.name).write_text(text)
            text = f"python {step.name}"
        if text == "millstream serve" or (text.startswith("curl") and shutil.which("curl") is None):
            continue
        ended = subprocess.run(
            ["sh", "-c", text],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S_MAX,
            check=False,
        )
        assert ended.returncode == 0, f"{text}\n{ended.stdout}\n{ended.stderr}"
        said.append(ended.stdout)
    everything = "\n".join(said)
    for expected in (
        "Created topic orders with 3 partitions.",
        '"order_id": 1',
        "b'customer-9' b'{\"order_id\": 3}'",
        "billing  (Empty, 0 members, 0 messages behind)",
        "Moved group billing in 3 partitions.",
        "Created subscription shipping on orders.",
        "shipping: no such address (attempts: 1)",
        "Redrove 1 letter to orders (1).",
        "Nothing is wrong.",
    ):
        assert expected in everything


def test_the_tour_starts_a_node_and_shows_every_kind_of_command() -> None:
    commands = " ".join(step.text for step in steps())
    for command in ("serve", "topic create", "publish", "tail", "group describe", "group reset", "doctor"):
        assert f"millstream {command}" in commands
    assert "confluent_kafka" in commands
