"""`make kill-trial`: kill a loaded broker 20 times in a row and check every acknowledged message.

python -m trials.kill_trial [--kills N] [--seed N] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from millstream_testing.kill_trial import KillTrial, Plan
from millstream_testing.server import Server, ServerFailed
from millstream_testing.trial_clients import TrialFailed


def main() -> int:
    """Run the trial; return 0 if it passed, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m trials.kill_trial", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, help="repeat the random choices of an earlier run")
    parser.add_argument("--keep", type=Path, help="keep the data, the broker's log and the history in this folder")
    arguments = parser.parse_args()
    plan = Plan(kills=arguments.kills)
    if arguments.seed is not None:
        plan.seed = arguments.seed
    print(f"{plan.kills} kills, {plan.producers} idempotent producers and a plain one, seed {plan.seed}", flush=True)
    if arguments.keep is not None:
        return trial(plan, arguments.keep)
    with tempfile.TemporaryDirectory(prefix="millstream-kill-trial-") as folder:
        return trial(plan, Path(folder))


def trial(plan: Plan, folder: Path) -> int:
    """Run in a folder and print the outcome."""
    folder.mkdir(parents=True, exist_ok=True)
    server = Server(folder / "data")
    try:
        with KillTrial(server, plan, lambda line: print(line, flush=True)) as running:
            outcome = running.run()
            running.save_history(folder / "history.jsonl")
    except (TrialFailed, ServerFailed) as error:
        print(f"the trial failed: {error}\n{server.log_tail()}", file=sys.stderr)
        return 1
    slowest = max(outcome.starts_s, default=0.0)
    print(f"{len(outcome.starts_s)} kills, slowest start after one: {slowest:.2f} s\n{outcome.report}")
    return 0 if outcome.report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
