"""The client against a scripted broker: routing, retries, lost responses, timeouts, and clean shutdown."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import socket
from datetime import timedelta
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from millstream.core.backoff import Backoff
from millstream.core.errors import (
    BatchTooLarge,
    BrokerUnreachable,
    CoordinatorUnavailable,
    CorruptBatch,
    InvalidRequest,
    InvalidSetting,
    OffsetOutOfRange,
    RequestTimedOut,
    StorageFailure,
    UnexpectedServer,
    UnknownTopic,
)
from millstream.core.ids import NodeId, Offset, PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.protocol.messages import codec
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire import client as module
from millstream.protocol.wire.channel import BORROWED_MAX
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.cluster_metadata import NodeMetadata
from millstream.protocol.wire.credentials import Credentials, client_tls
from millstream.protocol.wire.fetch import FetchLimits
from millstream_testing.scripted_broker import (
    API_VERSIONS,
    FETCH,
    FIND_COORDINATOR,
    METADATA,
    PRODUCE,
    ScriptedBroker,
    fetched,
    produced,
)
from millstream_testing.waiting import until

NODE = NodeId(1)
PRIVATE = codec.PRIVATE_KEY_MIN
LIMITS = FetchLimits(max_bytes=1 << 20, max_wait_ms=0)


def batch(*, producer_id: int = -1) -> bytearray:
    return encode_batch([NewRecord(None, b"hello", (), 1)], producer_id=producer_id, producer_epoch=0, base_sequence=0)


def connect(broker: ScriptedBroker, timeout_s: float = 60.0) -> Client:
    return Client.connect(broker.address, client_id="test", timeout_s=timeout_s)


async def hang_up(header: codec.RequestHeader, frame: memoryview) -> Any:
    raise EOFError


# -- connecting -----------------------------------------------------------------------------------------------


async def test_a_broker_that_is_slow_at_first_is_retried(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CONNECT_S_MAX", 0.2)
    respond, silent = broker.handlers[API_VERSIONS], asyncio.Event()

    async def slow(header: codec.RequestHeader, frame: memoryview) -> Any:
        if broker.request_count(API_VERSIONS) < 3:
            await silent.wait()
        return await respond(header, frame)

    broker.handlers[API_VERSIONS] = slow
    async with connect(broker, timeout_s=60):
        pass
    silent.set()
    assert broker.request_count(API_VERSIONS) >= 3


async def test_an_unreachable_broker_is_reported_with_advice() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(BrokerUnreachable) as caught:
            async with Client.connect(f"127.0.0.1:{port},localhost:{port}", timeout_s=60):
                pass
    output = str(caught.value)
    assert f"127.0.0.1:{port}, localhost:{port}" in output
    assert f"127.0.0.1:{port}: connection refused" in output
    assert "millstream serve" in output
    assert "--brokers" in output


async def test_a_broker_that_starts_meanwhile_is_found(
    broker: ScriptedBroker, caplog: pytest.LogCaptureFixture
) -> None:
    await broker.stop()
    client = Client.connect(broker.address, connect_s=60)
    connecting = asyncio.get_running_loop().create_task(client.__aenter__())
    await until(lambda: "no broker responds" in caplog.text)
    await broker.start()
    async with asyncio.timeout(60), await connecting:
        assert broker.connections == 1
    assert [line for line in caplog.messages if broker.address in line] == caplog.messages[:1]


async def test_one_of_several_addresses_is_enough(broker: ScriptedBroker) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        async with Client.connect(f"127.0.0.1:{taken.getsockname()[1]}, {broker.address}", timeout_s=60) as client:
            assert (await client.metadata()).cluster_id == "test-cluster"


@pytest.mark.parametrize("text", ["", "localhost", "localhost:x", "localhost:99999"])
def test_an_invalid_address_is_reported(text: str) -> None:
    with pytest.raises(InvalidSetting, match="HOST:PORT"):
        Client.connect(text)


async def test_a_silent_broker_times_out() -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.transport.abort()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(BrokerUnreachable, match="did not respond within"):
        async with Client.connect(f"127.0.0.1:{port}", timeout_s=0.1):
            pass
    server.close()
    await server.wait_closed()


async def test_a_server_that_is_no_broker_is_reported() -> None:
    async def web_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.transport.abort()

    server = await asyncio.start_server(web_server, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(UnexpectedServer, match="an HTTP server responds there") as reported:
        async with Client.connect(f"127.0.0.1:{port}", timeout_s=60):
            pass
    assert "running" not in str(reported.value)
    assert "start one" not in str(reported.value)
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize("aborts", [False, True])
async def test_tls_to_a_server_without_tls_is_reported(aborts: bool) -> None:
    async def plain_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        if aborts:
            writer.transport.abort()
        else:
            writer.close()

    server = await asyncio.start_server(plain_server, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    with pytest.raises(UnexpectedServer, match=r"in the TLS handshake; if it expects plain text, .*\(--tls-ca\)"):
        async with Client.connect(f"127.0.0.1:{port}", timeout_s=60, credentials=Credentials(tls=client_tls())):
            pass
    server.close()
    await server.wait_closed()


async def test_old_brokers_are_asked_again_in_the_oldest_version(broker: ScriptedBroker) -> None:
    broker.served[18] = (0, 2)
    broker.served[METADATA] = (0, 5)
    async with connect(broker) as client:
        response = await client.metadata(["orders"])
    versions = [header.version for header in broker.headers]
    assert versions == [3, 0, 5]
    assert set(response.topics["orders"].partitions) == {0, 1}


async def test_versions_are_requested_once_per_connection(broker: ScriptedBroker) -> None:
    async with connect(broker) as client:
        for _ in range(3):
            await client.metadata()
    assert broker.request_count(18) == 1
    assert broker.connections == 1


async def test_an_api_that_is_not_served_is_reported(broker: ScriptedBroker) -> None:
    del broker.served[METADATA]
    async with connect(broker) as client:
        with pytest.raises(InvalidRequest, match="does not serve API 3"):
            await client.metadata()
    broker.served |= {METADATA: (0, 13), PRODUCE: (0, 2)}
    async with connect(broker) as client:
        with pytest.raises(InvalidRequest, match="versions 0 to 2 of API 0"):
            await client.produce("orders", 0, batch())


async def test_a_lost_connection_is_reopened(broker: ScriptedBroker) -> None:
    async with connect(broker) as client:
        await client.metadata()
        await broker.stop()
        await broker.start()
        assert (await client.metadata(["orders"])).topics["orders"].partitions
    assert broker.connections == 2


async def test_closing_fails_pending_requests(broker: ScriptedBroker) -> None:
    never = asyncio.Event()

    async def wait(header: codec.RequestHeader, frame: memoryview) -> Any:
        await never.wait()

    broker.handlers[PRIVATE] = wait
    async with connect(broker) as client:
        waiting = asyncio.create_task(client.private(None, PRIVATE, b""))
        await until(lambda: broker.request_count(PRIVATE))
    with pytest.raises(BrokerUnreachable, match="connection"):
        await waiting
    never.set()


async def test_a_closed_client_stays_closed(broker: ScriptedBroker) -> None:
    release = asyncio.Event()

    async def wait(header: codec.RequestHeader, frame: memoryview) -> Any:
        await release.wait()
        return await fetched(b"late")(header, frame)

    broker.handlers[FETCH] = wait
    async with connect(broker) as client:
        polling = asyncio.create_task(client.fetch("orders", 0, 0))
        await until(lambda: broker.request_count(FETCH))
    # A pending request is not retried on its own connection.
    with pytest.raises(InvalidRequest, match="the client is closed"):
        await polling
    with pytest.raises(InvalidRequest, match="the client is closed"):
        await client.metadata()
    release.set()


async def test_closing_while_connecting_leaves_nothing_open(broker: ScriptedBroker) -> None:
    connecting, release = asyncio.Event(), asyncio.Event()

    async def slow(header: codec.RequestHeader, frame: memoryview) -> Any:
        connecting.set()
        await release.wait()
        return await broker.respond_to_api_versions(header, frame)

    broker.handlers[18] = slow
    client = connect(broker)
    opening = asyncio.create_task(client.__aenter__())
    await connecting.wait()
    closing = asyncio.create_task(client.close())
    release.set()
    with pytest.raises(BrokerUnreachable, match="closed while it connected"):
        await opening
    await closing


# -- requests -------------------------------------------------------------------------------------------------


async def test_responses_are_matched_by_correlation_id_in_any_order(broker: ScriptedBroker) -> None:
    waiting: list[tuple[codec.RequestHeader, bytes]] = []

    async def reverse(header: codec.RequestHeader, frame: memoryview) -> Any:
        waiting.append((header, bytes(frame[header.body_at :])))
        if len(waiting) < 5:
            return None
        responses = [broker.framed(earlier, b"re: " + body) for earlier, body in reversed(waiting[:-1])]
        broker.write(b"".join(responses))
        return b"re: " + waiting[-1][1]

    broker.handlers[PRIVATE] = reverse
    async with connect(broker) as client:
        responses = await asyncio.gather(*(client.private(NODE, PRIVATE, b"%d" % number) for number in range(5)))
    assert [bytes(response) for response in responses] == [b"re: %d" % number for number in range(5)]
    assert broker.connections == 1


async def test_large_and_small_responses_in_any_fragmentation(broker: ScriptedBroker) -> None:
    sizes = [0, 1, 70_000, 3, 65_531, 65_532, 1_000_000, 10]

    async def sized(header: codec.RequestHeader, frame: memoryview) -> Any:
        size = int(bytes(frame[header.body_at :]))
        return bytes([size % 251]) * size

    broker.handlers[PRIVATE] = sized
    async with connect(broker) as client:
        responses = await asyncio.gather(*(client.private(None, PRIVATE, b"%d" % size) for size in sizes))
    assert [len(response) for response in responses] == sizes
    assert all(bytes(response) == bytes([size % 251]) * size for response, size in zip(responses, sizes, strict=True))


async def test_a_fetch_waits_until_the_extent_of_damage_is_known(
    broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BACKOFF_S_MAX", 0.01)
    records = bytes(batch())
    inspected, served = fetched(None, ErrorCode.kafka_storage_error), fetched(records)
    where = TopicPartition("orders", PartitionIndex(0))

    async def inspect(header: codec.RequestHeader, frame: memoryview) -> Any:
        return await (inspected if broker.request_count(FETCH) % 3 else served)(header, frame)

    broker.handlers[FETCH] = inspect
    async with connect(broker) as client:
        assert bytes((await client.fetch("orders", 0, 0)).records) == records
        assert bytes((await client.fetch_many({where: Offset(0)}, LIMITS))[where].records) == records
        assert broker.request_count(FETCH) == 6
        # A failed disk does not hold a reader forever.
        monkeypatch.setattr(module, "INSPECTION_S", 0.05)
        broker.handlers[FETCH] = inspected
        for reading in (client.fetch("orders", 0, 0), client.fetch_many({where: Offset(0)}, LIMITS)):
            with pytest.raises(StorageFailure):
                await reading


async def test_a_request_without_a_response_times_out(broker: ScriptedBroker) -> None:
    async def ignore_request(header: codec.RequestHeader, frame: memoryview) -> Any:
        return None

    broker.handlers[PRIVATE] = ignore_request
    async with connect(broker) as client:
        client._timeout_s = 0.2
        with pytest.raises(RequestTimedOut, match=r"did not respond within 0\.2 s"):
            await client.private(None, PRIVATE, b"")
        client._timeout_s = 60.0
        # The connection is not used for further requests.
        await client.metadata()
    assert broker.connections == 2


async def test_a_cancelled_request_does_not_affect_others(broker: ScriptedBroker) -> None:
    release = asyncio.Event()

    async def slow(header: codec.RequestHeader, frame: memoryview) -> Any:
        await release.wait()
        return b"late"

    broker.handlers[PRIVATE] = slow
    async with connect(broker) as client:
        waiting = asyncio.create_task(client.private(None, PRIVATE, b""))
        await until(lambda: broker.request_count(PRIVATE))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        release.set()
        assert (await client.metadata()).cluster_id == "test-cluster"
    assert broker.connections == 1


async def test_requests_to_a_silent_broker_do_not_accumulate(broker: ScriptedBroker) -> None:
    async def ignore_request(header: codec.RequestHeader, frame: memoryview) -> Any:
        return None

    async def send_and_cancel(client: Client) -> None:
        for number in range(1, 1000):
            asking = asyncio.create_task(client.private(None, PRIVATE, b""))
            while broker.request_count(PRIVATE) < number and not asking.done():
                await asyncio.sleep(0)
            if asking.done():
                await asking
            asking.cancel()

    broker.handlers[PRIVATE] = ignore_request
    async with connect(broker) as client:
        with pytest.raises(BrokerUnreachable, match="abandoned"):
            await send_and_cancel(client)
    assert broker.request_count(PRIVATE) < 200


async def test_more_fetches_than_connections_are_queued(broker: ScriptedBroker) -> None:
    broker.handlers[FETCH] = fetched(b"batches")
    async with connect(broker) as client:
        responses = await asyncio.gather(*(client.fetch("orders", 0, 0, max_wait_ms=0) for _ in range(50)))
    assert len(responses) == 50
    assert broker.connections <= 1 + BORROWED_MAX


# -- the cluster ----------------------------------------------------------------------------------------------


async def test_metadata_lists_nodes_topics_and_missing_topics(broker: ScriptedBroker) -> None:
    async with connect(broker) as client:
        response = await client.metadata(["orders", "nope"])
        assert await client.leader_of("orders", 1) == NODE
    assert response.controller_id == NODE
    assert response.nodes[NODE].port == broker.port
    assert response.errors == {"nope": 3}
    assert sorted(response.topics) == ["orders"]
    assert broker.request_count(METADATA) == 1


async def test_unknown_topics_and_partitions_are_distinguished(broker: ScriptedBroker) -> None:
    async with connect(broker) as client:
        with pytest.raises(UnknownTopic, match="'nope'"):
            await client.leader_of("nope", 0)
        with pytest.raises(UnknownTopic, match="has 2 partitions, but no partition 7"):
            await client.fetch("orders", 7, 0)


async def test_a_node_at_a_wrong_address_is_reported(broker: ScriptedBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    # The first pause would outlast the timeout of the request, so that nothing is retried.
    monkeypatch.setattr("millstream.protocol.wire.client.Backoff", lambda **_: Backoff(first_s=100.0, max_s=100.0))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        real, wrong = broker.port, taken.getsockname()[1]
        async with connect(broker) as client:
            broker.port = wrong
            with pytest.raises(BrokerUnreachable, match="--advertise"):
                await client.fetch("orders", 0, 0)
            with pytest.raises(BrokerUnreachable, match=r"node 9 is not in the cluster now; its nodes are \[1\]"):
                await client.private(NodeId(9), PRIVATE, b"")
        broker.port = real


async def test_the_coordinator_is_found_and_waited_for(broker: ScriptedBroker) -> None:
    codes = [ErrorCode.coordinator_not_available, ErrorCode.coordinator_load_in_progress, ErrorCode.none]

    async def find(header: codec.RequestHeader, frame: memoryview) -> Any:
        messages: Any = importlib.import_module("kio.schema.find_coordinator.v6.response")
        coordinator = messages.Coordinator(
            key="g", node_id=1, host="127.0.0.1", port=broker.port, error_code=codes.pop(0), error_message=None
        )
        return messages.FindCoordinatorResponse(throttle_time=timedelta(0), coordinators=(coordinator,))

    broker.handlers[FIND_COORDINATOR] = find
    async with connect(broker) as client:
        assert await client.coordinator("g") == NODE
    assert not codes


async def test_a_coordinator_is_cached_until_a_call_fails(broker: ScriptedBroker) -> None:
    async def find(header: codec.RequestHeader, frame: memoryview) -> Any:
        messages: Any = importlib.import_module("kio.schema.find_coordinator.v6.response")
        coordinator = messages.Coordinator(
            key="g", node_id=1, host="127.0.0.1", port=broker.port, error_code=ErrorCode.none, error_message=None
        )
        return messages.FindCoordinatorResponse(throttle_time=timedelta(0), coordinators=(coordinator,))

    broker.handlers[FIND_COORDINATOR] = find
    failures = [None, None, CoordinatorUnavailable("it has moved"), None, InvalidRequest("no"), None]

    async def attempt(node: NodeId) -> NodeId:
        failure = failures.pop(0)
        if failure is not None:
            raise failure
        return node

    async with connect(broker) as client:
        for name in ("spark/q/1/0/a", "spark/q/2/0/b"):
            assert await client.call_coordinator(name, attempt, kind=1, place="spark/q") == NODE
        assert broker.request_count(FIND_COORDINATOR) == 1
        # It moves: the second attempt looks it up again.
        assert await client.call_coordinator("spark/q/3/0/c", attempt, kind=1, place="spark/q") == NODE
        assert broker.request_count(FIND_COORDINATOR) == 2
        with pytest.raises(InvalidRequest):
            await client.call_coordinator("spark/q/4/0/d", attempt, kind=1, place="spark/q")
        assert await client.call_coordinator("spark/q/5/0/e", attempt, kind=1, place="spark/q") == NODE
        assert broker.request_count(FIND_COORDINATOR) == 3
    assert not failures


async def test_a_named_node_is_asked_before_other_open_connections(broker: ScriptedBroker) -> None:
    other = ScriptedBroker()
    await other.start()
    messages: Any = importlib.import_module("kio.schema.metadata.v13.response")

    async def respond_with_both(header: codec.RequestHeader, frame: memoryview) -> Any:
        reported = await broker.respond_to_metadata(header, frame)
        first = messages.MetadataResponseBroker(node_id=0, host="127.0.0.1", port=other.port)
        return dataclasses.replace(reported, brokers=(first, *reported.brokers))

    broker.handlers[METADATA] = other.handlers[METADATA] = respond_with_both
    try:
        async with connect(broker) as client:
            await client.metadata(())
            await client.pool_for(NodeId(0))
            await client.metadata(())
        assert (other.connections, other.request_count(METADATA), broker.request_count(METADATA)) == (1, 0, 2)
    finally:
        await other.stop()


# -- produce --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("newest", range(3, 14))
async def test_produce_in_every_version(broker: ScriptedBroker, newest: int) -> None:
    broker.served[PRODUCE] = (0, newest)
    broker.handlers[PRODUCE] = produced(ErrorCode.none)
    async with connect(broker) as client:
        assert await client.produce("orders", 1, batch()) == (42, -1)
    assert broker.headers[-1].version == min(newest, 12)


async def test_the_batch_arrives_unchanged(broker: ScriptedBroker) -> None:
    sent = batch()
    got: list[Any] = []

    async def keep(header: codec.RequestHeader, frame: memoryview) -> Any:
        got.append(codec.read_request(PRODUCE, header.version, frame, header.body_at))
        return await produced(ErrorCode.none)(header, frame)

    broker.handlers[PRODUCE] = keep
    async with connect(broker) as client:
        await client.produce("orders", 1, memoryview(sent), acks=1, timeout_ms=77)
    assert got[0].topic_data[0].partition_data[0].records == sent
    assert got[0].topic_data[0].name == "orders"
    assert got[0].topic_data[0].partition_data[0].index == 1
    assert got[0].acks == 1
    assert got[0].timeout == timedelta(milliseconds=77)


async def test_a_moved_leader_is_looked_up_again(broker: ScriptedBroker) -> None:
    broker.handlers[PRODUCE] = produced(ErrorCode.not_leader_or_follower, ErrorCode.none)
    async with connect(broker) as client:
        assert (await client.produce("orders", 0, batch())).base_offset == 42
    assert broker.request_count(PRODUCE) == 2
    assert broker.request_count(METADATA) == 2


async def test_a_fatal_error_is_raised_at_once(broker: ScriptedBroker) -> None:
    broker.handlers[PRODUCE] = produced(ErrorCode.message_too_large)
    async with connect(broker) as client:
        with pytest.raises(BatchTooLarge, match="publish to orders-0: too big for me"):
            await client.produce("orders", 0, batch())
        with pytest.raises(CorruptBatch):
            await client.produce("orders", 0, b"not a batch")
    assert broker.request_count(PRODUCE) == 1


async def test_a_produce_without_idempotence_is_not_resent_after_a_lost_response(broker: ScriptedBroker) -> None:
    broker.handlers[PRODUCE] = hang_up
    async with connect(broker) as client:
        with pytest.raises(RequestTimedOut, match="is unknown"):
            await client.produce("orders", 0, batch())
    assert broker.request_count(PRODUCE) == 1


async def test_an_idempotent_produce_is_resent_after_a_lost_response(broker: ScriptedBroker) -> None:
    async def once(header: codec.RequestHeader, frame: memoryview) -> Any:
        broker.handlers[PRODUCE] = produced(ErrorCode.none)
        raise EOFError

    broker.handlers[PRODUCE] = once
    async with connect(broker) as client:
        assert (await client.produce("orders", 0, batch(producer_id=7))).base_offset == 42
    assert broker.request_count(PRODUCE) == 2


async def test_acks_0_waits_for_nothing(broker: ScriptedBroker) -> None:
    async def silent(header: codec.RequestHeader, frame: memoryview) -> Any:
        return None

    broker.handlers[PRODUCE] = silent
    async with connect(broker) as client:
        assert await client.produce("orders", 0, batch(), acks=0) == (-1, -1)
        await client.metadata()
    assert broker.request_count(PRODUCE) == 1


# -- fetch ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("newest", range(4, 18))
async def test_fetch_in_every_version(broker: ScriptedBroker, newest: int) -> None:
    broker.served[FETCH] = (4, newest)
    broker.handlers[FETCH] = fetched(b"batches")
    async with connect(broker) as client:
        response = await client.fetch("orders", 1, 3, max_bytes=100, max_wait_ms=0)
    assert bytes(response.records) == b"batches"
    assert (response.high_watermark, response.last_stable) == (9, 8)
    assert response.log_start == (3 if newest >= 5 else 0)
    assert broker.headers[-1].version == min(newest, 12)


async def test_an_offset_out_of_range_reports_the_range(broker: ScriptedBroker) -> None:
    broker.handlers[FETCH] = fetched(None, ErrorCode.offset_out_of_range)
    async with connect(broker) as client:
        with pytest.raises(OffsetOutOfRange, match="fetch from orders-0: the log reaches from 3 to 9") as caught:
            await client.fetch("orders", 0, 99)
    assert (caught.value.start, caught.value.end) == (3, 9)


async def test_many_partitions_are_fetched_in_one_request(broker: ScriptedBroker) -> None:
    broker.handlers[FETCH] = fetched(None)
    fetch_offsets = {TopicPartition("orders", PartitionIndex(index)): Offset(0) for index in range(2)}
    async with connect(broker) as client:
        responses = await client.fetch_many(fetch_offsets, LIMITS)
        assert set(responses) == set(fetch_offsets)
        assert all(bytes(response.records) == b"" for response in responses.values())
        assert broker.request_count(FETCH) == 1

        broker.handlers[FETCH] = fetched(None, ErrorCode.not_leader_or_follower)
        assert await client.fetch_many(fetch_offsets, LIMITS) == {}
        broker.handlers[FETCH] = fetched(None, ErrorCode.offset_out_of_range)
        with pytest.raises(OffsetOutOfRange):
            await client.fetch_many(fetch_offsets, LIMITS)
        broker.handlers[FETCH] = hang_up
        with pytest.raises(BrokerUnreachable):
            await client.fetch_many(fetch_offsets, LIMITS)


async def test_a_waiting_fetch_blocks_nothing(broker: ScriptedBroker) -> None:
    release = asyncio.Event()

    async def wait(header: codec.RequestHeader, frame: memoryview) -> Any:
        await release.wait()
        return await fetched(b"late")(header, frame)

    broker.handlers[FETCH] = wait
    async with connect(broker) as client:
        polls = [asyncio.create_task(client.fetch("orders", index, 0)) for index in range(2)]
        await until(lambda: broker.request_count(FETCH) >= 2)
        await client.metadata()
        polls[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await polls[0]
        release.set()
        assert bytes((await polls[1]).records) == b"late"
        # The connection of the finished fetch is reused.
        before = broker.connections
        await client.fetch("orders", 0, 0)
        assert broker.connections == before


async def test_a_fetch_survives_a_broken_connection(broker: ScriptedBroker) -> None:
    async def once(header: codec.RequestHeader, frame: memoryview) -> Any:
        broker.handlers[FETCH] = fetched(b"after")
        raise EOFError

    broker.handlers[FETCH] = once
    async with connect(broker) as client:
        assert bytes((await client.fetch("orders", 0, 0)).records) == b"after"


async def test_only_leaders_of_a_topic_count_for_its_throttle_time() -> None:
    client = Client.connect("127.0.0.1:1", client_id="test")
    for number in (1, 2):
        node = NodeMetadata(node_id=NodeId(number), host=f"node-{number}", port=9092, rack=None)
        client._nodes[node.node_id] = node
        client._leaders[TopicPartition(f"topic-{number}", PartitionIndex(0))] = node.node_id
    assert client.throttle_of("topic-1") == 0
    client._pool("node-1", 9092).mute(5)
    assert 0 < client.throttle_of("topic-1") <= 5
    assert (client.throttle_of("topic-2"), client.throttle_of("unknown")) == (0, 0)
    await client.close()
