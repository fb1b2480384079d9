"""Replicas are equal if their bytes are, wherever their segments begin."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

from millstream_testing.replica_bytes import differing_replicas

TOPIC = UUID(int=7)


def replica(data: Path, **segments: bytes) -> Path:
    folder = data / "partitions" / str(TOPIC) / "0"
    folder.mkdir(parents=True)
    for name, content in segments.items():
        (folder / f"{name.removeprefix('at')}.log").write_bytes(content)
    (folder / "00000000000000000000.index").write_bytes(data.name.encode())
    return data


def test_segments_may_begin_at_different_offsets(tmp_path: Path) -> None:
    one, other = replica(tmp_path / "one", at0=b"abc", at3=b"def"), replica(tmp_path / "other", at0=b"abcdef")
    assert differing_replicas({1: one, 2: other}, [TOPIC], 1) == []


def test_one_different_byte_is_reported(tmp_path: Path) -> None:
    one, other = replica(tmp_path / "one", at0=b"abc"), replica(tmp_path / "other", at0=b"abd")
    (difference,) = differing_replicas({1: one, 2: other}, [TOPIC], 1)
    assert "node 1: 3 bytes" in difference
    assert "node 2: 3 bytes" in difference


def test_a_replica_that_is_missing_or_empty_everywhere_is_reported(tmp_path: Path) -> None:
    one = replica(tmp_path / "one", at0=b"abc")
    assert len(differing_replicas({1: one, 2: tmp_path / "nobody"}, [TOPIC], 1)) == 1
    assert len(differing_replicas({1: one, 2: one}, [UUID(int=8)], 1)) == 1
