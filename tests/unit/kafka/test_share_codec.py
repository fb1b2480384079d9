"""Ordinary ShareFetch requests are decoded by hand as by the generic codec; any other bytes are left to it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.static.primitive import i8, i32, i32Timedelta, i64

from millstream.broker.kafka.share_codec import PlainShareFetch, read_plain
from millstream.protocol.messages.codec import load_request_class, read_request_header
from millstream_testing.api_requests import write_request

KEY = 78
INT32 = st.integers(0, 2**31 - 1)
RANGES = st.lists(
    st.tuples(st.integers(0, 2**62), st.integers(0, 2**62), st.lists(st.integers(0, 4), max_size=5)), max_size=9
)
PLACES = st.lists(st.tuples(st.integers(0, 2**31 - 1), RANGES), max_size=3, unique_by=lambda place: place[0])


def request_of(version: int, topic_id: UUID, limits: tuple[int, ...], places: Any, **more: Any) -> Any:
    """Build a request with kio."""
    kind = load_request_class(KEY, version)
    module = __import__(kind.__module__, fromlist=["FetchTopic"])
    epoch, wait_ms, max_bytes, max_records = limits
    partitions = tuple(
        module.FetchPartition(
            partition_index=i32(index),
            acknowledgement_batches=tuple(
                module.AcknowledgementBatch(
                    first_offset=i64(first), last_offset=i64(last), acknowledge_types=tuple(map(i8, types))
                )
                for first, last, types in ranges
            ),
        )
        for index, ranges in places
    )
    topics = (module.FetchTopic(topic_id=topic_id, partitions=partitions),) if partitions else ()
    values = {"topics": topics, "forgotten_topics_data": (), **more}
    if version >= 2:
        values = {"share_acquire_mode": i8(1), "is_renew_ack": False, **values}
    return kind(
        group_id="workers",
        member_id="m",
        share_session_epoch=i32(epoch),
        max_wait=i32Timedelta.parse(timedelta(milliseconds=wait_ms)),
        min_bytes=i32(1),
        max_bytes=i32(max_bytes),
        max_records=i32(max_records),
        batch_size=i32(500),
        **values,
    )


def read(request: Any) -> PlainShareFetch | None:
    frame = memoryview(write_request(9, "test", request)[4:])
    return read_plain(frame, read_request_header(frame))


@given(st.integers(1, 2), st.uuids(), st.tuples(INT32, INT32, INT32, INT32), PLACES)
def test_ordinary_requests_are_decoded_as_sent(
    version: int, topic_id: UUID, limits: tuple[int, ...], places: Any
) -> None:
    decoded = read(request_of(version, topic_id, limits, places))
    assert decoded is not None
    assert (decoded.group_id, decoded.member_id, decoded.acquire_mode) == ("workers", "m", version - 1)
    assert (decoded.epoch, decoded.max_wait_ms, decoded.max_bytes, decoded.max_records) == limits
    assert decoded.partitions == [(topic_id, index) for index, _ in places]
    acknowledged = {
        place: [tuple(offset_range) for offset_range in ranges] for place, ranges in decoded.acknowledged.items()
    }
    assert acknowledged == {(topic_id, index): ranges for index, ranges in places if ranges}


def test_requests_that_renew_or_forget_are_left_to_the_generic_codec() -> None:
    topic_id, limits = UUID(int=7), (1, 500, 1000, 10)
    module = __import__(load_request_class(KEY, 2).__module__, fromlist=["ForgottenTopic"])
    forgotten = (module.ForgottenTopic(topic_id=topic_id, partitions=(i32(0),)),)
    assert read(request_of(2, topic_id, limits, [(0, [])])) is not None
    assert read(request_of(2, topic_id, limits, [(0, [])], is_renew_ack=True)) is None
    assert read(request_of(2, topic_id, limits, [(0, [])], forgotten_topics_data=forgotten)) is None
    assert read(request_of(2, UUID(int=0), limits, [(0, [])])) is None


@pytest.mark.parametrize("change", ["cut", "extended"])
def test_malformed_requests_are_left_to_the_generic_codec(change: str) -> None:
    whole = write_request(9, "test", request_of(2, UUID(int=7), (1, 500, 1000, 10), [(0, [(0, 5, [1])])]))[4:]
    header = read_request_header(whole)
    for size in range(header.body_at, len(whole)):
        broken = whole[:size] if change == "cut" else whole + bytes(len(whole) - size)
        assert read_plain(memoryview(broken), header) is None
