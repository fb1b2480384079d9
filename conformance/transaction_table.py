"""Every state of a transactional id × every transactional request × who asks: the responses, and the state afterwards.

    python -m conformance.transaction_table [--record]

Both brokers are asked, and what differs between Apache Kafka, Millstream and `transaction_responses.json` is shown;
`--record` writes Kafka's responses to that file first. `make compare` runs it, and a test holds Millstream to the file.

While markers are held back, transactions stay in the middle of ending. Kafka sends its markers over a connection with a
client id of its own, which a relay cuts; Millstream runs in this process, where writing a marker never returns.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Final, NamedTuple
from unittest.mock import patch

from benchmarks.peers.kafka import free_address, kafka
from conformance.question import Broker, KeptConnection
from conformance.questions.asking import Key, batch, lay_fixtures, new_topic, produced
from conformance.response_table import ResponseTable, run_comparison

from millstream.broker.kafka.transaction_service import PartitionMarkers
from millstream.broker.transactions import coordinator, shard, transaction
from millstream.broker.transactions.transaction import EPOCH_MAX
from millstream.core.errors import NotLeader
from millstream.core.topic import TopicPartition
from millstream.embedded import EmbeddedBroker
from millstream.protocol.records.control import Marker
from millstream_testing.link_relay import LinkRelay, RelayThread

MARKER_CLIENT: Final = "broker-1-txn-marker-sender"
"""The client id of the connection over which Kafka's node 1 sends markers."""
TABLE: Final = "table"
"""The topic, with a partition that is part of each transaction and one that is not."""
GROUP: Final = "table"
_ADDED, _NEW = 0, 1
_READY_S_MAX: Final = 30.0
_EARLY_MAX: Final = 100
_TIMEOUT_MS: Final = 600_000
_names = count()

Hold = Callable[[bool], None]
"""Has markers held back from now on, or written."""
Responses = dict[str, str]


class ProducerState(NamedTuple):
    """A producer as it names itself."""

    transactional_id: str
    producer_id: int
    epoch: int


# -- requests -----------------------------------------------------------------------------------------------------


def _init(broker: Broker, producer: ProducerState, *, expected: bool) -> Any:
    known = {"producer_id": producer.producer_id, "producer_epoch": producer.epoch} if expected else {}
    values = {"transactional_id": producer.transactional_id, "transaction_timeout": _TIMEOUT_MS, **known}
    return broker.ask(Key.INIT_PRODUCER_ID, 5, values)


def _add(broker: Broker, producer: ProducerState, version: int, partition: int = _NEW, *, verify: bool = False) -> Any:
    named: dict[str, Any] = {**_named(producer), "topics": [{"name": TABLE, "partitions": [partition]}]}
    if version < 4:
        older = {f"v3_and_below_{name}": value for name, value in named.items()}
        results = broker.ask(Key.ADD_PARTITIONS_TO_TXN, version, older)["results_by_topic_v3_and_below"]
    else:
        values = {"transactions": [{**named, "verify_only": verify}]}
        response = broker.ask(Key.ADD_PARTITIONS_TO_TXN, version, values)
        results = response["results_by_transaction"][0]["topic_results"]
    return {"error_code": results[0]["results_by_partition"][0]["partition_error_code"]}


def _add_offsets(broker: Broker, producer: ProducerState) -> Any:
    return broker.ask(Key.ADD_OFFSETS_TO_TXN, 4, {**_named(producer), "group_id": GROUP})


def _commit_offsets(broker: Broker, producer: ProducerState, version: int) -> Any:
    offset = {"partition_index": 0, "committed_offset": 1, "committed_leader_epoch": -1, "committed_metadata": None}
    values = {**_named(producer), "group_id": GROUP, "topics": [{"name": TABLE, "partitions": [offset]}]}
    return broker.ask(Key.TXN_OFFSET_COMMIT, version, values)["topics"][0]["partitions"][0]


def _end(broker: Broker, producer: ProducerState, version: int, *, commit: bool) -> Any:
    return broker.ask(Key.END_TXN, version, {**_named(producer), "committed": commit})


