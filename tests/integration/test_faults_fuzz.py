"""A short run of each fuzzer; `make fuzz` runs them for longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from trials import fuzz_run

from millstream.core.errors import ProtocolViolation
from millstream.protocol.messages import codec

ROOT = Path(__file__).parents[2]
EXAMPLES = {"fuzz_framing": 40, "fuzz_requests": 2, "fuzz_recovery": 80}


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_a_short_run_finds_nothing(name: str) -> None:
    command = [sys.executable, "-m", f"trials.{name}", "--seconds", "60", "--seed", "suite"]
    outcome = subprocess.run([*command, "--examples", str(EXAMPLES[name])], cwd=ROOT, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_every_fuzzer_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []

    def run(command: list[str]) -> subprocess.CompletedProcess[str]:
        started.append(command[2])
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["fuzz_run"])
    assert fuzz_run.main() == 0
    assert {f"trials.{name}" for name in (*EXAMPLES, "fuzz_codec")} == set(started)


@pytest.mark.parametrize(("key", "version", "body"), [(23, 3, b"\xff" * 8), (23, 4, b"\xff\xff\xff\xff\x00\x00")])
def test_null_instead_of_a_list_is_refused(key: int, version: int, body: bytes) -> None:
    # Found by the fuzzer of requests: the handler of OffsetForLeaderEpoch was given None for its topics.
    with pytest.raises(ProtocolViolation, match="null"):
        codec.read_request(key, version, body, 0)
