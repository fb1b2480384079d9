from __future__ import annotations

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.cli.folder_check import ScannedSegment, scan_segment
from millstream.protocol.records.record import NewRecord, encode_batch


def batches(*sizes: int, base_offset: int = 0) -> list[bytes]:
    made = []
    for number in sizes:
        records = [NewRecord(None, b"value-%d" % index, (), 1000) for index in range(number)]
        made.append(bytes(encode_batch(records, base_offset=base_offset)))
        base_offset += number
    return made


def written(folder: Path, content: bytes) -> Path:
    path = folder / "00000000000000000000.log"
    path.write_bytes(content)
    return path


def scan(path: Path, base_offset: int = 0, *, limit: int = 2**63 - 1) -> ScannedSegment:
    read: list[int] = []
    scanned = scan_segment(path, base_offset, limit, read.append)
    assert sum(read) == scanned.size_bytes
    return scanned


def test_an_empty_segment_is_valid(tmp_path: Path) -> None:
    scanned = scan(written(tmp_path, b""), 7)
    assert (scanned.batches, scanned.next_offset, scanned.bad, scanned.torn_bytes) == (0, 7, [], 0)


def test_a_whole_segment_is_counted(tmp_path: Path) -> None:
    scanned = scan(written(tmp_path, b"".join(batches(2, 3, 1))))
    assert (scanned.batches, scanned.records, scanned.next_offset, scanned.bad) == (3, 6, 6, [])


def test_a_torn_tail_is_not_damage(tmp_path: Path) -> None:
    first, second = batches(2, 3)
    scanned = scan(written(tmp_path, first + second[:-5]))
    assert (scanned.next_offset, scanned.bad, scanned.torn_bytes) == (2, [], len(second) - 5)


def test_damage_is_reported_with_its_range(tmp_path: Path) -> None:
    first, second, third = batches(2, 3, 4)
    broken = bytearray(second)
    broken[-1] ^= 1
    scanned = scan(written(tmp_path, first + bytes(broken) + third))
    assert scanned.bad == [(len(first), len(first) + len(second), 2, 5)]
    assert (scanned.records, scanned.next_offset, scanned.torn_bytes) == (6, 9, 0)


def test_a_damaged_start_is_reported_too(tmp_path: Path) -> None:
    first, second = batches(2, 3)
    scanned = scan(written(tmp_path, bytes(len(first)) + second))
    assert scanned.bad == [(0, len(first), 0, 2)]


def test_a_batch_with_a_decreasing_offset_is_damage(tmp_path: Path) -> None:
    first, second, third = batches(2, 3, 1)
    scanned = scan(written(tmp_path, first + second + first + third))
    start = len(first) + len(second)
    assert scanned.bad == [(start, start + len(first), 5, 5)]
    assert scanned.next_offset == 6


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(at=st.floats(0, 0.999), flip=st.integers(1, 255), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_a_flipped_byte_never_costs_a_valid_neighbour(tmp_path: Path, at: float, flip: int, sizes: list[int]) -> None:
    made = batches(*sizes)
    content = bytearray(b"".join(made))
    position = int(at * len(content))
    content[position] ^= flip
    scanned = scan(written(tmp_path, bytes(content)))
    assert scanned.batches >= len(made) - 1


def test_batches_that_the_next_segment_contains_are_not_scanned(tmp_path: Path) -> None:
    first, second = batches(2, 3)
    scanned = scan(written(tmp_path, first + second[:-1]), limit=2)
    assert (scanned.next_offset, scanned.bad, scanned.torn_bytes) == (2, [], 0)
