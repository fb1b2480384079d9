"""Transactions under faults, from seeds: committed ones are complete and visible once, and nothing hangs.

`make simulate` runs thousands of seeds; this file runs a few.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from millstream_testing.transaction_simulation.world import simulate_transactions

SEEDS = range(3000, 3006)


@pytest.mark.parametrize("seed", SEEDS)
def test_transactions_are_atomic_and_nothing_hangs_in_the_end(seed: int) -> None:
    outcome = simulate_transactions(seed)
    assert outcome.failure is None, "\n".join([*outcome.trace[-60:], f"seed {seed}: {outcome.failure}"])
    assert outcome.batches > 0


def test_a_seed_of_transactions_is_reproducible_in_every_process() -> None:
    seed = 3003
    code = (
        "from millstream_testing.transaction_simulation.world import simulate_transactions; "
        f"print(simulate_transactions({seed}, tracing=True).digest)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", code]
    transaction = subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=250
    ).stdout
    assert int(transaction) == simulate_transactions(seed).digest
