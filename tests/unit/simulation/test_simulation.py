"""Replication and election under faults, from seeds: the invariants hold, and the cluster recovers.

`make simulate` runs thousands of seeds; this file runs a few.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from millstream_testing.simulation.world import simulate

SEEDS = range(1000, 1008)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_invariants_hold_and_the_cluster_recovers(seed: int) -> None:
    outcome = simulate(seed)
    assert outcome.failure is None, "\n".join([*outcome.trace[-60:], f"seed {seed}: {outcome.failure}"])
    assert outcome.batches > 0


def test_a_seed_is_reproducible_in_every_process() -> None:
    code = "from millstream_testing.simulation.world import simulate; print(simulate(1001, tracing=True).digest)"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    command = [sys.executable, "-c", code]
    reported = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=250).stdout
    assert int(reported) == simulate(1001).digest
