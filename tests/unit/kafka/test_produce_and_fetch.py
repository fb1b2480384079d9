"""The hand-written Produce and Fetch codecs against kio's, in every served version."""

from __future__ import annotations

import asyncio
import gc
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import pytest
from kio.schema.errors import ErrorCode

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.cluster.declared_state import ClientQuotas
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import ClientInfo
from millstream.broker.kafka.apis import fetch as fetch_module
from millstream.broker.kafka.apis import produce as produce_api
from millstream.broker.kafka.apis.fetch import Fetch
from millstream.broker.kafka.apis.produce import Produce
from millstream.broker.kafka.quota_meter import QuotaMeter
from millstream.broker.log import append as append_module
from millstream.broker.log import files as files_module
from millstream.broker.log.append import check_records
from millstream.broker.net.budget import Budget
from millstream.broker.net.connection import EventualResponse
from millstream.broker.net.response import Promise, Stream
from millstream.broker.replication.partition import Partition
from millstream.broker.security.rights import Rights
from millstream.broker.security.state import SecurityState
from millstream.core.clock import SystemClock
from millstream.core.credential import new_token
from millstream.core.errors import ProtocolViolation
from millstream.core.ids import Offset
from millstream.core.quota import PRODUCER_BYTE_RATE
from millstream.protocol.messages.codec import load_request_class, read_request_header, read_response
from millstream.protocol.messages.shape import reshape
from millstream.protocol.records.batch import COMPRESSION_GZIP, COMPRESSION_ZSTD
from millstream.protocol.records.record import NewRecord, decode_records, encode_batch
from millstream_testing.api_requests import write_request
from millstream_testing.node_group import single_node

CLIENT = ClientInfo(connection_id=1, host="127.0.0.1")
PRODUCE_VERSIONS = range(3, 14)
FETCH_VERSIONS = range(4, 19)
Api = Produce | Fetch


def fetch_api(topics: Topics, budget: Budget | None = None) -> Fetch:
    return Fetch(topics, budget or Budget(1 << 30), no_quota(), bytes_max=1 << 25)


def no_quota() -> QuotaMeter:
    return QuotaMeter(ClientQuotas(CatalogDeclarations(Catalog("sqlite://"))), PRODUCER_BYTE_RATE)


async def settled(response: EventualResponse) -> bytes | None:
    if response is None:
        return None
    buffers = response if isinstance(response, list | Stream) else await response
    return None if buffers is None else b"".join(bytes(buffer) for buffer in buffers)


async def ask(api: Api, request: Any, client: ClientInfo = CLIENT) -> Any:
    """Send a kio request through the hand-written API and decode the response with kio."""
    frame = memoryview(bytearray(write_request(7, "test", request)[4:]))
    encoded = await settled(api.handle_frame(frame, read_request_header(frame), client))
    if encoded is None:
        return None
    assert int.from_bytes(encoded[:4], "big") == len(encoded) - 4
    assert int.from_bytes(encoded[4:8], "big") == 7
    return read_response(api.key, request.__version__, encoded[4:])


def produce_request(
    version: int, topic: str, topic_id: UUID, records: bytes | None, *, partition: int = 0, acks: int = -1
) -> Any:
    cls = load_request_class(0, version)
    module = __import__(cls.__module__, fromlist=["*"])
    name = {"topic_id": topic_id} if version >= 13 else {"name": topic}
    data = module.TopicProduceData(
        partition_data=(module.PartitionProduceData(index=partition, records=records),), **name
    )
    return cls(transactional_id=None, acks=acks, timeout=timedelta(seconds=5), topic_data=(data,))


def fetch_request(
    version: int, topic: str, topic_id: UUID, offset: int, *, session: tuple[int, int] = (0, -1), **other: Any
) -> Any:
    from kio.schema.fetch.v12 import request as named
    from kio.schema.fetch.v18 import request as newest

    module: Any = newest if version >= 13 else named
    name = {"topic_id": topic_id} if version >= 13 else {"topic": topic}
    partitions = other.pop("partitions", [(0, offset)])
    partition_max_bytes = other.pop("partition_max_bytes", 1 << 20)
    fetch_partitions = tuple(
        module.FetchPartition(partition=index, fetch_offset=at, partition_max_bytes=partition_max_bytes)
        for index, at in partitions
    )
    forgotten = tuple(module.ForgottenTopic(partitions=(index,), **name) for index in other.pop("forgotten", []))
    request = module.FetchRequest(
        max_wait=timedelta(milliseconds=other.pop("max_wait_ms", 0)),
        min_bytes=other.pop("min_bytes", 1),
        session_id=session[0],
        session_epoch=session[1],
        topics=(module.FetchTopic(partitions=fetch_partitions, **name),) if fetch_partitions else (),
        forgotten_topics_data=forgotten,
        **other,
    )
    return reshape(request, load_request_class(1, version))


