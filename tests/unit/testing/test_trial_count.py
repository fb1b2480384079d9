"""A trial injects exactly the requested number of faults, also if the last ones would come in pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

import pytest

from millstream_testing.cluster_faults import Fault
from millstream_testing.cluster_network import Network
from millstream_testing.cluster_trial import ClusterTrial, InjectedFault, Outcome, Plan
from millstream_testing.history import Report


class Dry(ClusterTrial):
    """A trial that starts nothing and always draws a pair of faults."""

    def _draw_faults(self) -> Iterable[list[tuple[str, Fault]]]:
        return ([(kind, cast("Fault", None)) for kind in ("kill", "pause")] for _ in range(100))

    def _inject(self, faults: Sequence[tuple[str, Fault]]) -> None:
        kinds = tuple(kind for kind, _ in faults)
        self._injected.append(InjectedFault(kinds=kinds, what="", next_produce_s=0, longest_wait_s=0, recovery_s=0))

    def _check_everything(self) -> Outcome:
        return Outcome(Report(sent=0, acknowledged=0, read=0), self._injected)


@pytest.mark.parametrize("faults", [1, 14, 15])
def test_no_more_faults_than_requested(tmp_path: Path, faults: int) -> None:
    trial = Dry(tmp_path, cast("Network", None), Plan(faults=faults, check_every=1000))
    assert trial.run().faults == faults
