"""The state of a partition's replication, and how values of the coordination store are encoded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import msgspec

from millstream.core.errors import CorruptState
from millstream.core.ids import Epoch, NodeId

T = TypeVar("T")

NO_LEADER = NodeId(-1)
FIRST_EPOCH = Epoch(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionState:
    """The agreed state of one partition in the cluster."""

    replicas: tuple[NodeId, ...]
    """In order of preference: the first leads if it can."""
    leader: NodeId
    leader_epoch: Epoch
    """Increases with every election, including the re-election of the same node."""
    in_sync: tuple[NodeId, ...]
    """The replicas that the high watermark waits for; each has every acknowledged record."""
    eligible: tuple[NodeId, ...] = ()
    """Replicas that were in sync when too few were left. They also have everything up to the high watermark, which does
    not advance while fewer than `min.insync.replicas` are in sync."""

    @property
    def preferred(self) -> NodeId:
        return self.replicas[0]

    @property
    def has_leader(self) -> bool:
        return self.leader != NO_LEADER

    def elected(self, leader: NodeId) -> PartitionState:
        """Return this state with another leader, or none, in the next epoch."""
        return replace(self, leader=leader, leader_epoch=Epoch(self.leader_epoch + 1))

    @classmethod
    def from_json(cls, text: str) -> PartitionState:
        """Decode; ignore unknown fields."""
        return decode_value(text, cls, "the state of a partition")


class Versioned(NamedTuple):
    """A state and its revision in the coordination store, which the next change must name."""

    state: PartitionState
    revision: int


def encode_value(value: Any) -> str:
    """Encode a value of the coordination store: a dataclass or a JSON value."""
    return msgspec.json.encode(value, enc_hook=dict).decode()


def decode_value(text: str, kind: type[T], noun: str) -> T:
    """Decode a value of the coordination store; raise `CorruptState` if it is not of this kind."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError as error:
        raise CorruptState(f"{noun} cannot be read ({error}): {text[:200]!r}") from error
