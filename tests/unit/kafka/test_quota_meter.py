"""Quotas are enforced: by bytes, by the clock, and in Produce and Fetch responses of every version."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.cluster.declared_state import ClientQuotas
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka import quota_meter
from millstream.broker.kafka.api import ClientInfo
from millstream.broker.kafka.apis.fetch import Fetch
from millstream.broker.kafka.apis.produce import Produce
from millstream.broker.kafka.apis.share_fetch import ShareFetch
from millstream.broker.kafka.quota_meter import THROTTLE_MS_MAX, WINDOW_S, Bucket, QuotaMeter, QuotaMeters
from millstream.broker.net.budget import Budget
from millstream.broker.net.response import Stream
from millstream.broker.security.rights import Rights
from millstream.core.quota import (
    ANONYMOUS,
    CLIENT_ID,
    CONSUMER_BYTE_RATE,
    DEFAULT,
    PRODUCER_BYTE_RATE,
    USER,
    QuotaEntity,
)
from millstream.protocol.messages.codec import load_request_class, read_request_header, read_response
from millstream.protocol.messages.shape import reshape
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.api_requests import write_request

EACH_CLIENT = QuotaEntity(((CLIENT_ID, DEFAULT),))
ANONYMOUS_ENTITY = QuotaEntity(((USER, ANONYMOUS),))


class SteppedClock:
    """A clock that advances only by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Muted:
    """A client that records how long it was muted."""

    def __init__(self, client_id: str = "one", *, user: str = "") -> None:
        self.seconds: list[float] = []
        rights = Rights(cast("Any", None), f"User:{user}", "127.0.0.1") if user else None
        self.info = ClientInfo(
            connection_id=1, host="127.0.0.1", client_id=client_id, mute=self.seconds.append, rights=rights
        )


steps = st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 20)), min_size=1, max_size=50)


@given(st.integers(1, 10_000), steps)
def test_a_client_that_waits_never_exceeds_its_rate_and_the_first_burst(
    rate: int, requests: list[tuple[int, float]]
) -> None:
    clock = SteppedClock()
    bucket = Bucket(rate, clock.now)
    taken = 0
    for size, pause_s in requests:
        clock.now += pause_s
        taken += size
        clock.now += bucket.take(size, clock.now)
        assert taken <= rate * (clock.now + WINDOW_S) * (1 + 1e-9) + 1e-6


@given(st.integers(1, 10_000), st.integers(1, 100))
def test_a_client_below_its_rate_never_waits(rate: int, seconds: int) -> None:
    bucket = Bucket(rate, 0.0)
    assert all(bucket.take(rate, float(now)) == 0 for now in range(seconds))


async def test_without_quotas_no_client_is_limited(quotas: ClientQuotas) -> None:
    meter = QuotaMeter(quotas, PRODUCER_BYTE_RATE)
    limiting = [meter.is_limiting]
    for change in ({CONSUMER_BYTE_RATE: 1.0}, {PRODUCER_BYTE_RATE: 1.0}, {PRODUCER_BYTE_RATE: None}):
        await quotas.alter(EACH_CLIENT, change)
        limiting.append(meter.is_limiting)
    assert limiting == [False, False, True, False]


async def test_a_debt_is_waited_for_and_then_forgotten(quotas: ClientQuotas) -> None:
    clock = SteppedClock()
    meter = QuotaMeter(quotas, PRODUCER_BYTE_RATE, clock=clock)
    await quotas.alter(EACH_CLIENT, {PRODUCER_BYTE_RATE: 100.0})
    one, other = Muted("one"), Muted("other")
    assert meter.charge(one.info, 1000) == 0
    assert meter.charge(one.info, 150) == 1500
    # Each client id has its own bucket.
    assert meter.charge(other.info, 1000) == 0
    clock.now += 1.5
    assert meter.charge(one.info, 0) == 0
    assert meter.charge(one.info, 1) == 10
    assert (one.seconds, other.seconds) == ([1.5, 0.01], [])
    assert (meter.throttled, meter.throttled_ms) == (2, 1510)


async def test_a_share_consumer_waits_until_its_debt_is_paid(quotas: ClientQuotas) -> None:
    meter, client = QuotaMeter(quotas, CONSUMER_BYTE_RATE), Muted()
    share_fetch = ShareFetch(cast("Any", None), meter, bytes_max=1)
    assert await share_fetch._wait_for_quota(client.info, 7) == 7
    await quotas.alter(EACH_CLIENT, {CONSUMER_BYTE_RATE: 1000.0})
    meter.take(client.info, 10_010)
    assert await share_fetch._wait_for_quota(client.info, 60_000) is not None
    assert meter.owed_ms(client.info) == 0
    meter.take(client.info, 1_000_000)
    assert await share_fetch._wait_for_quota(client.info, 1) is None
    assert client.seconds == []