def _produce(broker: Broker, producer: ProducerState, version: int, partition: int) -> Any:
    records = batch(
        producer_id=producer.producer_id, producer_epoch=producer.epoch, base_sequence=0, transactional=True
    )
    values = {"transactional_id": producer.transactional_id, **produced(records, topic=TABLE, partition=partition)}
    return broker.ask(Key.PRODUCE, version, values)["responses"][0]["partition_responses"][0]


def _named(producer: ProducerState) -> dict[str, Any]:
    return {
        "transactional_id": producer.transactional_id,
        "producer_id": producer.producer_id,
        "producer_epoch": producer.epoch,
    }


REQUESTS: Final[Mapping[str, Callable[[Broker, ProducerState], Any]]] = {
    "InitProducerId v5": lambda broker, producer: _init(broker, producer, expected=False),
    "InitProducerId v5 with id and epoch": lambda broker, producer: _init(broker, producer, expected=True),
    "AddPartitionsToTxn v3": lambda broker, producer: _add(broker, producer, 3),
    "AddPartitionsToTxn v4": lambda broker, producer: _add(broker, producer, 4),
    "AddPartitionsToTxn v5": lambda broker, producer: _add(broker, producer, 5),
    "AddPartitionsToTxn v4 verify": lambda broker, producer: _add(broker, producer, 4, _ADDED, verify=True),
    "AddPartitionsToTxn v5 verify": lambda broker, producer: _add(broker, producer, 5, _ADDED, verify=True),
    "AddOffsetsToTxn v4": _add_offsets,
    "TxnOffsetCommit v3": lambda broker, producer: _commit_offsets(broker, producer, 3),
    "TxnOffsetCommit v4": lambda broker, producer: _commit_offsets(broker, producer, 4),
    "TxnOffsetCommit v5": lambda broker, producer: _commit_offsets(broker, producer, 5),
    "EndTxn v3 commit": lambda broker, producer: _end(broker, producer, 3, commit=True),
    "EndTxn v3 abort": lambda broker, producer: _end(broker, producer, 3, commit=False),
    "EndTxn v4 commit": lambda broker, producer: _end(broker, producer, 4, commit=True),
    "EndTxn v4 abort": lambda broker, producer: _end(broker, producer, 4, commit=False),
    "EndTxn v5 commit": lambda broker, producer: _end(broker, producer, 5, commit=True),
    "EndTxn v5 abort": lambda broker, producer: _end(broker, producer, 5, commit=False),
    "Produce v11 to a partition of it": lambda broker, producer: _produce(broker, producer, 11, _ADDED),
    "Produce v11 to another partition": lambda broker, producer: _produce(broker, producer, 11, _NEW),
    "Produce v12 to a partition of it": lambda broker, producer: _produce(broker, producer, 12, _ADDED),
    "Produce v12 to another partition": lambda broker, producer: _produce(broker, producer, 12, _NEW),
}

PRODUCERS: Final[Mapping[str, Callable[[ProducerState], ProducerState]]] = {
    "current": lambda producer: producer,
    "epoch before": lambda producer: producer._replace(epoch=producer.epoch - 1),
    "epoch to come": lambda producer: producer._replace(epoch=producer.epoch + 1),
    "other id": lambda producer: producer._replace(producer_id=producer.producer_id + 1_000_000),
}
"""By name: how a request differs from the id and epoch that the broker returned last."""

# -- states -------------------------------------------------------------------------------------------------------


def _new_producer(broker: Broker, epoch: int = 2) -> ProducerState:
    """A producer at an epoch that has others before it."""
    transactional_id = f"table-{next(_names)}"
    values = {"transactional_id": transactional_id, "transaction_timeout": _TIMEOUT_MS}
    for response in broker.ask_repeatedly(Key.INIT_PRODUCER_ID, 5, values, epoch + 1):
        _must(response)
    return ProducerState(transactional_id, response["producer_id"], response["producer_epoch"])


def _unknown(_: Broker) -> ProducerState:
    return ProducerState(f"table-{next(_names)}", 1_000_000, 2)


def _ongoing(broker: Broker, version: int, epoch: int = 2) -> ProducerState:
    producer = _new_producer(broker, epoch)
    if version == 1:
        _must(_add(broker, producer, 3, _ADDED))
        _must(_add_offsets(broker, producer))
    else:
        _must(_add(broker, producer, 5, _ADDED))
        _must(_commit_offsets(broker, producer, 5))
    return producer


