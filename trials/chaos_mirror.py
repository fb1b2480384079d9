"""`make chaos-mirror`: two sites mirror each other through kills, cut links, failover, reverse and switch.

    python -m trials.chaos_mirror [--rounds N] [--faults N] [--nodes N] [--delay-ms MS] [--loss SHARE] [--seed S]
        [--keep FOLDER]

The trial and its checks are `src/millstream_testing/mirror_trial.py`. The exit code is 1, and the seed is printed, when
a guarantee was violated.
"""

from __future__ import annotations

import sys

from trials.command_line import print_line, seed_of, trial_folder, trial_parser

from millstream_testing.mirror_trial import Link, MirrorTrial


def main() -> int:
    """Run the trial; return 0 if it passed, 1 otherwise."""
    parser = trial_parser("chaos_mirror", __doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--faults", type=int, default=20, help="faults in each round before the failover")
    parser.add_argument(
        "--nodes", type=int, default=1, help="the number of nodes of each site; more than one form a cluster"
    )
    parser.add_argument("--loss", type=float, default=0.01, help="the share of the data that is retransmitted")
    parser.add_argument("--delay-ms", type=float, default=25.0, help="the delay of the link in each direction")
    arguments = parser.parse_args()
    seed = seed_of(arguments)
    print_line(f"seed {seed}")
    failed = 0
    with trial_folder(arguments) as folder:
        for number in range(arguments.rounds):
            trial = MirrorTrial(
                folder / f"round-{number + 1}",
                seed=seed + number,
                faults=arguments.faults,
                link=Link(arguments.nodes, arguments.delay_ms / 1000, arguments.loss),
                print_line=lambda text: print_line(f"  {text}"),
            )
            try:
                trial.run()
            finally:
                trial.close()
            for violation in trial.violations:
                print_line(f"VIOLATION: {violation}")
            failed += bool(trial.violations)
            faults = ", ".join(f"{count} × {kind}" for kind, count in sorted(trial.faults.items()))
            result = "failed" if trial.violations else "passed"
            print_line(f"round {number + 1}: {result} (seed {seed + number}; {trial.faults.total()} faults: {faults})")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
