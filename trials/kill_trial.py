"""`make kill-trial`: kill a loaded broker 20 times in a row and check every acknowledged message.

python -m trials.kill_trial [--kills N] [--seed N] [--keep FOLDER]
"""

from __future__ import annotations

import sys
from pathlib import Path

from trials.command_line import seed_of, trial_folder, trial_parser

from millstream_testing.kill_trial import KillTrial, Plan
from millstream_testing.server import Server, ServerFailed
from millstream_testing.trial_clients import TrialFailed


def main() -> int:
    """Run the trial; return 0 if it passed, 1 otherwise."""
    parser = trial_parser("kill_trial", __doc__)
    parser.add_argument("--kills", type=int, default=20)
    arguments = parser.parse_args()
    plan = Plan(kills=arguments.kills)
    plan.seed = seed_of(arguments)
    print(f"{plan.kills} kills, {plan.producers} idempotent producers and a plain one, seed {plan.seed}", flush=True)
    with trial_folder(arguments) as folder:
        return trial(plan, folder)


def trial(plan: Plan, folder: Path) -> int:
    """Run in a folder and print the outcome."""
    server = Server(folder / "data")
    try:
        with KillTrial(server, plan, lambda line: print(line, flush=True)) as running:
            outcome = running.run()
            running.load.save_history(folder / "history.jsonl")
    except (TrialFailed, ServerFailed) as error:
        print(f"the trial failed: {error}\n{server.log_tail()}", file=sys.stderr)
        return 1
    slowest = max(outcome.starts_s, default=0.0)
    print(f"{len(outcome.starts_s)} kills, slowest start after one: {slowest:.2f} s\n{outcome.report}")
    return 0 if outcome.report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
