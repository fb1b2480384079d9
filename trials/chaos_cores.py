"""`make chaos-cores`: kill processes of a loaded machine, change its number of cores, check every message.

    python -m trials.chaos_cores [--kills N] [--seed N] [--load messages,transactions,subscriptions] [--keep FOLDER]

Each kind of load has a machine of its own, which starts with three broker processes:

- messages: idempotent producers and a plain one write at full speed, a group reads and commits (`kill_trial.py`);
- transactions: groups of programs consume, transform and produce in transactions (`transaction_trial.py`);
- subscriptions: workers of every promise and door take messages (`subscription_trial.py`).

A broker process, the supervisor or all processes are killed with SIGKILL; after the latter two, as after clean stops,
the machine starts with another number of processes. The exit code is 1, and the seed is printed, when a message was
lost, doubled or out of order, or when the machine did not recover.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from millstream_testing import kill_trial, subscription_trial, transaction_trial
from millstream_testing.machine_server import MachineServer, TrialMachine
from millstream_testing.server import ServerFailed
from millstream_testing.trial_clients import TrialFailed

NODE_KINDS = {"kill": 6, "stop": 1}
GROUPS = ("classic", "consumer")
"""Not aiokafka, which never turns to its bootstrap addresses again when all the brokers that it knows are gone."""
MINUTES_MAX = 60.0


def main() -> int:
    """Run the trials; 0 when nothing was wrong, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m trials.chaos_cores", description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="how many, for each kind of load; the default is 50")
    parser.add_argument("--seed", type=int, help="repeat the random choices of another run")
    parser.add_argument("--load", default=",".join(LOADS), help="only these kinds of load; the default is all of them")
    parser.add_argument("--keep", type=Path, help="leave the data, the logs and the histories in this folder")
    arguments = parser.parse_args()
    seed = random.randrange(2**32) if arguments.seed is None else arguments.seed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="millstream-chaos-cores-") as folder:
        kept = Path(folder) if arguments.keep is None else arguments.keep
        sound = [trial(load, arguments.kills, seed, kept / load) for load in arguments.load.split(",")]
    return int(not all(sound))


def trial(load: str, kills: int, seed: int, folder: Path) -> bool:
    """Run one kind of load in a folder and print the outcome; return whether nothing was wrong."""
    folder.mkdir(parents=True, exist_ok=True)
    print_line(f"{load}: {kills} kills, seed {seed}")
    began = time.monotonic()
    try:
        found = LOADS[load](folder, kills, seed)
    except (TrialFailed, ServerFailed) as error:
        found = f"the trial failed: {error}\n{_log_tails(folder)}"
    if found:
        print_line(f"{found}\n{load}: seed {seed}")
    else:
        print_line(f"{load}: nothing was wrong, {time.monotonic() - began:.0f} s")
    return not found


def _messages(folder: Path, kills: int, seed: int) -> str:
    server = MachineServer(folder, seed=seed)

    def show(line: str) -> None:
        print_line(f"{server.last_kill}, {server.cores} cores: {line}")

    plan = kill_trial.Plan(kills=kills, partitions=6, seed=seed)
    try:
        with kill_trial.KillTrial(server, plan, show) as running:
            outcome = running.run()
            running.save_history(folder / "history.jsonl")
    finally:
        server.end()
    print_line(f"{len(outcome.starts_s)} kills\n{outcome.report}")
    return "" if outcome.report.ok else "BROKEN"


def _transactions(folder: Path, kills: int, seed: int) -> str:
    machine = TrialMachine(folder, seed=seed, settings=transaction_trial.SETTINGS)
    # Programs are killed too, and count.
    plan = transaction_trial.Plan(
        kills=kills,
        seed=seed,
        node_kinds=NODE_KINDS,
        node_share=1.0,
        worker_faults=(0, 1),
        minutes_max=MINUTES_MAX,
        groups=GROUPS,
    )
    with transaction_trial.TransactionTrial(folder, machine, plan, _shown(machine)) as running:
        try:
            outcome = running.run()
        except (TrialFailed, ServerFailed):
            print_line(running.waiting())
            raise
        finally:
            running.save_history(folder / "history.jsonl")
    print_line(f"{outcome.kills} kills, {running.renewed} programs renewed\n{outcome.findings()}")
    return "" if outcome.ok else "BROKEN"


def _subscriptions(folder: Path, kills: int, seed: int) -> str:
    machine = TrialMachine(folder, seed=seed, settings=subscription_trial.SETTINGS)
    plan = subscription_trial.Plan(seed=seed, faults=kills, node_kinds=NODE_KINDS, minutes_max=MINUTES_MAX)
    with machine:
        outcome = asyncio.run(subscription_trial.SubscriptionTrial(folder, machine, plan, _shown(machine)).run())
    print_line(outcome.account)
    return "\n".join(f"BROKEN {finding}" for finding in outcome.findings)


def _shown(machine: TrialMachine) -> Callable[[str], None]:
    def show(line: str) -> None:
        print_line(f"[{machine.server.last_kill}, now {machine.server.cores} cores] {line}")

    return show


def _log_tails(folder: Path) -> str:
    return "\n".join(log.read_bytes()[-4000:].decode(errors="replace") for log in folder.glob("node-*.log"))


LOADS: Mapping[str, Callable[[Path, int, int], str]] = {
    "messages": _messages,
    "transactions": _transactions,
    "subscriptions": _subscriptions,
}


def print_line(line: str) -> None:
    """Say something with the time."""
    print(time.strftime("%H:%M:%S ") + line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
