"""Flipped bits on disk: damaged batches are reported with their exact range and never served; all others are."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.broker.log.log import Log
from millstream.broker.log.store import LogStore
from millstream.core.errors import DamagedRange
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.topic import TopicPartition, TopicSettings
from millstream.protocol.records.batch import iterate_headers
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.files import MemoryFiles
from millstream_testing.logs import memory_store, read_log

TOPIC_ID = UUID(int=1)
PARTITION = TopicPartition("t", PartitionIndex(0))
SETTINGS = TopicSettings(segment_bytes=900, index_interval_bytes=150)
OFFSET_BYTES = range(8)
EPOCH_BYTES = range(12, 16)

Batches = dict[int, tuple[int, bytes]]
"""Base offset to next offset and bytes."""


def open_log(files: MemoryFiles) -> tuple[LogStore, Log]:
    store = memory_store(files)
    return store, store.open_log(TOPIC_ID, PARTITION, SETTINGS)


def fill(files: MemoryFiles, sizes: list[int], *, checkpoint_after: int, clean: bool) -> tuple[Batches, int]:
    """Write batches of given sizes; return them and the offset of the checkpoint."""
    store, log = open_log(files)
    batches: Batches = {}
    checkpoint = 0
    for number, size in enumerate(sizes):
        value = bytes((number + at) % 7 for at in range(size))
        batch = encode_batch([NewRecord(None, value, (), 1000 + number)] * (1 + number % 3))
        appended = log.append(batch, leader_epoch=Epoch(number // 4))
        batches[appended.base_offset] = (appended.next_offset, bytes(batch))
        if number == checkpoint_after:
            store.checkpoint_soon(log)
            while store.checkpoint_once():
                pass
            checkpoint = int(log.end_offset)
    if clean:
        store.close_now()
        checkpoint = int(log.end_offset)
    else:
        store.sync_soon(log)
        store.commit_once()
        files.kill()
    return batches, checkpoint


def find(files: MemoryFiles, batches: Batches) -> dict[int, tuple[str, int]]:
    places = {}
    for path in files.walk():
        if path.endswith(".log"):
            content = files.content(path)
            for base, (_, data) in batches.items():
                if (position := content.find(data)) >= 0:
                    places[base] = (path, position)
    return places


def read_all(log: Log) -> tuple[dict[int, bytes], set[int]]:
    """The batches that the log serves, by base offset, and the offsets that it reports as damaged."""
    served, lost = read_log(log)
    batches = {
        int(header.base_offset): served[header.position : header.end_position] for header in iterate_headers(served)
    }
    return batches, {offset for start, end in lost for offset in range(start, end)}


@given(
    seed=st.integers(0, 2**16),
    sizes=st.lists(st.integers(0, 200), min_size=1, max_size=25),
    flips=st.lists(
        st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 400), st.integers(0, 7)), min_size=1, max_size=4
    ),
    checkpoint_share=st.floats(0, 1),
    clean=st.booleans(),
    index_too=st.booleans(),
)
@settings(max_examples=250, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_flipped_bits_are_reported_without_affecting_neighbours(
    seed: int,
    sizes: list[int],
    flips: list[tuple[float, int, int]],
    checkpoint_share: float,
    clean: bool,
    index_too: bool,
) -> None:
    files = MemoryFiles(seed)
    batches, checkpoint = fill(files, sizes, checkpoint_after=int(checkpoint_share * len(sizes)), clean=clean)
    places = find(files, batches)
    assert places.keys() == batches.keys()
    hit: set[int] = set()
    moved: set[int] = set()
    for share, byte, bit in flips:
        base = sorted(batches)[int(share * len(batches))]
        at = byte % len(batches[base][1])
        if base in hit:
            # One bit per batch, so that no two flips cancel out.
            continue
        if at in EPOCH_BYTES and base >= checkpoint:
            # Only a later batch can show that the epoch of a batch beyond the checkpoint is wrong.
            continue
        if at in OFFSET_BYTES and moved:
            # Two batches with wrong offsets may agree with each other.
            continue
        if at in OFFSET_BYTES:
            moved.add(base)
        path, position = places[base]
        files.flip_bit(path, position + at, bit)
        hit.add(base)
    if index_too:
        for path in list(files.walk()):
            if path.endswith("index") and files.content(path):
                files.flip_bit(path, seed % len(files.content(path)), seed % 8)

    store, log = open_log(files)
    served, lost = read_all(log)

    intact = {base for base in batches if base not in hit}
    tail = {base for base in hit if base >= checkpoint and not any(other > base for other in intact)}
    assert served == {base: batches[base][1] for base in intact}
    expected = {offset for base in hit - tail for offset in range(base, batches[base][0])}
    assert lost - {offset for base in tail for offset in range(base, batches[base][0])} == expected
    assert log.damaged_ranges == () or lost
    end = max(next_offset for next_offset, _ in batches.values())
    if tail and not clean:
        assert log.end_offset == min(tail)
        assert store.recovery_reports[0].cut_from_offset == min(tail)
    else:
        assert log.end_offset == end

    # The damage is remembered, and the log continues behind it.
    appended = log.append(encode_batch([NewRecord(None, b"next", (), 5)]), leader_epoch=log.latest_epoch)
    assert appended.base_offset == log.end_offset - 1
    store.close_now()
    _, again = open_log(files)
    served_again, lost_again = read_all(again)
    assert lost_again == lost
    assert served_again.keys() == served.keys() | {appended.base_offset}


@pytest.mark.parametrize(("byte", "bit"), [(4, 6), (7, 3), (6, 0)])
def test_an_unconfirmed_offset_is_not_trusted(byte: int, bit: int) -> None:
    """The last batch claims another offset, and the one before it cannot contradict it."""
    files = MemoryFiles()
    batches, _ = fill(files, [10] * 6, checkpoint_after=1, clean=False)
    *_, before, last = sorted(batches)
    places = find(files, batches)
    assert places[before][0] == places[last][0]
    files.flip_bit(places[before][0], places[before][1] + 70, 0)
    files.flip_bit(places[last][0], places[last][1] + byte, bit)

    _, log = open_log(files)
    assert log.end_offset == before
    assert not log.damaged_ranges


@given(st.integers(0, 10**6), st.integers(0, 7), st.booleans())
@settings(max_examples=60, deadline=None)
def test_a_damaged_ledger_costs_a_scan_but_no_records(position: int, bit: int, clean: bool) -> None:
    files = MemoryFiles()
    batches, _ = fill(files, [50] * 20, checkpoint_after=10, clean=clean)
    size = len(files.content("/data/checkpoints").rstrip(b"\0"))
    files.flip_bit("/data/checkpoints", position % size, bit)

    _, log = open_log(files)
    served, lost = read_all(log)

    assert served == {base: data for base, (_, data) in batches.items()}
    assert not lost


@pytest.mark.parametrize("clean", [True, False])
def test_a_log_truncated_at_damage_continues_there(clean: bool) -> None:
    """As in a follower that refetches what its disk lost."""
    files = MemoryFiles()
    batches, _ = fill(files, [50, 50, 50, 50], checkpoint_after=-1, clean=clean)
    path = next(path for path in files.walk() if path.endswith(".log"))
    sizes = [len(batch) for _, batch in batches.values()]
    files.flip_bit(path, sizes[0] + sizes[1] - 3, 2)
    store, log = open_log(files)
    start = list(batches)[1]
    with pytest.raises(DamagedRange):
        log.read(start, max_bytes=10_000, up_to=log.end_offset)
    log.truncate_to(start)
    assert (log.end_offset, log.damaged_ranges) == (start, ())
    again = encode_batch([NewRecord(None, b"again", (), 1000)])
    log.append(again, leader_epoch=Epoch(3))
    assert bytes(log.read(0, max_bytes=10_000, up_to=log.end_offset)) == batches[0][1] + bytes(again)
    store.close_now()


def test_damage_is_not_mistaken_for_compaction() -> None:
    """Otherwise a follower would drop its whole log, and with it possibly the last copy."""
    files = MemoryFiles()
    batches, _ = fill(files, [50, 50, 50, 50], checkpoint_after=-1, clean=False)
    path = next(path for path in files.walk() if path.endswith(".log"))
    files.flip_bit(path, len(batches[0][1]) + 70, 2)
    _, log = open_log(files)
    assert (len(log.damaged_ranges), log.superseded_by) == (1, 0)


def test_a_batch_whose_offset_was_never_written_is_not_taken_for_the_first() -> None:
    """After a machine crash, a page with the first bytes of the batch that starts at its end was never written."""
    files = MemoryFiles()
    batches, _ = fill(files, [50, 50, 50], checkpoint_after=-1, clean=False)
    path = next(path for path in files.walk() if path.endswith(".log"))
    second = batches[batches[0][0]][0]
    lost = len(batches[0][1]) + 8
    descriptor = files.open(path)
    files.write_at(descriptor, bytes(lost), 0)
    files.close(descriptor)
    _, log = open_log(files)
    assert log.damaged_ranges == ((0, second),)
    with pytest.raises(DamagedRange):
        log.read(0, max_bytes=10_000, up_to=log.end_offset)


@pytest.mark.parametrize("epoch_too", [False, True])
def test_two_damaged_neighbours_at_the_end_do_not_confirm_each_other(epoch_too: bool) -> None:
    """The last batch claims the offset of the damaged one before it, and no later batch contradicts it."""
    files = MemoryFiles()
    # Of batches with 1, 2, 3, 1 and 2 records, those at 6 and 7 are damaged; a flipped bit turns 6 into 7.
    batches, _ = fill(files, [20, 20, 20, 20, 20], checkpoint_after=-1, clean=False)
    assert sorted(batches) == [0, 1, 3, 6, 7]
    places = find(files, batches)
    path, position = places[6]
    files.flip_bit(path, position + len(batches[6][1]) - 1, 3)
    path, position = places[7]
    files.flip_bit(path, position + 7, 0)
    if epoch_too:
        files.flip_bit(path, position + 15, 0)
    _, log = open_log(files)
    served, lost = read_all(log)
    assert served == {base: batches[base][1] for base in (0, 1, 3)}
    assert lost == set(range(6, int(log.end_offset)))
