"""Run every fuzzer in turn; the exit code is 1 if one of them found something.

python -m trials.fuzz_run --seconds 60
"""

from __future__ import annotations

import argparse
import subprocess
import sys

FUZZERS = ("fuzz_framing", "fuzz_requests", "fuzz_recovery", "fuzz_codec")


def main() -> int:
    """Run each fuzzer with the same duration and seed."""
    parser = argparse.ArgumentParser(prog="trials.fuzz_run", description="Run every fuzzer.")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long each fuzzer runs (default: 60)")
    parser.add_argument("--seed", default="millstream", help="any text; the same text produces the same examples")
    options = parser.parse_args()
    failures = 0
    for name in FUZZERS:
        command = [sys.executable, "-m", f"trials.{name}", "--seconds", str(options.seconds), "--seed", options.seed]
        failures += subprocess.run(command).returncode != 0
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
