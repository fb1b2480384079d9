from __future__ import annotations

from itertools import groupby, pairwise

from hypothesis import given
from hypothesis import strategies as st

from millstream.pipelines.source.ranges import Range, admitted, ranges_between, split

bounds = st.tuples(st.integers(0, 10**12), st.integers(0, 10**6)).map(lambda pair: (pair[0], pair[0] + pair[1]))
partitions = st.dictionaries(st.tuples(st.sampled_from("abc"), st.integers(0, 20)), bounds, max_size=12)


def offsets(of: dict[tuple[str, int], tuple[int, int]], at: int) -> dict[str, dict[int, int]]:
    found_offsets: dict[str, dict[int, int]] = {}
    for (topic, number), pair in of.items():
        found_offsets.setdefault(topic, {})[number] = pair[at]
    return found_offsets


@given(partitions, st.none() | st.integers(1, 40), st.none() | st.integers(1, 10**6).filter(lambda n: n > 20_000))
def test_pieces_cover_the_range_without_gaps(
    of: dict[tuple[str, int], tuple[int, int]], ranges_min: int | None, records_max: int | None
) -> None:
    whole = ranges_between(offsets(of, 0), offsets(of, 1))
    pieces = split(whole, min_partitions=ranges_min, records_max=records_max)
    assert all(len(piece) for piece in pieces)
    assert records_max is None or all(len(piece) <= records_max for piece in pieces)
    for (topic, number), group in groupby(pieces, key=lambda piece: (piece.topic, piece.partition)):
        group_ranges = list(group)
        first, last = of[topic, number]
        assert (group_ranges[0].start, group_ranges[-1].end) == (first, last)
        assert all(earlier.end == other.start for earlier, other in pairwise(group_ranges))
    assert {(piece.topic, piece.partition) for piece in pieces} == {
        (offset_range.topic, offset_range.partition) for offset_range in whole
    }


def test_the_requested_number_of_tasks_is_approximated() -> None:
    whole = [Range("t", 0, 0, 1000), Range("t", 1, 0, 10)]
    assert len(split(whole, min_partitions=5, records_max=None)) == 5
    assert split(whole, min_partitions=2, records_max=None) == whole


@given(partitions, st.integers(1, 10**6))
def test_a_batch_respects_its_limit_and_every_partition_advances(
    of: dict[tuple[str, int], tuple[int, int]], most: int
) -> None:
    start, end = offsets(of, 0), offsets(of, 1)
    allowed = admitted(start, end, most)
    taken = 0
    for topic, numbers in end.items():
        for number, last in numbers.items():
            reached = allowed[topic][number]
            assert start[topic][number] <= reached <= last
            assert (reached > start[topic][number]) == (last > start[topic][number])
            taken += reached - start[topic][number]
    # Partitions with few records are not left out, which may exceed the limit by one each.
    assert taken <= most + len(of)
