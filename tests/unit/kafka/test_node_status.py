from __future__ import annotations

from collections.abc import Iterable, Iterator

from millstream.broker.kafka.api import ClientInfo
from millstream.broker.kafka.apis.node_status import (
    DAMAGE_MAX,
    READY,
    STOPPING,
    GroupMetrics,
    NodeState,
    NodeStatus,
    ProcessMetrics,
)
from millstream.core.ids import PartitionIndex
from millstream.core.metric import Histogram, Metric, MetricSource, Sample, counter
from millstream.core.topic import TopicPartition
from millstream.protocol.messages.codec import read_request_header, request_head, response_body_at
from millstream.protocol.private.message import decode_document
from millstream_testing.clock import ManualClock


class Numbers:
    def __init__(self, *metrics: Metric) -> None:
        self._metrics = metrics

    def metrics(self) -> Iterable[Metric]:
        return self._metrics


def node(state: str = READY) -> NodeState:
    return NodeState(
        node_id=3,
        cluster_id="c",
        started_ms=5,
        kafka="127.0.0.1:9092",
        http="127.0.0.1:8080",
        data="/data",
        state=state,
    )


def status(
    *sources: MetricSource, state: str = READY, unready_reasons: tuple[str, ...] = (), most: int = 10
) -> NodeStatus:
    return NodeStatus(node(state), sources, ManualClock(), unready_reasons=lambda: unready_reasons, samples_max=most)


def test_a_request_gets_the_document() -> None:
    api = status(Numbers(counter("a_total", "A.", 1)))
    frame = memoryview(request_head(api.key, 0, 99, "test"))
    response = api.handle_frame(frame, read_request_header(frame), ClientInfo(connection_id=1, host="h"))
    assert isinstance(response, list)
    whole = b"".join(response)
    assert int.from_bytes(whole[:4], "big") == len(whole) - 4
    assert int.from_bytes(whole[4:8], "big") == 99
    document = decode_document(whole[4 + response_body_at(api.key, 0, whole[4:]) :])
    assert document["metrics"] == [
        {"name": "a_total", "kind": "counter", "help": "A.", "samples": [[1, {}]], "is_truncated": False}
    ]
    assert (document["node_id"], document["kafka"], document["started_ms"]) == (3, "127.0.0.1:9092", 5)


def test_a_ready_node_has_no_reasons() -> None:
    assert status().snapshot()["reasons"] == []


def test_damaged_ranges_are_listed_up_to_a_limit() -> None:
    partition = TopicPartition("orders", PartitionIndex(2))
    api = NodeStatus(node(), (), ManualClock(), damage=lambda: [(partition, ((3, 5, True), (9, 10, False)))])
    assert api.snapshot()["damage"] == [
        {"topic": "orders", "partition": 2, "start": 3, "end": 5, "repair": True},
        {"topic": "orders", "partition": 2, "start": 9, "end": 10, "repair": False},
    ]
    many = NodeStatus(
        node(), (), ManualClock(), damage=lambda: [(partition, [(at, at + 1, False) for at in range(5000)])]
    )
    assert len(many.snapshot()["damage"]) == DAMAGE_MAX


def test_every_reason_is_reported() -> None:
    reasons = status(state=STOPPING, unready_reasons=("orders-0: the disk is full",)).snapshot()["reasons"]
    assert reasons == ["the node is stopping", "orders-0: the disk is full"]


def test_samples_beyond_the_limit_are_not_even_computed() -> None:
    made = []

    def samples() -> Iterator[Sample]:
        for number in range(1_000_000):
            made.append(number)
            yield Sample(number)

    metric = status(Numbers(Metric("a", "gauge", "A.", samples())), most=3).snapshot()["metrics"][0]
    assert (len(metric["samples"]), metric["is_truncated"], len(made)) == (3, True, 4)


def test_a_histogram_is_expanded() -> None:
    histogram = Histogram((1.0,))
    histogram.observe(0.5)
    labels = (("api", "Fetch"),)
    source = Numbers(Metric("h", "histogram", "H.", (Sample(histogram.distribution(), labels),)))
    assert status(source).snapshot()["metrics"][0]["samples"] == [
        ({"bounds": (1.0,), "cumulative": (1,), "observations": 1, "total": 0.5}, {"api": "Fetch"})
    ]


def test_process_metrics_are_reported() -> None:
    values = {metric.name: next(iter(metric.samples)).value for metric in ProcessMetrics(started_ms=2500).metrics()}
    assert values["process_start_time_seconds"] == 2.5
    for name in ("process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"):
        value = values[name]
        assert isinstance(value, int | float)
        assert value > 0


def test_lag_is_the_high_watermark_minus_the_committed_offset() -> None:
    class Groups:
        def committed(self) -> Iterable[tuple[str, str, int, int]]:
            return [("g", "orders", 0, 5), ("g", "orders", 1, 12), ("g", "gone", 0, 1)]

    class Topics:
        def high_watermark(self, topic: str, partition: int) -> int | None:
            return 10 if topic == "orders" else None

    committed, lag = GroupMetrics(Groups(), Topics()).metrics()
    assert [sample.value for sample in committed.samples] == [5, 12, 1]
    assert [(sample.value, dict(sample.labels)["partition"]) for sample in lag.samples] == [(5, "0"), (0, "1")]
