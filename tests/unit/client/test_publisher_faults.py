"""Random faults in random order: every publish completes, acknowledged messages are stored, none is duplicated."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from millstream.client.message import Receipt
from millstream.client.publisher import Publisher
from millstream.core.errors import MillstreamError, PublishFailed
from millstream.protocol.records.record import NewRecord
from millstream_testing.producer_ledger import ProducerLedger

HANG_S = 60.0
"""Only ends a test that hangs."""

TOPICS = ("orders", "other")
PRODUCE_FAULTS = (
    "",
    "not leader",
    "hang up before",
    "hang up after",
    "after append",
    "broken sequence",
    "refused",
    "deleted",
    "recreated",
)
METADATA_FAULTS = (
    ErrorCode.none,
    ErrorCode.leader_not_available,
    ErrorCode.unknown_topic_or_partition,
    ErrorCode.topic_authorization_failed,
)
INIT_FAULTS = (ErrorCode.none, ErrorCode.coordinator_not_available, ErrorCode.kafka_storage_error)
Outcome = tuple[str, bytes, object]
"""The topic, the message, and its receipt or error."""


async def one_by_one(publisher: Publisher, topic: str, name: str) -> list[Outcome]:
    outcomes: list[Outcome] = []
    for at in range(8):
        value = f"{name} {at}".encode()
        try:
            outcomes.append((topic, value, await publisher.publish(topic, NewRecord(name.encode(), value))))
        except MillstreamError as error:
            outcomes.append((topic, value, error))
    return outcomes


async def together(publisher: Publisher, topic: str, name: str) -> list[Outcome]:
    records = [NewRecord(f"{name} {at % 3}".encode(), f"{name} {at}".encode()) for at in range(150)]
    outcomes: list[object]
    try:
        outcomes = [*await publisher.publish_many(topic, records)]
    except PublishFailed as error:
        outcomes = error.outcomes
    except MillstreamError as error:
        outcomes = [error] * len(records)
    return [(topic, record.value or b"", outcome) for record, outcome in zip(records, outcomes, strict=True)]


def check(ledger: ProducerLedger, outcomes: list[Outcome]) -> None:
    for logs in (ledger.stored, *ledger.past):
        held = [(topic, value) for (topic, _), log in logs.items() for value in log]
        assert len(held) == len(set(held))
    for topic, value, outcome in outcomes:
        if not isinstance(outcome, Receipt):
            assert isinstance(outcome, MillstreamError)
            continue
        logs_of = [logs.get((topic, outcome.partition), []) for logs in (ledger.stored, *ledger.past)]
        assert any(log[outcome.offset : outcome.offset + 1] == [value] for log in logs_of)


async def publish_through(
    faults: list[str], metadata: list[ErrorCode], init: list[ErrorCode], acks: int, buffer_bytes: int
) -> None:
    async with asyncio.timeout(HANG_S), ProducerLedger.started() as ledger:
        for topic in TOPICS:
            ledger.create(topic)
        async with ledger.publishing(batch_bytes=500, buffer_bytes=buffer_bytes, acks=acks) as publisher:
            for topic in TOPICS:
                await publisher.publish(topic, NewRecord(None, b"first"))
            ledger.faults, ledger.init_faults = [*faults], [*init]
            ledger.metadata_faults = {"orders": [*metadata]}
            done = await asyncio.gather(
                *(one_by_one(publisher, topic, f"{topic} {at}") for topic in TOPICS for at in range(3)),
                *(together(publisher, topic, f"{topic} many") for topic in TOPICS),
            )
            ledger.faults, ledger.init_faults, ledger.metadata_faults = [], [], {}
            for topic in TOPICS:
                if topic not in ledger.broker.topics:
                    ledger.create(topic)
            # The faults have ended, so messages get through once everything in flight then has completed.
            await publisher.flush()
            last = [outcome for topic in TOPICS for outcome in await one_by_one(publisher, topic, f"{topic} last")]
            assert isinstance(last[-1][2], Receipt)
            assert publisher._buffered == 0
            check(ledger, [*(outcome for some in done for outcome in some), *last])


@settings(max_examples=10, deadline=None)
@given(
    faults=st.lists(st.sampled_from(PRODUCE_FAULTS), max_size=12),
    metadata=st.lists(st.sampled_from(METADATA_FAULTS), max_size=4),
    init=st.lists(st.sampled_from(INIT_FAULTS), max_size=3),
    acks=st.sampled_from([-1, -1, 1]),
    buffer_bytes=st.sampled_from([2000, 1_000_000]),
)
def test_every_publish_completes_and_nothing_is_lost_or_duplicated(
    faults: list[str], metadata: list[ErrorCode], init: list[ErrorCode], acks: int, buffer_bytes: int
) -> None:
    asyncio.run(publish_through(faults, metadata, init, acks, buffer_bytes))