def _ended(broker: Broker, version: int, *, commit: bool) -> ProducerState:
    producer = _ongoing(broker, version)
    response = _end(broker, producer, 4 if version == 1 else 5, commit=commit)
    _must(response)
    return (
        producer
        if version == 1
        else producer._replace(producer_id=response["producer_id"], epoch=response["producer_epoch"])
    )


def _must(response: Any) -> None:
    if response["error_code"] != "none":
        raise RuntimeError(f"a state could not be prepared: {response}")


STATES: Final[Mapping[str, Callable[[Broker], ProducerState]]] = {
    "unknown id": _unknown,
    "Empty": _new_producer,
    **{f"Ongoing, version {version}": partial(_ongoing, version=version) for version in (1, 2)},
    **{
        f"{phase}{result}, version {version}": partial(_ended, version=version, commit=result == "Commit")
        for phase in ("Complete", "Prepare")
        for result in ("Commit", "Abort")
        for version in (1, 2)
    },
}
"""By name: how an id gets into a state. It is complete, or stays prepared when markers are held back by then."""

_ASKED_FIRST: Final = "ours asks the coordinator first, which knows that the id was replaced"
_DECIDED: Final = "Kafka adds offsets to a transaction that is decided until its marker is written; ours never does"
ACCEPTED: Final = {
    f"{pair} | TxnOffsetCommit v{version}": reason
    for pair, reason in {
        "PrepareCommit, version 2 | epoch before": _DECIDED,
        "PrepareAbort, version 2 | epoch before": _DECIDED,
        "PrepareCommit, rotated | id before": _DECIDED,
        "CompleteCommit, rotated | id before": _ASKED_FIRST,
    }.items()
    for version in (3, 4, 5)
}
"""By pair: why the response is another one, on purpose."""

# -- the table ----------------------------------------------------------------------------------------------------


def ask_all(broker: Broker, hold: Hold) -> Responses:
    """Run every pair; an id that a request has not changed is used again."""
    broker.ask(Key.CREATE_TOPICS, 5, {"timeout": 10000, "topics": [new_topic(TABLE, 2)]})
    responses: Responses = {}
    for state in STATES:
        producer: ProducerState | None = None
        for asking, request in _asked():
            producer = producer or _prepare(broker, state, hold)
            before = _state(broker, producer)
            responses[f"{state} | {asking} | {request}"] = outcome = _ask(broker, producer, before, asking, request)
            if outcome.startswith("none") or not outcome.endswith(f", {before}"):
                producer = None
    return responses


def ask_rotated(broker: Broker, hold: Hold, epoch_max: int) -> Responses:
    """The same of a producer whose id was replaced at the end of a transaction, since its epochs are used up."""
    hold(True)
    old = _ongoing(broker, 2, epoch_max - 1)
    response = _end(broker, old, 5, commit=True)
    _must(response)
    new = old._replace(producer_id=response["producer_id"], epoch=response["producer_epoch"])
    responses: Responses = {}
    for asking, producer in {"current": new, "id before": old}.items():
        for request, ask in REQUESTS.items():
            responses[f"PrepareCommit, rotated | {asking} | {request}"] = ask(broker, producer)["error_code"]
    hold(False)
    _await_state(broker, new, "CompleteCommit")
    hold(True)
    # What changes the state comes last.
    first = [request for request in REQUESTS if "InitProducerId" not in request]
    for request in [*first, "InitProducerId v5 with id and epoch"]:
        response = REQUESTS[request](broker, old)
        known = "" if response.get("producer_id", -1) < 0 else f", known {response['producer_id'] == new.producer_id}"
        responses[f"CompleteCommit, rotated | id before | {request}"] = f"{response['error_code']}{known}"
    responses["Empty, rotated | current | AddPartitionsToTxn v5"] = _add(broker, new, 5)["error_code"]
    return responses


def _asked() -> Iterator[tuple[str, str]]:
    for asking in PRODUCERS:
        for request in REQUESTS:
            if asking == "current" or request != "InitProducerId v5":
                yield asking, request


def _prepare(broker: Broker, state: str, hold: Hold) -> ProducerState:
    hold(not state.startswith("Complete"))
    producer = STATES[state](broker)
    if state != "unknown id":
        _await_state(broker, producer, state.partition(",")[0])
    hold(True)
    return producer


