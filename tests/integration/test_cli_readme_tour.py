"""The README's tour is run as it is written: every command, in order, in a folder of its own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Self

import pytest

from millstream.cli.held_port import HeldPort
from millstream.testing.command import TIMEOUT_VARIABLE
from millstream.testing.server import Server

README = Path(__file__).parents[2] / "README.md"
BLOCK = re.compile(r"^```(sh|python) tour ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEFAULT_KAFKA, DEFAULT_HTTP, DEFAULT_WEBHOOK = "127.0.0.1:9092", "127.0.0.1:8080", "8090"
COMMAND_S_MAX = 120.0
BESIDE = "beside"

# A reader types more slowly than this happens; a test has to wait until the programs beside it have said so.
WAITS_FOR = {
    "millstream publish": ("billed 1", "shipped 1 to Ghent", '"order_id": 1'),
    "printf": ("shipped 2 to Lyon", '"order_id": 3'),
    "millstream dlq redrive": ("shipped 3 to nowhere",),
    "curl -s http://127.0.0.1:8080/v1": ("billed 4", "shipped 4 to Oslo"),
}
SAYS = {
    "millstream topic create": "Created topic orders with 3 partitions.",
    "millstream subscription create billing": "Created subscription billing on orders.",
    "millstream dlq show": "KeyError",
    "millstream dlq redrive": "Redrove 1 letter to orders (1).",
    "millstream tail orders": "customer-9",
    "python analysis.py": "b'customer-9'",
    "millstream group describe": "analysis  (Empty, 0 members, 0 messages behind)",
    "millstream group reset": "Moved group analysis in 3 partitions.",
    # On a machine that is busy it also says so.
    "millstream doctor": "",
}


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
            yield from (Step("sh", name, line) for line in text.splitlines())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The node of the tour, which may push to this machine."""
    settings = {"group-initial-delay-ms": 100, "push-private-addresses": "true"}
    with Server(tmp_path_factory.mktemp("tour") / "data", settings=settings) as started:
        yield started


class Terminals:
    """Where the reader types: one command after the other, and programs in terminals beside it."""

    def __init__(self, folder: Path, server: Server) -> None:
        self.folder = folder
        self._beside: dict[str, subprocess.Popen[bytes]] = {}
        self._said = folder / "beside.txt"
        self._said.touch()
        self._held = HeldPort()
        webhook = str(self._held.number)
        self._instead = {DEFAULT_KAFKA: server.kafka, DEFAULT_HTTP: server.http, DEFAULT_WEBHOOK: webhook}
        commands = folder / "bin"
        commands.mkdir()
        for name, words in (("millstream", "-m millstream.cli.main "), ("python", "")):
            script = commands / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words}"$@"\n')
            script.chmod(0o755)
        self._environment = {
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "MILLSTREAM_BROKERS": server.kafka,
            TIMEOUT_VARIABLE: str(COMMAND_S_MAX / 2),
        }

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for process in self._beside.values():
            process.kill()
            process.wait()

    def save(self, name: str, text: str) -> None:
        (self.folder / name).write_text(self._here(text))

    def start_beside(self, command: str) -> None:
        """Start a program; if it runs already, it is ended first with Ctrl-C, as the reader is told to."""
        if command in self._beside:
            self._beside[command].send_signal(signal.SIGINT)
            assert self._beside[command].wait(COMMAND_S_MAX) == 0
        with self._said.open("ab") as said:
            self._beside[command] = subprocess.Popen(
                ["sh", "-c", f"exec {command}"], cwd=self.folder, env=self._environment, stdout=said, stderr=said
            )
        if "webhook" in command:
            self._wait_until_listening(self._beside[command])

    def run(self, command: str) -> str:
        ended = subprocess.run(
            ["sh", "-c", self._here(command)],
            cwd=self.folder,
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_S_MAX,
            check=False,
        )
        assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}\n{self._said.read_text()}"
        return ended.stdout

    def run_until(self, command: str, expected: str) -> str:
        """Run a command, and again if what it should show has not happened yet."""
        deadline = time.monotonic() + COMMAND_S_MAX
        while expected not in (said := self.run(command)):
            assert time.monotonic() < deadline, f"{command}: {said}\n{self._said.read_text()}"
        return said

    def _wait_until_listening(self, process: subprocess.Popen[bytes]) -> None:
        """A reader types more slowly than a program starts; what is pushed before is pushed again only later."""
        address = ("127.0.0.1", int(self._instead[DEFAULT_WEBHOOK]))
        deadline = time.monotonic() + COMMAND_S_MAX
        while True:
            try:
                socket.create_connection(address, COMMAND_S_MAX).close()
            except OSError:
                assert process.poll() is None, self._said.read_text()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            else:
                return

    def wait_for(self, words: str) -> None:
        deadline = time.monotonic() + COMMAND_S_MAX
        while words not in self._said.read_text():
            assert time.monotonic() < deadline, f"{words!r} did not come: {self._said.read_text()}"
            time.sleep(0.05)

    def _here(self, text: str) -> str:
        for usual, here in self._instead.items():
            text = text.replace(usual, here)
        return text


@pytest.mark.timeout(500)
def test_the_tour_works_as_written(server: Server, tmp_path: Path) -> None:
    with Terminals(tmp_path, server) as terminals:
        for step in steps():
            if step.language == "python":
                terminals.save(step.name, step.text)
            elif step.name == BESIDE:
                terminals.start_beside(step.text)
            elif not step.text.startswith("millstream serve") and not (
                step.text.startswith("curl") and shutil.which("curl") is None
            ):
                take(terminals, step.text)


def take(terminals: Terminals, command: str) -> None:
    said = next((words for start, words in SAYS.items() if command.startswith(start)), "")
    if "dlq show" in command:
        terminals.run_until(command, said)
    else:
        assert said in terminals.run(command)
    for start, expected in WAITS_FOR.items():
        if command.startswith(start):
            for words in expected:
                terminals.wait_for(words)


def test_the_tour_starts_a_node_and_shows_every_kind_of_command() -> None:
    commands = " ".join(step.text for step in steps())
    for command in (
        "serve",
        "topic create",
        "publish",
        "tail",
        "group describe",
        "group reset",
        "dlq redrive",
        "doctor",
    ):
        assert f"millstream {command}" in commands
    for words in ("confluent_kafka", "millstream.connect", "--push", "/v1/topics"):
        assert words in commands
    for start in (*SAYS, *WAITS_FOR):
        assert any(step.text.startswith(start) for step in steps()), start
