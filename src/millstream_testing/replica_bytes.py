"""Compares the replicas of partitions byte for byte: the batches of all segments, one after the other.

Replicas begin new segments at different places, so what is compared is their content and not their files. The nodes
have to be stopped. Compacted topics are not compared, since every replica compacts for itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from pathlib import Path
from uuid import UUID

_CHUNK_BYTES = 1024 * 1024
_SEGMENTS = "*.log"


def differing_replicas(folders: Mapping[int, Path], topics: Iterable[UUID], partitions: int) -> list[str]:
    """Return how the data folders of some nodes differ, in words. A missing replica counts as a difference."""
    return [
        found
        for topic in topics
        for index in range(partitions)
        if (found := _difference({node: _replica(data, topic, index) for node, data in folders.items()}))
    ]


def _replica(data: Path, topic: UUID, index: int) -> Path:
    return data / "partitions" / str(topic) / str(index)


def _difference(replicas: Mapping[int, Path]) -> str:
    contents = {node: _content(folder) for node, folder in replicas.items()}
    if len(set(contents.values())) == 1 and next(iter(contents.values()))[0]:
        return ""
    contents_text = ", ".join(f"node {node}: {size:,} bytes {digest[:12]}" for node, (size, digest) in contents.items())
    return f"{'/'.join(next(iter(replicas.values())).parts[-2:])}: {contents_text}"


def _content(folder: Path) -> tuple[int, str]:
    digest, size = sha256(), 0
    for segment in sorted(folder.glob(_SEGMENTS)):
        with segment.open("rb") as file:
            while piece := file.read(_CHUNK_BYTES):
                digest.update(piece)
                size += len(piece)
    return size, digest.hexdigest()
