"""`make chaos-cores`: kill processes of a loaded machine, change its number of cores, check every message.

    python -m trials.chaos_cores [--kills N] [--seed N] [--load messages,transactions,subscriptions] [--keep FOLDER]

One machine, which starts with three broker processes, has all of these loads at once:

- messages: idempotent producers and a plain one write, a group reads and commits (`kill_trial.py`);
- transactions: groups of programs consume, transform and produce in transactions (`transaction_trial.py`);
- subscriptions: workers with every delivery mode and client process messages (`subscription_trial.py`).

In each round every load waits until it has recovered from the last kill. Then a broker process, the supervisor or all
processes are killed with SIGKILL, and the machine starts with another number of processes after the latter two; some
rounds add a clean stop and a start with yet another number. The exit code is 1, and the seed is printed, when a message
was lost, duplicated or out of order, or when the machine did not recover.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trials.command_line import print_line, seed_of, trial_folder, trial_parser

from millstream_testing import kill_trial, subscription_trial, transaction_trial
from millstream_testing.machine_server import TrialMachine
from millstream_testing.server import ServerFailed
from millstream_testing.trial_clients import TrialFailed

MESSAGES_PER_S = 60
"""The rate of each producer, low enough to leave a small machine room for the other loads."""
LEASE_S = 0.5
"""The duration of an outage after a kill is drawn from this."""
AIOKAFKA_IDLE_S_MAX = 10.0
"""When all known brokers are gone, aiokafka never uses its bootstrap addresses again, even if brokers return there with
another number of cores; its programs are then restarted."""
HEAL_S_MAX = 300.0
"""How long programs may take to catch up: on a machine that is busy with other work, each transaction takes seconds."""
MINUTES_MAX = 120.0


def main() -> int:
    """Run the trial; return 0 if it passed, 1 otherwise."""
    parser = trial_parser("chaos_cores", __doc__)
    parser.add_argument("--kills", type=int, default=50, help="the number of kills (default: 50)")
    parser.add_argument("--load", default=",".join(LOADS), help="the kinds of load (default: all)")
    arguments = parser.parse_args()
    seed = seed_of(arguments)
    with trial_folder(arguments) as folder:
        # Without waiting for the threads: all processes of the trial end with this one.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
        passed = trial(arguments.load.split(","), arguments.kills, seed, folder)
    return int(not passed)


def trial(loads: list[str], kills: int, seed: int, folder: Path) -> bool:
    """Run loads on one machine and print the outcome; return whether they passed."""
    print_line(f"{', '.join(loads)}: {kills} kills, seed {seed}")
    began = time.monotonic()
    machine = TrialMachine(folder, seed=seed, settings={**transaction_trial.SETTINGS, **subscription_trial.SETTINGS})
    server = machine.server

    def run(load: str) -> bool:
        own = folder / load
        own.mkdir(parents=True, exist_ok=True)

        def show(line: str) -> None:
            print_line(f"[{server.kills} kills, last {server.last_kill}, now {server.cores} cores] {load}: {line}")

        try:
            outcome = LOADS[load](own, machine, kills, seed, show)
        except (TrialFailed, ServerFailed) as error:
            outcome = f"the trial failed: {error}"
        except BaseException:
            server.abandon()
            raise
        print_line(f"{load}: {outcome or 'passed'}")
        if outcome:
            server.abandon()
        return not outcome

    with machine, ThreadPoolExecutor(len(loads)) as threads:
        server.share(len(loads))
        passed = all(list(threads.map(run, loads)))
        server.share(1)
    took = f"{server.kills} kills and {server.clean_stops} clean stops in {time.monotonic() - began:.0f} s"
    if passed:
        print_line(f"passed: {took}, seed {seed}")
    else:
        print_line(f"FAILED: {took}, seed {seed}; the log of the machine ends with:\n{server.log_tail()}")
    return passed


Show = Callable[[str], None]


def _messages(folder: Path, machine: TrialMachine, kills: int, seed: int, show: Show) -> str:
    plan = kill_trial.Plan(kills=kills, partitions=6, messages_per_s=MESSAGES_PER_S, steady=True, seed=seed)
    running = kill_trial.KillTrial(machine.server, plan, show)
    running.prepare()
    try:
        outcome = running.run()
    finally:
        running.load.end()
        running.load.save_history(folder / "history.jsonl")
    show(f"{outcome.report}")
    return "" if outcome.report.ok else "FAILED"


def _transactions(folder: Path, machine: TrialMachine, kills: int, seed: int, show: Show) -> str:
    plan = transaction_trial.Plan(
        rounds=kills,
        seed=seed,
        node_kinds={"kill": 1},
        node_share=1.0,
        worker_faults=(0, 1),
        lease_ms=int(LEASE_S * 1000),
        heal_s_max=HEAL_S_MAX,
        minutes_max=MINUTES_MAX,
        aiokafka_idle_s_max=AIOKAFKA_IDLE_S_MAX,
    )
    running = transaction_trial.TransactionTrial(folder, machine, plan, show)
    running.prepare()
    try:
        outcome = running.run()
    except (TrialFailed, ServerFailed):
        print_line(running.describe_waiting())
        raise
    finally:
        running.end_clients()
        running.save_history(folder / "history.jsonl")
    show(f"{running.restarts} program restarts; {outcome.findings()}")
    return "" if outcome.ok else "FAILED"


def _subscriptions(folder: Path, machine: TrialMachine, kills: int, seed: int, show: Show) -> str:
    plan = subscription_trial.Plan(
        seed=seed,
        faults=kills,
        node_kinds={"kill": 1},
        node_lease_s=LEASE_S,
        heal_s_max=HEAL_S_MAX,
        drain_s_max=HEAL_S_MAX,
        minutes_max=MINUTES_MAX,
    )
    outcome = asyncio.run(subscription_trial.SubscriptionTrial(folder, machine, plan, show).run())
    show(outcome.summary)
    return "\n".join(f"VIOLATION {finding}" for finding in outcome.findings)


LOADS: Mapping[str, Callable[[Path, TrialMachine, int, int, Show], str]] = {
    "messages": _messages,
    "transactions": _transactions,
    "subscriptions": _subscriptions,
}


if __name__ == "__main__":
    sys.exit(main())
