"""`millstream message`: one message in full, and what happened to it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.connection import call_broker, complete_topics
from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.cli.options import COMMON, Common, Noun, flag
from millstream.cli.output import counted, local_time, one_line, print_bytes, print_json, print_line, print_note
from millstream.cli.pipeline_options import Lake
from millstream.core.errors import CorruptState

if TYPE_CHECKING:
    from millstream.client.admin.message_trace import Position
    from millstream.client.admin.messages import StoredMessage
    from millstream.protocol.wire.client import Client
    from millstream.protocol.wire.cluster_metadata import TopicMetadata

app = Noun(help="Show and trace single messages.", no_args_is_help=True)


@app.callback()
def message() -> None:
    """Show and trace single messages."""


@app.command("show")
def show(
    topic: Annotated[
        str,
        typer.Argument(
            metavar="TOPIC[/PARTITION/OFFSET]",
            autocompletion=complete_topics,
            help="The topic, or the position of the message.",
            show_default=False,
        ),
    ],
    partition: Annotated[int | None, typer.Argument(min=0, help="The partition.", show_default=False)] = None,
    offset: Annotated[int | None, typer.Argument(min=0, help="The offset of the message.", show_default=False)] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Print only the value, unchanged.")] = False,
    common: Common = COMMON,
) -> None:
    """Show one message: key, headers, value, and its batch."""
    if raw and common.as_json:
        raise typer.BadParameter("pass --raw or --json, not both")

    at = _position(topic, partition, offset)

    async def operation(client: Client) -> tuple[TopicMetadata, StoredMessage]:
        from millstream.client.admin.message_trace import topic_name
        from millstream.client.admin.messages import find_message
        from millstream.client.admin.topics import find_topic

        topic_metadata = await find_topic(client, await topic_name(client, at.topic))
        return topic_metadata, await find_message(client, topic_metadata, at.partition, at.offset)

    metadata, stored = call_broker(common, operation)
    if raw:
        print_bytes(stored.record.value or b"")
    elif common.as_json:
        print_json(_document(metadata, at.partition, stored))
    else:
        _print_message(metadata, at.partition, stored)


def _position(topic: str, partition: int | None, offset: int | None) -> Position:
    from millstream.client.admin.message_trace import Position, parse_position

    if partition is None:
        return parse_position(topic)
    if offset is None:
        raise typer.BadParameter("pass TOPIC/PARTITION/OFFSET, or the topic, the partition and the offset")
    return Position(topic, partition, offset)


@app.command("trace")
def trace(
    position: Annotated[
        str,
        typer.Argument(
            metavar="TOPIC/PARTITION/OFFSET|ID",
            help="The position of the message; or its id, with --topic and --since.",
            show_default=False,
        ),
    ],
    topic: Annotated[
        str | None, flag("--topic", "TOPIC", "The topic in which to look for an id.", autocompletion=complete_topics)
    ] = None,
    since: Annotated[str | None, flag("--since", "TIME", "Where to start looking for an id.")] = None,
    until: Annotated[str, flag("--until", "TIME", "Where to stop looking for an id.")] = "end",
    lake: Lake = None,
    common: Common = COMMON,
) -> None:
    """Show the history of a message in every subscription. The broker and the ledger have it."""
    if (topic is None) != (since is None):
        raise typer.BadParameter("to find a message by its id, pass --topic and --since")
    if topic is None and position.replace("@", "/").count("/") != 2:
        raise typer.BadParameter(
            f"{position!r} is not TOPIC/PARTITION/OFFSET, as in orders/0/4711; to find a message by its id, also pass "
            "--topic and --since"
        )

    async def operation(client: Client) -> list[dict[str, Any]]:
        from millstream.client.admin.message_trace import find_by_id, trace_at, trace_message

        if topic is None or since is None:
            return [await trace_message(client, position)]
        places = await find_by_id(client, position, topic, since, until, note=print_note)
        return [await trace_at(client, place) for place in places]

    documents = [_with_history(message, common, lake) for message in call_broker(common, operation)]
    if not documents:
        raise CommandFailed(f"topic {topic!r} has no message {position!r} in this period", ExitCode.NOT_FOUND)
    for document in documents:
        if common.as_json:
            print_json(document)
        else:
            _print_trace(document)


def _with_history(document: dict[str, Any], common: Common, lake: str | None) -> dict[str, Any]:
    """Complete a trace from the ledger's table, if the broker does not know everything and the table can be read."""
    lives = document["subscriptions"]
    from millstream.cli.audit import find_lake
    from millstream.client.admin.message_trace import lacks_history

    if lake is None and not lacks_history(document):
        return document
    try:
        place, _pipeline = find_lake(common, lake)
        # Imported on use: the table's reader is installed with Spark.
        from millstream.pipelines.jobs.ledger.history import add_history

        return add_history(document, place)
    except (ImportError, CommandFailed, CorruptState, OSError, ValueError) as missing:
        # Files of the table may be damaged or gone; an audit names them.
        note = f"the ledger's table cannot be read here: {missing}"
    if lake is not None:
        raise CommandFailed(note)
    for life in lives:
        if life["ledger"] and not life["is_complete"]:
            life["unknown"] = f"{life['unknown']}; {note}"
    return document