def values(partition: Any) -> list[bytes | None]:
    return [record.value for record in decode_records(partition.records or b"")]


BOMB = bytes(encode_batch([NewRecord(None, bytes(65 * 1024 * 1024), (), 1000)], compression=COMPRESSION_GZIP))
"""A small batch that decompresses to more than is allowed."""


def batch(*contents: bytes) -> bytes:
    return bytes(encode_batch([NewRecord(b"k", value, (), 1000) for value in contents]))


@pytest.mark.parametrize("version", PRODUCE_VERSIONS)
async def test_produce_in_every_version(tmp_path: Path, version: int) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t")
        produce = Produce(topics, no_quota())
        for expected in (0, 2):
            response = await ask(produce, produce_request(version, "t", topic.topic_id, batch(b"a", b"b")))
            (of_topic,) = response.responses
            assert (of_topic.topic_id if version >= 13 else of_topic.name) == (topic.topic_id if version >= 13 else "t")
            (partition,) = of_topic.partition_responses
            assert (partition.index, partition.error_code, partition.base_offset) == (0, ErrorCode.none, expected)
        assert topics.partition("t", 0).high_watermark == 4


@pytest.mark.parametrize("version", FETCH_VERSIONS)
async def test_fetch_in_every_version(tmp_path: Path, version: int) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t")
        await topics.partition("t", 0).append(bytearray(batch(b"a", b"b")))
        response = await ask(fetch_api(topics), fetch_request(version, "t", topic.topic_id, 0))
        (of_topic,) = response.responses
        (partition,) = of_topic.partitions
        assert partition.error_code is ErrorCode.none
        assert partition.high_watermark == 2
        assert values(partition) == [b"a", b"b"]


