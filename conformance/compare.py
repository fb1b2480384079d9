"""Asks Apache Kafka and Millstream the same odd questions and shows where the responses differ.

    python -m conformance.compare [--only TEXT] [--all]

The questions are in `questions/` (one request each), `dialogues.py` (several that build on each other) and, with
brokers of their own, `transaction_table.py` (every state of a transaction × every request), `permission_table.py`
(every API × each missing permission) and `sasl_table.py` (signing in, in every wrong order). What must differ, such
as ids and addresses, is left out of the comparison, and so are the messages beside error codes. What may differ is
named in `ACCEPTED`, with the reason. The exit code is 1 when something else differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.peers.kafka import kafka
from benchmarks.subject import PeerUnavailable
from conformance import (
    consumer_dialogues,
    dialogues,
    permission_table,
    sasl_table,
    share_dialogues,
    transaction_table,
)
from conformance.question import Broker
from conformance.questions import (
    administration,
    cluster,
    consumer_groups,
    fetching,
    groups,
    producing,
    settings,
    topics,
    transactions,
)
from conformance.questions.asking import lay_fixtures

from millstream_testing.server import Server

# What differs between any two brokers, and the text beside error codes.
_IGNORED = frozenset(
    [
        *("throttle_time", "error_message", "batch_index_error_message", "cluster_id", "topic_id", "host", "port"),
        *("producer_id", "member_id", "leader", "records", "log_dir", "total_bytes", "usable_bytes", "session_id"),
        *("partition_size", "log_append_time", "configs", "log_start_offset", "aborted_transactions"),
    ]
)
_IDENTITY = ("name", "topic", "group_id", "partition_index", "partition")
_OPAQUE = "the broker stores batches as they come and does not look into them"
_BOUNDS = "a node of Kafka narrows what groups may set by further settings of its own; ours has wide, fixed bounds"
_CLEARER = "Kafka fails on its own; ours says what is wrong"
ACCEPTED: Mapping[str, str] = {
    "produce v9: null records": "Kafka never responds",
    "produce v9: says gzip, is not": _OPAQUE,
    "produce v9: unknown codec": _CLEARER,
    "incremental alter configs v1: unknown operation": _CLEARER,
    "incremental alter configs v1: unknown setting of a node": "Kafka keeps settings of nodes that nothing reads",
    "incremental alter configs v1: session too long, of a group": _BOUNDS,
    "incremental alter configs v1: heartbeats too often, of a group": _BOUNDS,
    "metadata v12: neither name nor id": "Kafka fails on its own; ours passes over such a topic",
    "metadata v12: name and unknown id": "Kafka leaves out the name that it was given",
    "fetch v11: as a follower": "only nodes of the cluster get records as followers",
    "fetch v12: last fetched epoch to come": "it is for followers; consumers do not send it",
    "create topics v7: empty cleanup policy": "one of the policies has to be named",
    "elect leaders v2: unknown type": "the error stands at the top of the response, which is where clients look",
    "elect leaders v2: all": "Kafka lists topics of which it has nothing to say",
}
"""By question: why the response is another one, on purpose."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.compare", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="ask only the questions whose names contain this")
    parser.add_argument("--all", action="store_true", help="show the responses that are the same, too")
    arguments = parser.parse_args()
    try:
        with ExitStack() as stack:
            differs = compare(*start(stack), only=arguments.only, show_all=arguments.all)
        if not arguments.only:
            with tempfile.TemporaryDirectory(prefix="millstream-compare-") as folder:
                for table in (transaction_table, permission_table, sasl_table):
                    differs |= bool(table.compare(Path(folder)))
        return int(differs)
    except PeerUnavailable as reason:
        print(f"skipped: {reason}")
        return 0


def start(stack: ExitStack) -> tuple[Broker, Broker]:
    """Both brokers, each with the same topics."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millstream-compare-")))
    theirs = stack.enter_context(kafka(folder / "kafka", "os", partitions=1))
    ours = stack.enter_context(Server(folder / "millstream"))
    brokers = Broker(theirs.kafka), Broker(ours.kafka)
    for broker in brokers:
        lay_fixtures(broker)
    return brokers


def asked() -> Iterator[tuple[str, Callable[[Broker], Any]]]:
    """Every question, with how it is put."""
    parts = (producing, fetching, cluster, topics, settings, groups, consumer_groups, administration, transactions)
    for part in parts:
        for question in part.QUESTIONS:
            yield question.name, question.ask
    for dialogue in (*dialogues.DIALOGUES, *consumer_dialogues.DIALOGUES, *share_dialogues.DIALOGUES):
        yield (dialogue.__doc__ or "").rstrip("."), dialogue


def compare(theirs: Broker, ours: Broker, *, only: str, show_all: bool) -> bool:
    """Send the requests to both, and report the differences."""
    same = accepted = different = 0
    for name, ask in asked():
        if only not in name:
            continue
        expected, got = dict(flat(ask(theirs))), dict(flat(ask(ours)))
        if expected == got:
            same += 1
            if show_all:
                print(f"  same        {name}: {expected}")
        elif name in ACCEPTED:
            accepted += 1
            print(f"  accepted    {name}: {ACCEPTED[name]}")
        else:
            different += 1
            print(f"  DIFFERENT   {name}")
            for path in sorted(expected.keys() | got.keys()):
                if expected.get(path) != got.get(path):
                    print(f"                {path}: kafka {expected.get(path)}, millstream {got.get(path)}")
    print(f"{same} the same, {accepted} accepted, {different} different")
    return different > 0


def flat(response: Any, path: str = "response") -> Iterator[tuple[str, Any]]:
    """Every value of a response with its path, without the fields that differ between any two brokers."""
    if isinstance(response, dict):
        for name, value in response.items():
            if name not in _IGNORED:
                yield from flat(value, f"{path}.{name}")
    elif isinstance(response, list):
        yield f"{path}.length", len(response)
        for index, value in enumerate(sorted(response, key=_identity)):
            yield from flat(value, f"{path}[{index}]")
    else:
        yield path, response


def _identity(value: Any) -> str:
    """Return the key of a list entry, since the order of most lists has no meaning."""
    return str(next((value[name] for name in _IDENTITY if name in value), "")) if isinstance(value, dict) else ""


if __name__ == "__main__":
    sys.exit(main())
