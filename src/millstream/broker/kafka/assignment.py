"""Partitions that an administrator places on nodes by hand, in CreateTopics and CreatePartitions."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.cluster.membership import Membership
from millstream.core.errors import InvalidAssignment


def check_replicas(replicas: Sequence[int], membership: Membership) -> None:
    """Raise `InvalidAssignment` unless the list names nodes of the cluster, each once."""
    if not replicas:
        raise InvalidAssignment("the assignment has an empty list of nodes")
    if len(set(replicas)) < len(replicas):
        raise InvalidAssignment(f"the assignment names a node twice: {list(replicas)}")
    known = sorted(node.node_id for node in membership.nodes())
    for replica in replicas:
        if replica not in known:
            raise InvalidAssignment(f"the assignment names node {replica}; the nodes of this cluster are {known}")


def check_assignments(assignments: Sequence[Sequence[int]], membership: Membership) -> int:
    """Check the lists of all partitions and return the replication factor that they agree on."""
    for replicas in assignments:
        check_replicas(replicas, membership)
    factors = {len(replicas) for replicas in assignments}
    if len(factors) > 1:
        raise InvalidAssignment(f"the assignment gives partitions different numbers of replicas: {sorted(factors)}")
    return factors.pop()
