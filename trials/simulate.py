"""`make simulate`: run the simulations of replication, transactions, machines, plans and mirrors for many seeds.

python -m trials.simulate [replication|transactions|machine|plans|mirror] [--seeds N] [--first N] [--jobs N]
python -m trials.simulate [replication|transactions|machine|plans|mirror] --seed N [--trace]

Without a name, all simulations run with the same number of seeds.

A failing seed is printed with its trace. Replay it with `--seed N --trace`, which also shows what the nodes logged.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from typing import Final

from millstream_testing.machine_simulation import simulate_machine
from millstream_testing.mirror_simulation import simulate_mirror
from millstream_testing.plan_simulation import simulate_plans
from millstream_testing.simulation.world import Outcome, simulate
from millstream_testing.transaction_simulation.world import simulate_transactions

SIMULATIONS: Final[dict[str, Callable[..., Outcome]]] = {
    "replication": simulate,
    "transactions": simulate_transactions,
    "machine": simulate_machine,
    "plans": simulate_plans,
    "mirror": simulate_mirror,
}
SEEDS = 5000
CHUNK = 8
FAILURES_SHOWN_MAX = 5
TRACE_LINES_MAX = 60
PROGRESS_S = 10.0


def main() -> int:
    """Run the simulations; return 0 if every seed passed, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m trials.simulate", description=__doc__.splitlines()[0])
    parser.add_argument("name", nargs="?", choices=SIMULATIONS, help="run only this simulation")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="the number of seeds")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="the number of processes")
    parser.add_argument("--seed", type=int, help="run only this seed")
    parser.add_argument("--trace", action="store_true", help="with --seed: print all events")
    arguments = parser.parse_args()
    names = [arguments.name] if arguments.name else list(SIMULATIONS)
    if arguments.seed is not None:
        return max(replay(name, arguments.seed, tracing=arguments.trace) for name in names)
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    return max(run_many(name, seeds, arguments.jobs) for name in names)


def replay(name: str, seed: int, *, tracing: bool) -> int:
    """Run one seed and print the outcome."""
    outcome = SIMULATIONS[name](seed, tracing=tracing)
    print("\n".join(outcome.trace))
    print(describe(name, outcome))
    return 1 if outcome.failure else 0


def run_many(name: str, seeds: range, jobs: int) -> int:
    """Run many seeds and print the failing ones."""
    began = last_progress = time.monotonic()
    done = steps = batches = 0
    virtual_s = 0.0
    failed: list[Outcome] = []
    for outcome in outcomes(name, seeds, jobs):
        done, steps, batches = done + 1, steps + outcome.steps, batches + outcome.batches
        virtual_s += outcome.virtual_s
        if outcome.failure is not None:
            failed.append(outcome)
            print_failure(name, outcome, with_trace=len(failed) <= FAILURES_SHOWN_MAX)
        if time.monotonic() - last_progress > PROGRESS_S:
            last_progress = time.monotonic()
            print(
                f"{name}: {done} of {len(seeds)} seeds, {len(failed)} failed, {done / (last_progress - began):.1f}/s",
                flush=True,
            )
    elapsed_s = time.monotonic() - began
    print(
        f"{name}: {done} seeds in {elapsed_s:.1f} s on {jobs} processes, {done / elapsed_s:.1f} a second: {steps} "
        f"steps, {virtual_s / 3600:.1f} simulated hours, {batches} batches committed; {len(failed)} failed"
    )
    if failed:
        print("failed: " + " ".join(str(outcome.seed) for outcome in sorted(failed, key=lambda outcome: outcome.seed)))
    return 1 if failed else 0


def outcomes(name: str, seeds: range, jobs: int) -> Iterator[Outcome]:
    """Yield the outcomes as they complete."""
    if jobs == 1:
        yield from map(SIMULATIONS[name], seeds)
        return
    with get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(SIMULATIONS[name], seeds, chunksize=CHUNK)


def print_failure(name: str, outcome: Outcome, *, with_trace: bool) -> None:
    """Print a failed seed and its trace."""
    print(describe(name, outcome))
    if with_trace:
        print("\n".join(f"    {line}" for line in outcome.trace[-TRACE_LINES_MAX:]))
        print(f"    replay: python -m trials.simulate {name} --seed {outcome.seed} --trace", flush=True)


def describe(name: str, outcome: Outcome) -> str:
    return (
        f"{name}, seed {outcome.seed}: {outcome.failure or 'passed'}; {outcome.steps} steps, "
        f"{outcome.virtual_s:.0f} s, {outcome.batches} batches, digest {outcome.digest:08x}"
    )


if __name__ == "__main__":
    sys.exit(main())