async def test_the_debt_of_a_client_is_reported_without_muting_a_shared_connection(quotas: ClientQuotas) -> None:
    clock, client = SteppedClock(), Muted()
    meter = QuotaMeter(quotas, PRODUCER_BYTE_RATE, clock=clock)
    assert meter.owed_ms(client.info) == 0
    await quotas.alter(EACH_CLIENT, {PRODUCER_BYTE_RATE: 100.0})
    assert (meter.take(client.info, 1000), meter.owed_ms(client.info)) == (0, 0)
    assert (meter.take(client.info, 250), meter.owed_ms(client.info)) == (2500, 2500)
    clock.now += 2
    assert (meter.owed_ms(client.info), meter.owed_ms(Muted("two").info)) == (500, 0)
    assert (meter.throttled, client.seconds) == (1, [])


async def test_the_clients_of_a_user_share_one_bucket(quotas: ClientQuotas) -> None:
    meter = QuotaMeter(quotas, PRODUCER_BYTE_RATE, clock=SteppedClock())
    await quotas.alter(ANONYMOUS_ENTITY, {PRODUCER_BYTE_RATE: 100.0})
    assert meter.charge(Muted("one").info, 1000) == 0
    assert meter.charge(Muted("other").info, 1) == 10


async def test_users_are_limited_separately_and_a_client_id_across_users(quotas: ClientQuotas) -> None:
    meter = QuotaMeter(quotas, PRODUCER_BYTE_RATE, clock=SteppedClock())
    await quotas.alter(QuotaEntity(((USER, DEFAULT),)), {PRODUCER_BYTE_RATE: 100.0})
    alice, bob = Muted("app", user="alice").info, Muted("app", user="bob").info
    assert (meter.charge(alice, 1001), meter.charge(bob, 1000)) == (10, 0)
    await quotas.alter(QuotaEntity(((USER, "bob"),)), {PRODUCER_BYTE_RATE: 200.0})
    assert (meter.charge(alice, 1001), meter.charge(bob, 2000)) == (10, 0)
    await quotas.alter(QuotaEntity(((USER, DEFAULT),)), {PRODUCER_BYTE_RATE: None})
    await quotas.alter(QuotaEntity(((USER, "bob"),)), {PRODUCER_BYTE_RATE: None})
    await quotas.alter(EACH_CLIENT, {PRODUCER_BYTE_RATE: 100.0})
    assert (meter.charge(alice, 1000), meter.charge(bob, 1)) == (0, 10)


async def test_every_throttle_time_is_bounded_and_restarts_on_change(quotas: ClientQuotas) -> None:
    meter = QuotaMeter(quotas, PRODUCER_BYTE_RATE, clock=SteppedClock())
    client = Muted()
    await quotas.alter(EACH_CLIENT, {PRODUCER_BYTE_RATE: 1.0})
    assert meter.charge(client.info, 10**9) == THROTTLE_MS_MAX
    assert meter.allowance(client.info, 10**9) == 10
    await quotas.alter(EACH_CLIENT, {PRODUCER_BYTE_RATE: 10.0})
    assert meter.charge(client.info, 100) == 0
    assert meter.allowance(client.info, 10**9) == 100


async def test_the_number_of_tracked_clients_is_bounded(quotas: ClientQuotas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota_meter, "CLIENTS_MAX", 2)
    meter = QuotaMeter(quotas, PRODUCER_BYTE_RATE, clock=SteppedClock())
    await quotas.alter(EACH_CLIENT, {PRODUCER_BYTE_RATE: 1.0})
    assert [meter.charge(Muted(name).info, 11) for name in ("a", "b", "a", "c", "a")] == [1000, 1000, 12000, 1000, 1000]


async def test_metrics_are_reported_for_each_kind(quotas: ClientQuotas) -> None:
    meters = QuotaMeters(quotas)
    await quotas.alter(EACH_CLIENT, {CONSUMER_BYTE_RATE: 1.0})
    meters.fetch.charge(Muted().info, 12)
    reported = {metric.name: {sample.labels: sample.value for sample in metric.samples} for metric in meters.metrics()}
    assert reported["millstream_quotas"] == {(): 1}
    requests = reported["millstream_throttled_requests_total"]
    assert requests == {(("quota", PRODUCER_BYTE_RATE),): 0, (("quota", CONSUMER_BYTE_RATE),): 1}
    assert reported["millstream_throttled_seconds_total"].keys() == requests.keys()


