"""`millstream transaction`: list, describe and abort transactions."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.connection import call_broker, complete_topics
from millstream.cli.options import COMMON, Common, Noun, Yes, confirm, duration, flag
from millstream.cli.output import one_line, print_json, print_line, print_list, print_result
from millstream.core.ids import PartitionIndex
from millstream.core.topic import TopicPartition

if TYPE_CHECKING:
    from millstream.client.admin.transactions import DescribedTransaction, ListedTransaction
    from millstream.protocol.wire.client import Client

app = Noun(help="List, describe and abort transactions.", no_args_is_help=True)


@app.command("list")
def list_(
    state: Annotated[
        list[str] | None,
        flag(
            "--state",
            "STATE",
            "Only in this state, such as Ongoing, Prepared or PrepareCommit; may be repeated. Default: all.",
        ),
    ] = None,
    longer_than: Annotated[
        float | None,
        duration("--longer-than", "Only transactions that have run longer than this."),
    ] = None,
    hanging: Annotated[
        bool,
        typer.Option(
            "--hanging", help="Only hanging transactions: open on a partition, but unknown to every coordinator."
        ),
    ] = False,
    common: Common = COMMON,
) -> None:
    """List transactional ids and the state of their transactions."""
    if hanging:
        _list_hanging(common)
        return

    async def operation(client: Client) -> list[ListedTransaction]:
        from millstream.client.admin.transactions import list_transactions

        longer_than_ms = -1 if longer_than is None else int(longer_than * 1000)
        return await list_transactions(client, states=state or (), longer_than_ms=longer_than_ms)

    transactions = call_broker(common, operation)
    print_list(
        {"transactions": [dataclasses.asdict(transaction) for transaction in transactions]},
        ["transactional id", "state", "producer id"],
        [
            [one_line(transaction.transactional_id), transaction.state, transaction.producer_id]
            for transaction in transactions
        ],
        empty="No transactions; a producer with a transactional id creates one.",
        as_json=common.as_json,
    )


@app.command("describe")
def describe(
    transactional_id: Annotated[str, typer.Argument(help="The transactional id.", show_default=False)],
    common: Common = COMMON,
) -> None:
    """Show the state of a transactional id. Includes its producer and the partitions of its transaction."""
    from millstream.client.admin.transactions import describe_transaction

    transaction = call_broker(common, lambda client: describe_transaction(client, transactional_id))
    if common.as_json:
        print_json(transaction.described())
        return
    print_line(f"{one_line(transaction.transactional_id)}  ({transaction.state})")
    print_line(
        f"producer {transaction.producer_id}, epoch {transaction.epoch}, coordinated by node {transaction.coordinator}"
    )
    if transaction.started_ms >= 0:
        print_line(_format_duration(transaction))
    for partition in transaction.partitions:
        print_line(f"  {partition}")


@app.command("abort")
def abort(
    transactional_id: Annotated[
        str | None, typer.Argument(help="The transactional id, if a coordinator knows it.", show_default=False)
    ] = None,
    topic: Annotated[
        str | None, flag("--topic", "TOPIC", "The topic of a hanging transaction.", autocompletion=complete_topics)
    ] = None,
    partition: Annotated[
        int | None, typer.Option("--partition", "-p", metavar="NUMBER", min=0, help="Its partition.")
    ] = None,
    producer_id: Annotated[int | None, typer.Option("--producer-id", metavar="ID", help="Its producer.")] = None,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Abort it on this partition even if a coordinator knows it; this breaks its atomicity."
        ),
    ] = False,
    yes: Yes = False,
    common: Common = COMMON,
) -> None:
    """Abort a transaction; its producer is fenced.

    A transaction that no coordinator knows (`transaction list --hanging`) is named by --topic, --partition and
    --producer-id.
    """
    if transactional_id is not None:
        if topic is not None or partition is not None or producer_id is not None:
            raise typer.BadParameter(
                "a transactional id identifies the whole transaction; omit --topic, --partition and --producer-id"
            )
        confirm(f"Abort the transaction of {transactional_id!r}?", unless=yes)
        _abort_known(transactional_id, common)
        return
    if topic is None or partition is None or producer_id is None:
        raise typer.BadParameter("pass a transactional id, or --topic, --partition and --producer-id")
    confirm(f"Abort what producer {producer_id} has open on {topic}-{partition}?", unless=yes)
    where = TopicPartition(topic, PartitionIndex(partition))
    _abort_hanging(where, producer_id, common, force=force)


def _format_duration(transaction: DescribedTransaction) -> str:
    from millstream.client.admin.transactions import ONGOING, OPEN_STATES, PREPARED

    begun = f"begun {max(0.0, time.time() - transaction.started_ms / 1000):.0f} s ago"
    if transaction.state == ONGOING:
        return f"{begun}, aborted after {transaction.timeout_ms / 1000:g} s"
    if transaction.state == PREPARED:
        return f"{begun}, waiting for the commit of its batch"
    return f"{begun}, being ended" if transaction.state in OPEN_STATES else f"the last transaction was {begun}"


def _list_hanging(common: Common) -> None:
    from millstream.client.admin.transactions import hanging_transactions

    hanging = call_broker(common, hanging_transactions)
    print_list(
        {"hanging": [transaction.described() for transaction in hanging]},
        ["topic", "partition", "producer id", "epoch", "from offset"],
        [
            [
                transaction.where.topic,
                transaction.where.partition,
                transaction.producer_id,
                transaction.epoch,
                transaction.start_offset,
            ]
            for transaction in hanging
        ],
        empty="No transactions are hanging: every open transaction has a coordinator that will end it.",
        as_json=common.as_json,
    )


def _abort_known(transactional_id: str, common: Common) -> None:
    from millstream.client.admin.transactions import abort_transaction

    state = call_broker(common, lambda client: abort_transaction(client, transactional_id))
    print_result(
        {"transactional_id": transactional_id, "previous_state": state},
        f"Aborted the transaction of {one_line(transactional_id)}, which was {state}.",
        as_json=common.as_json,
    )


def _abort_hanging(where: TopicPartition, producer_id: int, common: Common, *, force: bool) -> None:
    from millstream.client.admin.transactions import abort_on_partition

    aborted = call_broker(common, lambda client: abort_on_partition(client, where, producer_id, force=force))
    print_result(
        aborted.described(),
        f"Aborted the transaction of producer {producer_id} on {one_line(str(where))}.",
        as_json=common.as_json,
    )