@pytest.mark.parametrize(("isolation", "expected"), [(0, None), (1, ())])
async def test_only_read_committed_gets_aborted_transactions(
    tmp_path: Path, isolation: int, expected: tuple[()] | None
) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t")
        response = await ask(fetch_api(topics), fetch_request(17, "t", topic.topic_id, 0, isolation_level=isolation))
        assert response.responses[0].partitions[0].aborted_transactions == expected


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads in which records are validated, in order."""
    seen: list[int] = []

    def check(*arguments: Any) -> None:
        seen.append(threading.get_ident())
        check_records(*arguments)

    monkeypatch.setattr(produce_api, "check_records", check)
    monkeypatch.setattr(append_module, "check_records", check)
    return seen


async def test_timestamps_of_large_batches_are_validated_beside_the_loop(tmp_path: Path, threads: list[int]) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t", overrides={"message.timestamp.before.max.ms": str(HOUR_MS // 2)})
        produce, now_ms = Produce(topics, no_quota()), SystemClock().now_ms()
        for last_ms, code in ((now_ms, ErrorCode.none), (now_ms - HOUR_MS, ErrorCode.invalid_timestamp)):
            times = [*[now_ms] * 2999, last_ms]
            sent = bytes(encode_batch([NewRecord(None, b"v", (), time_ms) for time_ms in times]))
            response = await ask(produce, produce_request(9, "t", topic.topic_id, sent))
            (partition,) = response.responses[0].partition_responses
            assert partition.error_code is code
        assert [error.batch_index for error in partition.record_errors] == [2999]
        assert len(threads) == 2
        assert threading.get_ident() not in threads


async def test_keys_of_large_batches_are_validated_beside_the_loop(tmp_path: Path, threads: list[int]) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t", overrides={"cleanup.policy": "compact"})
        produce = Produce(topics, no_quota())

        async def code(*keys: bytes | None, compression: int = 0, size: int = 0) -> ErrorCode:
            records = [NewRecord(key, bytes(size), (), 1000) for key in keys]
            sent = bytes(encode_batch(records, compression=compression))
            response = await ask(produce, produce_request(9, "t", topic.topic_id, sent))
            return ErrorCode(response.responses[0].partition_responses[0].error_code)

        here = threading.get_ident()
        assert await code(b"k") is ErrorCode.none
        assert await code(b"k", compression=COMPRESSION_ZSTD) is ErrorCode.none
        assert threads == [here, here]
        assert await code(*[b"k"] * 3000) is ErrorCode.none
        assert await code(*[b"k"] * 3000, None) is ErrorCode.invalid_record
        assert await code(b"k", compression=COMPRESSION_ZSTD, size=5_000_000) is ErrorCode.none
        assert await code(None, compression=COMPRESSION_ZSTD, size=5_000_000) is ErrorCode.invalid_record
        assert len(threads) == 6
        assert here not in threads[2:]
        assert topics.partition("t", 0).log.end_offset == 3003


@pytest.mark.parametrize("version", [3, 8, 9, 13])
async def test_produce_errors_are_reported_by_partition(tmp_path: Path, version: int) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t")
        produce = Produce(topics, no_quota())

        async def code(**changes: Any) -> ErrorCode:
            arguments: dict[str, Any] = {"topic": "t", "topic_id": topic.topic_id, "records": batch(b"x"), **changes}
            response = await ask(produce, produce_request(version, **arguments))
            outcome = response.responses[0].partition_responses[0]
            assert outcome.base_offset == (0 if outcome.error_code is ErrorCode.none else -1)
            return ErrorCode(outcome.error_code)

        unknown = ErrorCode.unknown_topic_id if version >= 13 else ErrorCode.unknown_topic_or_partition
        torn = bytearray(batch(b"x"))
        torn[-1] ^= 1
        assert await code(topic="nope", topic_id=uuid4()) is unknown
        assert await code(partition=1) is ErrorCode.unknown_topic_or_partition
        assert await code(partition=-1) is ErrorCode.unknown_topic_or_partition
        assert await code(records=None) is ErrorCode.invalid_record
        assert await code(records=bytes(torn)) is ErrorCode.corrupt_message
        assert await code(records=batch(bytes(2 * 1024 * 1024))) is ErrorCode.message_too_large
        assert await code(records=BOMB) is ErrorCode.message_too_large
        assert await code(acks=2) is ErrorCode.invalid_required_acks
        assert await code() is ErrorCode.none


@pytest.mark.parametrize("version", [3, 6, 7, 13])
async def test_forbidden_records_are_not_stored(tmp_path: Path, version: int) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t")
        offsets = await topics.create("__consumer_offsets", internal=True)
        produce = Produce(topics, no_quota())

        async def code(name: str, topic_id: UUID, **settings: Any) -> ErrorCode:
            records = bytes(encode_batch([NewRecord(None, b"x", (), 1000)], **settings))
            response = await ask(produce, produce_request(version, name, topic_id, records))
            return ErrorCode(response.responses[0].partition_responses[0].error_code)

        assert await code(offsets.name, offsets.topic_id) is ErrorCode.invalid_topic_exception
        in_transaction = {"producer_id": 5, "producer_epoch": 0, "base_sequence": 0, "transactional": True}
        refused = await code(topic.name, topic.topic_id, **in_transaction)
        assert refused is ErrorCode.transactional_id_authorization_failed
        zstd = await code(topic.name, topic.topic_id, compression=COMPRESSION_ZSTD)
        assert zstd is (ErrorCode.unsupported_compression_type if version < 7 else ErrorCode.none)
        assert topics.partition("t", 0).log.end_offset == (0 if version < 7 else 1)
        assert topics.partition("__consumer_offsets", 0).log.end_offset == 0


@pytest.mark.parametrize(
    ("position", "value", "code"),
    [
        (8, (20).to_bytes(4, "big"), ErrorCode.corrupt_message),
        (8, (5000).to_bytes(4, "big"), ErrorCode.invalid_record),
        (16, b"\x07", ErrorCode.corrupt_message),
        (16, b"\x01", ErrorCode.invalid_record),
        (23, (-1).to_bytes(4, "big", signed=True), ErrorCode.invalid_record),
        (66, b"\x7f", ErrorCode.corrupt_message),
    ],
    ids=["impossible length", "cut off", "impossible format", "old format", "negative delta", "checksum"],
)
async def test_only_corruption_in_transit_is_retriable(
    tmp_path: Path, position: int, value: bytes, code: ErrorCode
) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t")
        records = bytearray(batch(b"x"))
        records[position : position + len(value)] = value
        response = await ask(Produce(topics, no_quota()), produce_request(9, "t", topic.topic_id, bytes(records)))
        assert response.responses[0].partition_responses[0].error_code is code


async def test_acks_0_has_no_response_and_closes_on_error(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t", overrides={"flush": "os"})
        produce = Produce(topics, no_quota())
        assert await ask(produce, produce_request(9, "t", topic.topic_id, batch(b"x"), acks=0)) is None
        assert topics.partition("t", 0).high_watermark == 1
        with pytest.raises(ProtocolViolation):
            await ask(produce, produce_request(9, "nope", topic.topic_id, batch(b"x"), acks=0))


async def test_versions_before_3_are_refused(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        frame = memoryview(bytearray(write_request(1, "c", produce_request(3, "t", uuid4(), b""))[4:]))
        header = read_request_header(frame)._replace(version=2)
        with pytest.raises(ProtocolViolation, match="v2"):
            Produce(topics, no_quota()).handle_frame(frame, header, CLIENT)


async def test_pipelined_requests_are_appended_before_the_first_is_synced(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t")
        produce = Produce(topics, no_quota())
        responses = []
        for number in range(5):
            request = produce_request(9, "t", topic.topic_id, batch(b"%d" % number))
            frame = memoryview(bytearray(write_request(number, "c", request)[4:]))
            responses.append(produce.handle_frame(frame, read_request_header(frame), CLIENT))
        partition = topics.partition("t", 0)
        assert partition.log.end_offset == 5
        assert partition.high_watermark == 0
        for number, eventual in enumerate(responses):
            encoded = await settled(eventual)
            assert encoded is not None
            response = read_response(0, 9, encoded[4:])
            assert response.responses[0].partition_responses[0].base_offset == number
        assert partition.high_watermark == 5


def promises_alive() -> int:
    return sum(issubclass(type(object_), Promise) for object_ in gc.get_objects())


async def test_a_completed_request_is_freed_without_the_collector(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t")
        produce = Produce(topics, no_quota())
        gc.collect()
        gc.disable()
        try:
            before = promises_alive()
            assert await ask(produce, produce_request(9, "t", topic.topic_id, batch(b"x"))) is not None
            await asyncio.sleep(0)
            assert promises_alive() == before
        finally:
            gc.enable()


async def test_a_long_poll_wakes_on_append(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t")
        fetch = fetch_api(topics)
        waiting = asyncio.create_task(ask(fetch, fetch_request(12, "t", topic.topic_id, 0, max_wait_ms=60_000)))
        await asyncio.sleep(0)
        await topics.partition("t", 0).append(bytearray(batch(b"news")))
        response = await waiting
        assert values(response.responses[0].partitions[0]) == [b"news"]


async def test_a_long_poll_waits_for_min_bytes_and_is_ended_by_stop(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t")
        fetch = fetch_api(topics)
        request = fetch_request(12, "t", topic.topic_id, 0, max_wait_ms=60_000, min_bytes=1 << 20)
        waiting = asyncio.create_task(ask(fetch, request))
        await topics.partition("t", 0).append(bytearray(batch(b"little")))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        fetch.stop()
        response = await waiting
        assert values(response.responses[0].partitions[0]) == [b"little"]


async def test_a_long_poll_ends_after_its_time_with_nothing(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t")
        response = await ask(fetch_api(topics), fetch_request(12, "t", topic.topic_id, 0, max_wait_ms=20))
        assert response.responses[0].partitions[0].records == b""


async def test_an_append_before_a_long_poll_starts_to_wait_is_seen(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t", partitions=3)
        request = fetch_request(
            12, "t", topic.topic_id, 0, partitions=[(index, 0) for index in range(3)], max_wait_ms=60_000
        )
        frame = memoryview(bytearray(write_request(7, "test", request)[4:]))
        response = fetch_api(topics).handle_frame(frame, read_request_header(frame), CLIENT)
        await topics.partition("t", 1).append(bytearray(batch(b"x")))
        encoded = await asyncio.wait_for(settled(response), 60)
        partitions = read_response(1, 12, (encoded or b"")[4:]).responses[0].partitions
        assert {partition.partition_index: values(partition) for partition in partitions} == {0: [], 1: [b"x"], 2: []}


async def test_a_long_poll_checks_only_changed_partitions_and_returns_everything(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t", partitions=20)
        partitions = [(index, 0) for index in range(20)]
        request = fetch_request(
            12, "t", topic.topic_id, 0, partitions=partitions, max_wait_ms=60_000, min_bytes=3 * len(batch(b"x"))
        )
        waiting = asyncio.create_task(ask(fetch_api(topics), request))
        await asyncio.sleep(0.01)
        looked: list[int] = []
        read_slice = Partition.read_slice

        def counted(partition: Partition, offset: Offset, **limits: Any) -> Any:
            looked.append(partition.index)
            return read_slice(partition, offset, **limits)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Partition, "read_slice", counted)
            for index in (7, 3, 7):
                assert not waiting.done()
                await topics.partition("t", index).append(bytearray(batch(b"x")))
                await asyncio.sleep(0.01)
            response = await asyncio.wait_for(waiting, 60)
        assert sorted(looked) == [3, 3, 7, 7, 7]
        values_by_index = {
            partition.partition_index: values(partition) for partition in response.responses[0].partitions
        }
        assert values_by_index == {index: [b"x"] * {3: 1, 7: 2}.get(index, 0) for index in range(20)}


async def test_a_disconnect_ends_its_long_poll(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t")
        await topics.partition("t", 0).append(bytearray(batch(b"little")))
        client = ClientInfo(connection_id=2, host="127.0.0.1")
        request = fetch_request(12, "t", topic.topic_id, 0, max_wait_ms=300_000, min_bytes=1000)
        fetch = fetch_api(topics)
        waiting = asyncio.create_task(ask(fetch, request, client))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        client.presence.leave()
        response = await asyncio.wait_for(waiting, 60)
        assert values(response.responses[0].partitions[0]) == [b"little"]
        assert not fetch._waits
        assert len((await asyncio.wait_for(ask(fetch, request, client), 60)).responses) == 1


async def test_a_deleted_topic_ends_a_long_poll(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t")
        fetch = fetch_api(topics)
        waiting = asyncio.create_task(ask(fetch, fetch_request(13, "t", topic.topic_id, 0, max_wait_ms=60_000)))
        await asyncio.sleep(0.01)
        await topics.delete("t")
        response = await waiting
        assert response.responses[0].partitions[0].error_code is ErrorCode.unknown_topic_id


@pytest.mark.parametrize("version", [7, 12, 17])
async def test_fetch_errors_are_reported_by_partition(tmp_path: Path, version: int) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t")
        fetch = fetch_api(topics)
        beyond = await ask(fetch, fetch_request(version, "t", topic.topic_id, 99, max_wait_ms=60_000))
        assert beyond.responses[0].partitions[0].error_code is ErrorCode.offset_out_of_range
        missing = await ask(fetch, fetch_request(version, "nope", uuid4(), 0, max_wait_ms=60_000))
        unknown = ErrorCode.unknown_topic_id if version >= 13 else ErrorCode.unknown_topic_or_partition
        assert missing.responses[0].partitions[0].error_code is unknown


@pytest.mark.parametrize("version", [7, 12, 13, 17])
async def test_a_session_reports_only_changes(tmp_path: Path, version: int) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t", partitions=3)
        fetch = fetch_api(topics)
        everything = [(0, 0), (1, 0), (2, 0)]
        opened = await ask(fetch, fetch_request(version, "t", topic.topic_id, 0, session=(0, 0), partitions=everything))
        assert opened.session_id > 0
        assert len(opened.responses[0].partitions) == 3

        async def again(epoch: int, **changes: Any) -> Any:
            changes.setdefault("partitions", [])
            session = (opened.session_id, epoch)
            return await ask(fetch, fetch_request(version, "t", topic.topic_id, 0, session=session, **changes))

        assert (await again(1)).responses == ()
        await topics.partition("t", 1).append(bytearray(batch(b"news")))
        changed = await again(2)
        (partition,) = changed.responses[0].partitions
        assert (changed.session_id, partition.partition_index, values(partition)) == (opened.session_id, 1, [b"news"])
        moved = await again(3, partitions=[(1, 1)], forgotten=[2])
        assert moved.responses == ()
        await topics.partition("t", 2).append(bytearray(batch(b"forgotten")))
        assert (await again(4)).responses == ()
        assert (await again(4)).error_code is ErrorCode.invalid_fetch_session_epoch
        closed = await again(-1, partitions=[(0, 0)])
        assert closed.session_id == 0
        assert (await again(5)).error_code is ErrorCode.fetch_session_id_not_found


async def test_a_session_is_of_one_principal(tmp_path: Path) -> None:
    alice, bob = (ClientInfo(connection_id=number, host="127.0.0.1") for number in (2, 3))
    state = SecurityState(CatalogDeclarations(Catalog("sqlite://")), ["User:alice"])
    for client, user in ((alice, "alice"), (bob, "bob")):
        client.rights = Rights(state, f"User:{user}", client.host)
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t")
        fetch = fetch_api(topics)
        opened = await ask(fetch, fetch_request(12, "t", topic.topic_id, 0, session=(0, 0)), alice)

        def again(epoch: int) -> Any:
            return fetch_request(12, "t", topic.topic_id, 0, session=(opened.session_id, epoch), partitions=[])

        taken = await ask(fetch, again(1), bob)
        assert (taken.error_code, taken.responses) == (ErrorCode.fetch_session_id_not_found, ())
        await ask(fetch, again(-1), bob)
        assert (await ask(fetch, again(1), alice)).error_code is ErrorCode.none

        scoped, _ = new_token("User:alice", scope=(), parent="", created_ms=0, expires_ms=1)
        bob.rights = Rights(state, "User:alice", bob.host, tokens=[scoped])
        assert (await ask(fetch, again(2), bob)).error_code is ErrorCode.fetch_session_id_not_found


async def test_no_partition_starves_behind_a_full_one(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t", partitions=2, overrides={"flush": "os"})
        for index in (0, 1):
            for _ in range(4):
                await topics.partition("t", index).append(bytearray(batch(bytes(1000))))
        fetch = fetch_api(topics)
        both = [(0, 0), (1, 0)]
        request = fetch_request(12, "t", topic.topic_id, 0, session=(0, 0), partitions=both, max_bytes=1000)
        first = await ask(fetch, request)
        served = [p.partition_index for t in first.responses for p in t.partitions if p.records]
        session = (first.session_id, 1)
        request = fetch_request(12, "t", topic.topic_id, 0, session=session, partitions=[], max_bytes=1000)
        second = await ask(fetch, request)
        served += [p.partition_index for t in second.responses for p in t.partitions if p.records]
        assert served == [0, 1]


HOUR_MS = 3_600_000
INVALID_RECORDS: list[tuple[dict[str, str], list[tuple[bytes | None, int]], ErrorCode, list[int]]] = [
    (
        {"cleanup.policy": "compact"},
        [(None if at in (3, 7) else b"k", 0) for at in range(10)],
        ErrorCode.invalid_record,
        [3, 7],
    ),
    (
        {"message.timestamp.after.max.ms": "1000"},
        [(None, HOUR_MS if at in (0, 9) else 0) for at in range(10)],
        ErrorCode.invalid_timestamp,
        [0, 9],
    ),
    (
        {"message.timestamp.before.max.ms": str(HOUR_MS // 2)},
        [(None, -HOUR_MS), (None, 0), (None, -HOUR_MS)],
        ErrorCode.invalid_timestamp,
        [0, 2],
    ),
    # The batch header holds the timestamp of the first record and the maximum, not the minimum.
    (
        {"message.timestamp.before.max.ms": str(HOUR_MS // 2)},
        [(None, 0), (None, -HOUR_MS)],
        ErrorCode.invalid_timestamp,
        [1],
    ),
    (
        {"cleanup.policy": "compact", "message.timestamp.before.max.ms": str(HOUR_MS // 2)},
        [(b"k", 0), (None, 0), (b"k", -HOUR_MS)],
        ErrorCode.invalid_timestamp,
        [1, 2],
    ),
    # A record is named once, and an invalid timestamp takes precedence, as in Kafka.
    (
        {"cleanup.policy": "compact", "message.timestamp.after.max.ms": "1000"},
        [(b"k", 0), (None, HOUR_MS), (b"k", HOUR_MS)],
        ErrorCode.invalid_timestamp,
        [1, 2],
    ),
]


@pytest.mark.parametrize("compression", [0, COMPRESSION_ZSTD])
@pytest.mark.parametrize("version", [7, 8, 9, 13])
@pytest.mark.parametrize(("settings", "records", "code", "indexes"), INVALID_RECORDS)
async def test_a_refused_batch_names_the_invalid_records(
    tmp_path: Path,
    version: int,
    settings: dict[str, str],
    records: list[tuple[bytes | None, int]],
    code: ErrorCode,
    indexes: list[int],
    compression: int,
) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t", overrides=settings)
        produce = Produce(topics, no_quota())
        now_ms = SystemClock().now_ms()
        new = [NewRecord(key, b"v", (), now_ms + shift_ms) for key, shift_ms in records]
        content = bytes(encode_batch(new, compression=compression))
        response = await ask(produce, produce_request(version, "t", topic.topic_id, content))
        (partition,) = response.responses[0].partition_responses
        assert (partition.error_code, partition.base_offset) == (code, -1)
        assert topics.partition("t", 0).high_watermark == 0
        if version >= 8:
            assert f"of {len(records)} records" in partition.error_message
            named = [(error.batch_index, error.batch_index_error_message) for error in partition.record_errors]
            assert [index for index, _ in named] == indexes
            if "cleanup.policy" in settings:
                assert all(("no key" if records[index][0] is None else "timestamp") in why for index, why in named)


def sizes_of(response: Any) -> dict[int, int]:
    """The partitions with records, and the number of bytes of each."""
    return {p.partition_index: len(p.records) for t in response.responses for p in t.partitions if p.records}


async def batches_in(topics: Topics, sizes: dict[int, list[int]]) -> UUID:
    """A topic with batches of exactly these sizes in its partitions."""
    topic = await topics.create("t", partitions=len(sizes), overrides={"flush": "os"})
    overhead = len(batch(bytes(1000))) - 1000
    for index, of_partition in sizes.items():
        for size in of_partition:
            await topics.partition("t", index).append(bytearray(batch(bytes(size - overhead))))
    return topic.topic_id


@pytest.mark.parametrize("read_committed", [False, True])
@pytest.mark.parametrize(
    ("max_bytes", "partition_max_bytes", "expected"),
    [
        (900, 1 << 20, {0: 1000}),  # the first batch is returned although it is larger
        (0, 0, {0: 1000}),
        (1999, 1 << 20, {0: 1000, 2: 600}),  # partition 1 has to wait, a smaller batch behind it fits
        (2000, 1 << 20, {0: 1000, 1: 1000}),
        (3600, 999, {0: 1000, 2: 600}),  # only the first may exceed the limit of its partition
        (1 << 20, 1 << 20, {0: 1000, 1: 2000, 2: 600, 3: 4000}),
    ],
)
async def test_a_fetch_respects_its_limits(
    tmp_path: Path, max_bytes: int, partition_max_bytes: int, expected: dict[int, int], *, read_committed: bool
) -> None:
    """Only the first partition with records may exceed them, by its first batch, as in Kafka."""
    async with single_node(tmp_path) as topics:
        topic_id = await batches_in(topics, {0: [1000], 1: [1000, 1000], 2: [600], 3: [4000]})
        request = fetch_request(
            12,
            "t",
            topic_id,
            0,
            partitions=[(index, 0) for index in range(4)],
            partition_max_bytes=partition_max_bytes,
            max_bytes=max_bytes,
            isolation_level=1 if read_committed else 0,
        )
        assert sizes_of(await ask(fetch_api(topics), request)) == expected


@pytest.mark.parametrize("version", [4, 12, 18])
async def test_every_partition_is_read_to_the_end_within_the_limits(tmp_path: Path, version: int) -> None:
    """With a session the broker rotates partitions, without one the client does; either way nothing starves."""
    sizes = {0: [700] * 5, 1: [1900, 300, 1900], 2: [100] * 9, 3: [2500, 2500]}
    async with single_node(tmp_path) as topics:
        topic_id = await batches_in(topics, sizes)
        fetch, offsets, session = fetch_api(topics), dict.fromkeys(sizes, 0), (0, 0 if version >= 7 else -1)
        changed = list(offsets)
        for _ in range(30):
            fetch_partitions = [(index, offsets[index]) for index in changed]
            limits: dict[str, Any] = {"max_bytes": 2000, "partition_max_bytes": 1500, "partitions": fetch_partitions}
            response = await ask(fetch, fetch_request(version, "t", topic_id, 0, session=session, **limits))
            served = sizes_of(response)
            assert sum(served.values()) <= 2000 or len(served) == 1
            assert all(size <= 1500 for size in list(served.values())[1:])
            for topic in response.responses:
                for partition in topic.partitions:
                    offsets[partition.partition_index] += len(values(partition))
            if version >= 7:
                session, changed = (response.session_id, session[1] + 1), list(served)
            else:
                changed = [index for index in changed if index not in served] + list(served)
        assert offsets == {index: len(batches) for index, batches in sizes.items()}


async def test_a_fetch_at_its_limit_does_not_wait(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic_id = await batches_in(topics, {0: [1000], 1: [1000]})
        limits: dict[str, Any] = {"max_bytes": 1500, "min_bytes": 1500, "max_wait_ms": 600_000}
        request = fetch_request(12, "t", topic_id, 0, partitions=[(0, 0), (1, 0)], **limits)
        async with asyncio.timeout(60):
            assert sizes_of(await ask(fetch_api(topics), request)) == {0: 1000}


async def test_a_fetch_waits_while_the_memory_budget_is_exhausted(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic = await topics.create("t")
        await topics.partition("t", 0).append(bytearray(batch(b"x")))
        budget = Budget(100)
        budget.reserve(100)
        request = fetch_request(12, "t", topic.topic_id, 0, max_wait_ms=60_000)
        waiting = asyncio.create_task(ask(fetch_api(topics, budget), request))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        budget.release(100)
        response = await waiting
        assert values(response.responses[0].partitions[0]) == [b"x"]


async def filled(topics: Topics, partitions: int) -> UUID:
    """A topic whose partitions hold 250 records of a kilobyte each."""
    topic = await topics.create("t", partitions=partitions)
    for index in range(partitions):
        for number in range(5):
            await topics.partition("t", index).append(bytearray(batch(*[b"%d-%d" % (index, number) * 250] * 50)))
    return topic.topic_id


@pytest.mark.parametrize("version", [4, 11, 12, 18])
async def test_a_large_response_is_read_while_it_is_sent_unless_it_is_verified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: int
) -> None:
    monkeypatch.setattr(files_module, "STAMP_NS", -1)
    async with single_node(tmp_path) as topics:
        topic_id = await filled(topics, 4)
        partitions = [(index, 0) for index in range(4)]
        request = fetch_request(version, "t", topic_id, 0, partitions=partitions, max_bytes=1 << 25)
        fetch = fetch_api(topics)
        frame = memoryview(bytearray(write_request(7, "test", request)[4:]))
        for response_type in (list, Stream):
            response = fetch.handle_frame(frame, read_request_header(frame), CLIENT)
            assert isinstance(response, response_type)
            for partition in read_response(1, version, (await settled(response) or b"")[4:]).responses[0].partitions:
                index = partition.partition_index
                assert values(partition) == [b"%d-%d" % (index, number) * 250 for number in range(5) for _ in range(50)]


async def test_a_response_of_verified_records_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_module, "HELD_BYTES_MAX", 300_000)
    monkeypatch.setattr(files_module, "STAMP_NS", -1)
    async with single_node(tmp_path) as topics:
        topic_id = await filled(topics, 4)
        request = fetch_request(12, "t", topic_id, 0, partitions=[(index, 0) for index in range(4)], max_bytes=1 << 25)
        assert list(sizes_of(await ask(fetch_api(topics), request))) == [0, 1]
        assert list(sizes_of(await ask(fetch_api(topics), request))) == [0, 1, 2, 3]


async def test_a_response_of_a_deleted_topic_is_sent_to_the_end(tmp_path: Path) -> None:
    async with single_node(tmp_path) as topics:
        topic_id = await filled(topics, 4)
        request = fetch_request(12, "t", topic_id, 0, partitions=[(index, 0) for index in range(4)], max_bytes=1 << 25)
        frame = memoryview(bytearray(write_request(7, "test", request)[4:]))
        before = await settled(fetch_api(topics).handle_frame(frame, read_request_header(frame), CLIENT))
        response = fetch_api(topics).handle_frame(frame, read_request_header(frame), CLIENT)
        await topics.delete("t")
        assert await settled(response) == before
