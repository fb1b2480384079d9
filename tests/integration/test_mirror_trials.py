"""Two clusters that mirror each other through faults, failover, failback and a switch; the long form is a trial."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream_testing.mirror_trial import Line, MirrorTrial

pytestmark = [pytest.mark.trial, pytest.mark.timeout(900)]


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_round_violates_no_guarantee(tmp_path: Path, nodes: int) -> None:
    said: list[str] = []
    trial = MirrorTrial(tmp_path, seed=nodes, faults=2, line=Line(nodes, stalls=0.01), say=said.append)
    try:
        trial.run()
    finally:
        trial.close()
    assert not trial.violations, "\n".join([*trial.violations, *said])
