"""A short run of each fuzzer; `make fuzz` runs them for longer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from millstream.core.errors import ProtocolViolation
from millstream.protocol.messages import codec

ROOT = Path(__file__).parents[2]
EXAMPLES = {"fuzz_framing": 40, "fuzz_requests": 2, "fuzz_recovery": 80}


@pytest.mark.parametrize("name", sorted(EXAMPLES))
def test_a_short_run_finds_nothing(name: str) -> None:
    command = [sys.executable, "-m", f"trials.{name}", "--seed", "suite", "--examples", str(EXAMPLES[name])]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


def test_every_fuzzer_is_started() -> None:
    command = [sys.executable, "-m", "trials.fuzz_run", "--seconds", "0"]
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


@pytest.mark.parametrize(("key", "version", "body"), [(23, 3, b"\xff" * 8), (23, 4, b"\xff\xff\xff\xff\x00\x00")])
def test_null_instead_of_a_list_is_refused(key: int, version: int, body: bytes) -> None:
    # Found by the fuzzer of requests: the handler of OffsetForLeaderEpoch was given None for its topics.
    with pytest.raises(ProtocolViolation, match="null"):
        codec.read_request(key, version, body, 0)