async def exchange(api: Produce | Fetch, request: Any, client: ClientInfo) -> Any:
    """Send a kio request through a hand-written API and decode the response with kio."""
    frame = memoryview(bytearray(write_request(7, "test", request)[4:]))
    response = api.handle_frame(frame, read_request_header(frame), client)
    if response is None:
        return None
    buffers = response if isinstance(response, list | Stream) else await response
    assert buffers is not None
    return read_response(api.key, request.__version__, b"".join(map(bytes, buffers))[4:])


def produce_request(version: int, topic: Any, *, acks: int = -1) -> Any:
    cls = load_request_class(0, version)
    module = __import__(cls.__module__, fromlist=["*"])
    name = {"topic_id": topic.topic_id} if version >= 13 else {"name": topic.name}
    records = bytes(encode_batch([NewRecord(None, bytes(500), (), 1000)]))
    data = module.TopicProduceData(partition_data=(module.PartitionProduceData(index=0, records=records),), **name)
    return cls(transactional_id=None, acks=acks, timeout=timedelta(seconds=5), topic_data=(data,))


def fetch_request(version: int, topic: Any, *, min_bytes: int = 1, max_wait_ms: int = 0) -> Any:
    newest = load_request_class(1, 17 if version >= 13 else 12)
    module = __import__(newest.__module__, fromlist=["*"])
    name = {"topic_id": topic.topic_id} if version >= 13 else {"topic": topic.name}
    fetch_partition = module.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1 << 20)
    request = newest(
        max_wait=timedelta(milliseconds=max_wait_ms),
        min_bytes=min_bytes,
        topics=(module.FetchTopic(partitions=(fetch_partition,), **name),),
        forgotten_topics_data=(),
    )
    return reshape(request, load_request_class(1, version))


def milliseconds(response: Any) -> int:
    return int(response.throttle_time / timedelta(milliseconds=1))


@pytest.mark.parametrize("version", range(3, 14))
async def test_produce_is_stored_and_throttled(topics: Topics, quotas: ClientQuotas, version: int) -> None:
    topic = await topics.create("orders", partitions=1)
    produce = Produce(topics, QuotaMeter(quotas, PRODUCER_BYTE_RATE, clock=SteppedClock()))
    client = Muted()
    assert milliseconds(await exchange(produce, produce_request(version, topic), client.info)) == 0
    await quotas.alter(EACH_CLIENT, {PRODUCER_BYTE_RATE: 50.0})
    response = await exchange(produce, produce_request(version, topic), client.info)
    assert milliseconds(response) > 0
    assert client.seconds == [milliseconds(response) / 1000]
    # The records beyond the quota are stored all the same.
    assert topics.partition("orders", 0).high_watermark == 2
    assert client.info.produce_requests == 2
    assert client.info.produced_bytes > 1000


async def test_produce_without_a_response_is_muted_too(topics: Topics, quotas: ClientQuotas) -> None:
    topic = await topics.create("orders", partitions=1)
    await quotas.alter(EACH_CLIENT, {PRODUCER_BYTE_RATE: 1.0})
    produce = Produce(topics, QuotaMeter(quotas, PRODUCER_BYTE_RATE, clock=SteppedClock()))
    client = Muted()
    assert await exchange(produce, produce_request(9, topic, acks=0), client.info) is None
    assert len(client.seconds) == 1


@pytest.mark.parametrize("version", range(4, 18))
async def test_fetch_gets_a_response_and_is_throttled(topics: Topics, quotas: ClientQuotas, version: int) -> None:
    topic = await topics.create("orders", partitions=1)
    for _ in range(3):
        await topics.partition("orders", 0).append(encode_batch([NewRecord(None, bytes(1000), (), 1000)]))
    fetch = Fetch(
        topics, Budget(1 << 30), QuotaMeter(quotas, CONSUMER_BYTE_RATE, clock=SteppedClock()), bytes_max=1 << 20
    )
    client = Muted()
    response = await exchange(fetch, fetch_request(version, topic), client.info)
    everything = len(response.responses[0].partitions[0].records)
    assert (milliseconds(response), client.seconds) == (0, [])
    await quotas.alter(EACH_CLIENT, {CONSUMER_BYTE_RATE: 10.0})
    # The quota allows less than one batch at once; one is returned anyway, or the client would never progress.
    response = await exchange(fetch, fetch_request(version, topic, min_bytes=5000, max_wait_ms=600_000), client.info)
    records = response.responses[0].partitions[0].records
    assert 1000 < len(records) < everything
    assert client.seconds == [milliseconds(response) / 1000]
    assert milliseconds(response) == (len(records) - 100) * 100
    assert (client.info.fetch_requests, client.info.fetched_bytes) == (2, everything + len(records))