def _ask(broker: Broker, known: ProducerState, before: str, asking: str, request: str) -> str:
    """The code, how the id and epoch of the response differ from the ones before, and the state afterwards."""
    response = REQUESTS[request](broker, PRODUCERS[asking](known))
    outcome: str = response["error_code"]
    if outcome == "none" and response.get("producer_id", -1) >= 0:
        if response["producer_id"] == known.producer_id:
            outcome += f" epoch{response['producer_epoch'] - known.epoch:+d}"
        else:
            outcome += " another id"
    after = _state(broker, known)
    if after == "PrepareAbort" and before in ("Empty", "CompleteCommit", "CompleteAbort"):
        # There are no markers to wait for.
        after = "CompleteAbort"
        _await_state(broker, known, after)
    return f"{outcome}, {after}"


def _state(broker: Broker, producer: ProducerState) -> str:
    filters = {"state_filters": [], "producer_id_filters": [producer.producer_id]}
    transactions = broker.ask(Key.LIST_TRANSACTIONS, 0, filters)["transaction_states"]
    return next(
        (
            transaction["transaction_state"]
            for transaction in transactions
            if transaction["transactional_id"] == producer.transactional_id
        ),
        "-",
    )


def _await_state(broker: Broker, producer: ProducerState, state: str) -> None:
    deadline = time.monotonic() + _READY_S_MAX
    while (now := _state(broker, producer)) != state:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{producer.transactional_id} is {now}, not {state}, after {_READY_S_MAX:g} s")
        time.sleep(0.01)


# -- the brokers --------------------------------------------------------------------------------------------------


@contextmanager
def held_kafka(folder: Path) -> Iterator[tuple[Broker, Hold]]:
    """Apache Kafka whose markers pass a relay."""
    internal = free_address()
    with RelayThread() as thread:
        relay = LinkRelay(thread, internal, named=True)
        with kafka(folder, "os", partitions=1, internal=internal, relay=relay.address) as server:
            broker = Broker(server.kafka)
            lay_fixtures(broker)
            yield broker, lambda held: (relay.cut if held else relay.heal)(MARKER_CLIENT)
        relay.close()


@contextmanager
def held_millstream(folder: Path) -> Iterator[tuple[Broker, Hold]]:
    """Millstream in this process, which does not wait long for markers that never come."""
    write = PartitionMarkers.write
    is_held = False

    def hold(held: bool) -> None:
        nonlocal is_held
        is_held = held

    async def write_unless_held(self: PartitionMarkers, marker: Marker, partition: TopicPartition) -> None:
        if is_held:
            raise NotLeader("the leader is away")
        await write(self, marker, partition)

    node = EmbeddedBroker(folder)
    with (
        patch.object(PartitionMarkers, "write", write_unless_held),
        patch.object(coordinator, "ENDING_WAIT_S", 0.001),
    ):
        node.start_and_wait()
        broker = KeptConnection(node.kafka_address)
        try:
            lay_fixtures(broker)
            yield broker, hold
        finally:
            broker.close()
            node.stop_and_wait()


RECORDED: Final = ResponseTable(
    "states and requests of transactions", Path(__file__).with_name("transaction_responses.json"), ACCEPTED
)


def kafka_responses(folder: Path) -> Responses:
    with held_kafka(folder) as (broker, hold):
        return ask_all(broker, hold) | ask_rotated(broker, hold, EPOCH_MAX)


def millstream_responses(folder: Path) -> Responses:
    """Return the responses of Millstream, whose epochs are exhausted early to save some thirty thousand requests."""
    with (
        held_millstream(folder) as (broker, hold),
        patch.object(transaction, "EPOCH_MAX", _EARLY_MAX),
        patch.object(shard, "EPOCH_MAX", _EARLY_MAX),
    ):
        return ask_all(broker, hold) | ask_rotated(broker, hold, _EARLY_MAX)


def compare(folder: Path, *, record: bool = False) -> int:
    """Ask both, and show where they or the recorded responses differ; how many do."""
    theirs = kafka_responses(folder / "kafka-table")
    return RECORDED.compare(theirs, millstream_responses(folder / "millstream-table"), record=record)


if __name__ == "__main__":
    sys.exit(run_comparison(compare))