def _print_trace(document: dict[str, Any]) -> None:
    place = f"{one_line(document['topic'])}/{document['partition']}@{document['offset']}"
    if document["published_ms"] is None:
        print_line(f"{place}  {one_line(document['not_in_log'])}")
    else:
        print_line(f"{place}  published {local_time(document['published_ms'])}  id {one_line(document['id'])}")
    if not document["subscriptions"]:
        print_line("No subscription delivers this topic, or none that you may describe.")
    for subscription in document["subscriptions"]:
        print_line()
        print_line(f"{one_line(subscription['subscription'])}: {_life(subscription)}")
        for event in subscription["events"]:
            facts = [local_time(event["time_ms"]), event["kind"].replace("_", "-")]
            facts += [f"attempt {event['attempt']}"] if event["attempt"] else []
            facts += [f"by {one_line(event['worker'])}"] if event["worker"] else []
            facts += [f"until {local_time(event['until_ms'])}"] if event["until_ms"] else []
            facts += [f"({one_line(event['reason'])})"] if event["reason"] else []
            print_line("  " + "  ".join(facts))
        if subscription["unknown"]:
            print_line(f"  not known: {one_line(subscription['unknown'])}")


def _life(document: dict[str, Any]) -> str:
    facts = [document["state"]]
    if document["worker"]:
        facts.append(f"by {one_line(document['worker'])}")
    if document["client_id"] or document["address"]:
        facts.append(f"({one_line(document['client_id']) or '-'} at {one_line(document['address']) or '-'})")
    if document["until_ms"]:
        facts.append(f"until {local_time(document['until_ms'])}")
    if document["ended_ms"]:
        facts.append(f"at {local_time(document['ended_ms'])}")
    if document["dead_letter"]:
        letter = document["dead_letter"]
        facts.append(f"in {one_line(letter['topic'])}/{letter['partition']}@{letter['offset']}")
    text = " ".join(facts)
    if document["attempts"]:
        text += f", {counted(document['attempts'], 'attempt')}"
    return text + (f": {one_line(document['reason'])}" if document["reason"] else "")


def _document(topic: TopicMetadata, partition: int, stored: StoredMessage) -> dict[str, Any]:
    from millstream.client.admin.messages import as_document

    return {
        **as_document(topic.name, topic.topic_id, partition, stored.record),
        "timestamp_type": stored.timestamp_type,
        "batch": stored.batch_document(),
    }


def _print_message(topic: TopicMetadata, partition: int, stored: StoredMessage) -> None:
    from millstream.cli.message_text import readable, readable_value
    from millstream.core.ids import message_id

    record = stored.record
    print_line(f"{topic.name}/{partition}@{record.offset}")
    facts = [
        ("id", one_line(message_id(topic.topic_id, partition, record.offset, record.headers))),
        ("time", f"{local_time(record.timestamp_ms)} ({stored.timestamp_type})"),
        ("key", readable(record.key)),
        *(("header", f"{one_line(name)} = {readable(value)}") for name, value in record.headers),
        ("value", _size(record.value)),
        ("batch", _batch(stored)),
        ("producer", _producer(stored)),
    ]
    for word, text in facts:
        print_line(f"{word.ljust(8)}  {text}")
    print_line()
    print_line(readable_value(record.value))


def _size(value: bytes | None) -> str:
    return "null: a tombstone if the topic is compacted" if value is None else counted(len(value), "byte")


def _batch(stored: StoredMessage) -> str:
    batch = stored.batch_document()
    facts = [
        f"offsets {batch['first_offset']} to {batch['last_offset']}",
        counted(batch["records"], "record"),
        counted(batch["bytes"], "byte"),
        f"compression {batch['compression']}",
        f"leader epoch {batch['leader_epoch']}",
        "checksum right",
        *(word for word in ("transactional", "control") if batch[word]),
    ]
    return ", ".join(facts)


def _producer(stored: StoredMessage) -> str:
    batch = stored.batch_document()
    if batch["producer_id"] is None:
        return "not idempotent"
    return (
        f"id {batch['producer_id']}, epoch {batch['producer_epoch']}, "
        f"sequences {batch['first_sequence']} to {batch['last_sequence']}"
    )
