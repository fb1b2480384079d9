"""What the data folder of a stopped node holds, for the case that etcd has lost what the nodes agreed on.

Taking it opens the folder as a start of the node does: torn tails are truncated, and the record of an unclean stop
stays. Nothing else is changed.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from millstream.broker.cluster.last_run import UNKNOWN_NODE, FolderOwner, LastRun
from millstream.broker.log.files import Files
from millstream.broker.log.store import LogStore
from millstream.core.clock import Clock
from millstream.core.errors import CorruptState, DataFolderInvalid
from millstream.core.topic import TopicPartition, TopicSettings

_JOURNAL_BYTES = 64 * 1024 * 1024
_NEVER_MS = 1 << 40
"""Forgetting expired producers is left to the node."""


class ReplicaFound(msgspec.Struct, frozen=True, kw_only=True):
    """The log of one partition."""

    topic_id: str
    partition: int
    end: int
    epoch: int
    """Of the leader that wrote its last record; -1 if there is none."""
    damaged: bool
    """Whether the disk lost records in the middle of it."""


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """All logs of one node."""

    node_id: int
    cluster: str
    cluster_id: str
    whole: str
    """An incarnation of which everything that it claimed is here; empty if a log may have a hole."""
    replicas: list[ReplicaFound]

    def to_json(self) -> str:
        """Encode it, to be carried from one machine to another."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def from_json(cls, text: bytes) -> Inventory:
        """Decode it."""
        try:
            return msgspec.json.decode(text, type=cls)
        except msgspec.DecodeError as error:
            raise CorruptState(f"not an inventory of a node: {error}") from error


async def take_inventory(folder: str, files: Files, clock: Clock, *, boot_id: str) -> Inventory:
    """List every log of a folder whose node is stopped."""
    owner = FolderOwner.read(files, folder)
    if owner.node_id == UNKNOWN_NODE:
        raise DataFolderInvalid(f"{folder} is not the data folder of a node that was part of a cluster")
    store = LogStore.open(
        Path(folder), files=files, clock=clock, journal_bytes=_JOURNAL_BYTES, producer_expiry_ms=_NEVER_MS
    )
    try:
        last_run = LastRun(files, folder, boot_id=boot_id, stopped_clean=store.clean_start)
        replicas = _replicas(store)
    finally:
        await store.close()
    return Inventory(
        node_id=owner.node_id,
        cluster=owner.cluster,
        cluster_id=owner.cluster_id,
        whole=last_run.whole_incarnation,
        replicas=replicas,
    )


def _replicas(store: LogStore) -> list[ReplicaFound]:
    found = []
    for topic_id, index in tuple(store.stored()):
        log = store.open_log(topic_id, TopicPartition(str(topic_id), index), TopicSettings())
        found.append(
            ReplicaFound(
                topic_id=str(topic_id),
                partition=index,
                end=log.end_offset,
                epoch=log.latest_epoch,
                damaged=bool(log.damaged_ranges),
            )
        )
    return found
