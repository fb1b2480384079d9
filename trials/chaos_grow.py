"""`make chaos-grow`: a loaded machine becomes a cluster, its partitions are replicated and moved, under kills.

    python -m trials.chaos_grow [--kills N] [--seed N] [--keep FOLDER]

The trial and its checks are `src/millstream_testing/grow_trial.py`. The exit code is 1, and the seed is printed, when a
message was lost, duplicated, out of order or accepted twice, when replicas differ, or when a step did not complete.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from pathlib import Path

from millstream_testing.grow_trial import GrowTrial, Plan
from millstream_testing.server import ServerFailed
from millstream_testing.trial_clients import TrialFailed


def main() -> int:
    """Run the trial; return 0 if it passed, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m trials.chaos_grow", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--kills", type=int, default=3, help="the number of node kills while each plan is applied (default: 3)"
    )
    parser.add_argument("--seed", type=int, help="repeat the random choices of an earlier run")
    parser.add_argument("--keep", type=Path, help="keep the data and the logs in this folder")
    arguments = parser.parse_args()
    plan = Plan(kills_per_step=arguments.kills)
    if arguments.seed is not None:
        plan.seed = arguments.seed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="millstream-chaos-grow-") as folder:
        return trial(plan, Path(folder) if arguments.keep is None else arguments.keep)


def trial(plan: Plan, folder: Path) -> int:
    """Run in a folder and print the outcome."""
    print_line(f"seed {plan.seed}")
    running = GrowTrial(folder, plan, print_line)
    with running:
        try:
            findings = running.run()
        except (TrialFailed, ServerFailed) as error:
            print_line(f"{running.log_tails()}\nthe trial failed: {error}\nseed {plan.seed}")
            return 1
    for finding in findings:
        print_line(f"VIOLATION {finding}")
    print_line(f"{running.kills} kills: {f'seed {plan.seed}' if findings else 'passed'}")
    return int(bool(findings))


def print_line(line: str) -> None:
    """Print a line with the time."""
    print(time.strftime("%H:%M:%S ") + line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
