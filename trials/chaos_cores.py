"""`make chaos-cores`: kill processes of a loaded machine, change its number of cores, check every message.

python -m trials.chaos_cores [--kills N] [--seed N] [--keep FOLDER]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from millstream_testing.kill_trial import KillTrial, Plan
from millstream_testing.machine_server import MachineServer
from millstream_testing.server import ServerFailed
from millstream_testing.trial_clients import TrialFailed


def main() -> int:
    """Run the trial; 0 when nothing was wrong, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m trials.chaos_cores", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, help="repeat the random choices of another run")
    parser.add_argument("--keep", type=Path, help="leave the data, the log and the history in this folder")
    arguments = parser.parse_args()
    plan = Plan(kills=arguments.kills, partitions=6)
    if arguments.seed is not None:
        plan.seed = arguments.seed
    print(f"{plan.kills} kills, {plan.producers} idempotent producers and a plain one, seed {plan.seed}", flush=True)
    if arguments.keep is not None:
        return trial(plan, arguments.keep)
    with tempfile.TemporaryDirectory(prefix="millstream-chaos-cores-") as folder:
        return trial(plan, Path(folder))


def trial(plan: Plan, folder: Path) -> int:
    """Run in a folder and print the outcome."""
    folder.mkdir(parents=True, exist_ok=True)
    server = MachineServer(folder / "data", seed=plan.seed)

    def show(line: str) -> None:
        print(f"{server.last_kill}, {server.cores} cores: {line}", flush=True)

    try:
        with KillTrial(server, plan, show) as running:
            outcome = running.run()
            running.save_history(folder / "history.jsonl")
    except (TrialFailed, ServerFailed) as error:
        print(f"the trial failed: {error}\n{server.log_tail()}", file=sys.stderr)
        return 1
    finally:
        server.end()
    print(f"{len(outcome.starts_s)} kills\n{outcome.report}")
    return 0 if outcome.report.ok else 1


if __name__ == "__main__":
    sys.exit(main())
