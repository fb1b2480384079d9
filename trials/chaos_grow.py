"""`make chaos-grow`: a loaded machine becomes a cluster, its partitions are replicated and moved, under kills.

    python -m trials.chaos_grow [--kills N] [--seed N] [--keep FOLDER]

The trial and its checks are `src/millstream_testing/grow_trial.py`. The exit code is 1, and the seed is printed, when a
message was lost, duplicated, out of order or accepted twice, when replicas differ, or when a step did not complete.
"""

from __future__ import annotations

import sys
from pathlib import Path

from trials.command_line import print_line, seed_of, trial_folder, trial_parser

from millstream_testing.grow_trial import GrowTrial, Plan
from millstream_testing.server import ServerFailed
from millstream_testing.trial_clients import TrialFailed


def main() -> int:
    """Run the trial; return 0 if it passed, 1 otherwise."""
    parser = trial_parser("chaos_grow", __doc__)
    parser.add_argument(
        "--kills", type=int, default=3, help="the number of node kills while each plan is applied (default: 3)"
    )
    arguments = parser.parse_args()
    plan = Plan(kills_per_step=arguments.kills)
    plan.seed = seed_of(arguments)
    with trial_folder(arguments) as folder:
        return trial(plan, folder)


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


if __name__ == "__main__":
    sys.exit(main())
