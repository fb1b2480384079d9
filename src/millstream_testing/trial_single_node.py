"""A single node, used as the cluster of a trial: no etcd, no PostgreSQL, no failover."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from millstream.core.errors import MillstreamError
from millstream_testing.cluster_network import RelayNetwork
from millstream_testing.stepped_serve import PROGRAM
from millstream_testing.trial_cluster import TrialCluster, TrialNode


class TrialSingleNode(TrialCluster):
    """A single node that can be killed, stopped and paused."""

    def __init__(self, folder: Path, *, settings: Mapping[str, object], program: Sequence[str] = PROGRAM) -> None:
        super().__init__(folder, RelayNetwork(1), nodes=1, settings=settings, program=program)

    @property
    def kafka(self) -> str:
        """Return the node's own address; there is no relay."""
        return self.nodes[1].kafka

    def unhealthy_reason(self) -> str:
        """Return why the node does not respond; empty if it does."""
        try:
            self.run_request(lambda client: client.metadata())
        except (MillstreamError, OSError, TimeoutError) as error:
            return f"{self.kafka} gives no response: {error!r}"
        return ""

    def _start(self) -> None:
        self._stack.enter_context(self.network)
        node = self.nodes[1] = TrialNode(1, self._folder, self.network, self._settings, self._program)
        self._stack.callback(node.kill)
        self.start()
