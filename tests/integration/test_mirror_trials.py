"""Two clusters that mirror each other through faults, failover, failback and a switch; the long form is a trial."""

from __future__ import annotations

from pathlib import Path

import pytest

from millstream_testing.mirror_trial import Link, MirrorTrial

pytestmark = [pytest.mark.trial, pytest.mark.timeout(900)]


@pytest.mark.parametrize("nodes", [1, 3])
def test_a_round_violates_no_guarantee(tmp_path: Path, nodes: int) -> None:
    lines: list[str] = []
    trial = MirrorTrial(tmp_path, seed=nodes, faults=2, link=Link(nodes, stalls=0.01), print_line=lines.append)
    try:
        trial.run()
    finally:
        trial.close()
    assert not trial.violations, "\n".join([*trial.violations, *lines])
