"""A short run of the fuzzer, with numba's bounds check on; `make fuzz` runs it for longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_any_bytes_give_records_or_a_clear_error() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    result = subprocess.run(
        [sys.executable, "-m", "trials.fuzz_codec", "--seed", "suite", "--examples", "1200", "--seconds", "60"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "none of them a finding" in result.stdout
