"""Moving a partition to other nodes, in steps that are each safe on their own.

First the new replicas are added to the old ones and follow. When all of them are in sync, the others are removed; a
leader among those hands over first. Replicas with everything that was acknowledged are in sync at every step, so an
interrupted move loses nothing. Files of removed replicas are deleted only by a record that names them.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass, replace

from millstream.broker.cluster import keys
from millstream.broker.cluster.keys import PartitionKey
from millstream.broker.cluster.store import Change, Delete, Put
from millstream.core.errors import CorruptState
from millstream.core.ids import NodeId
from millstream.core.partition_state import PartitionState


@dataclass(frozen=True, slots=True, kw_only=True)
class Reassignment:
    """A move under way."""

    target: tuple[NodeId, ...]
    """The nodes of the target, the preferred leader first."""
    before: tuple[NodeId, ...]
    """Where it was, to go back to if the move is cancelled."""

    def to_json(self) -> str:
        """Encode it for the coordination store."""
        return json.dumps({"target": self.target, "before": self.before}, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Reassignment:
        """Decode it."""
        try:
            content = json.loads(text)
            target, before = (tuple(NodeId(int(one)) for one in content[name]) for name in ("target", "before"))
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptState(f"a move of a partition cannot be read ({error!r}): {text[:200]!r}") from error
        return cls(target=target, before=before)


def widened(state: PartitionState, target: tuple[NodeId, ...]) -> PartitionState:
    """Return the state with the new replicas beside the old ones; they are not in sync yet."""
    staying = tuple(node for node in state.replicas if node not in target)
    return replace(state, replicas=(*target, *staying))


def narrowed(state: PartitionState, target: tuple[NodeId, ...], alive: Collection[NodeId]) -> PartitionState | None:
    """Return the state with only the target's replicas, led by one of them; None if none of them can lead now."""
    in_sync = tuple(node for node in target if node in state.in_sync)
    eligible = tuple(node for node in target if node in state.eligible)
    leaders = [state.leader] if state.leader in in_sync else [node for node in in_sync if node in alive]
    if not leaders:
        return None
    fewer = replace(state, replicas=target, in_sync=in_sync, eligible=eligible)
    return fewer if leaders[0] == state.leader else fewer.elected(leaders[0])


def finished(state: PartitionState, move: Reassignment, alive: Collection[NodeId]) -> PartitionState | None:
    """Return the state after the move, if every new replica is in sync; None while it must continue."""
    if not set(move.target) <= set(state.in_sync):
        return None
    return narrowed(state, move.target, alive)


def begin_changes(
    partition: PartitionKey, state: PartitionState, move: Reassignment, removed: Collection[NodeId]
) -> list[Change]:
    """Return the changes that begin a move; nodes of the target that were to remove files keep them now.

    A target of the same nodes only changes their order of preference, and is then complete.
    """
    wide = widened(state, move.target)
    changes: list[Change] = [Put(keys.partition_key(partition), wide.to_json())]
    if set(wide.replicas) == set(move.target):
        changes.append(Delete(keys.reassignment_key(partition)))
    else:
        changes.append(Put(keys.reassignment_key(partition), move.to_json()))
    return [*changes, *(Delete(keys.removed_key(partition, node)) for node in move.target if node in removed)]


def end_changes(partition: PartitionKey, before: PartitionState, after: PartitionState) -> list[Change]:
    """Return the changes that end a move, or its cancellation: removed nodes may delete their files."""
    gone = [node for node in before.replicas if node not in after.replicas]
    return [
        Put(keys.partition_key(partition), after.to_json()),
        Delete(keys.reassignment_key(partition)),
        *(Put(keys.removed_key(partition, node), "") for node in gone),
    ]
