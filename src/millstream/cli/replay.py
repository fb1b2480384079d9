"""`millstream replay`: publish the messages of a topic again, into another topic."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli.connection import complete_topics
from millstream.cli.exit_code import CommandFailed
from millstream.cli.options import COMMON, Common, flag
from millstream.cli.output import counted, one_line, print_result
from millstream.cli.pipeline_run import Stages, refuse_without_packages, signed_in
from millstream.client.admin.position import Kind, parse_age_ms, parse_position
from millstream.core.errors import InvalidRequest, LostData, UnreadableData

if TYPE_CHECKING:
    from millstream.pipelines.jobs.replay import ReplayOrder

FromTopic = Annotated[
    str | None, flag("--from-topic", "TOPIC", "Replay the log of this topic.", autocompletion=complete_topics)
]
FromTable = Annotated[
    str | None,
    flag(
        "--from-table",
        "TOPIC",
        "Replay the lake table that this topic is landed in, with what retention has deleted from the log.",
    ),
]
Into = Annotated[
    str, typer.Option("--into", metavar="TOPIC", autocompletion=complete_topics, help="The topic to publish to.")
]
Where = Annotated[
    str,
    typer.Option("--where", metavar="SQL", help="Only messages that match this filter, as in payload.total > 100."),
]
Since = Annotated[str | None, flag("--since", "TIME", "Only messages since a time.")]
Until = Annotated[str | None, flag("--until", "TIME", "Only messages before a time.")]
Rate = Annotated[str | None, flag("--rate", "N/s", "The maximum number of messages per second.")]
Named = Annotated[
    str,
    typer.Option(
        "--name", metavar="NAME", help="The name under which it resumes. Default: derived from the other options."
    ),
]
Dry = Annotated[bool, typer.Option("--dry-run", help="Only count what would be published.")]

_RATE = re.compile(r"(\d+(?:\.\d+)?)(?:/s)?\Z")


def replay(
    into: Into,
    from_topic: FromTopic = None,
    from_table: FromTable = None,
    where: Where = "",
    since: Since = None,
    until: Until = None,
    rate: Rate = None,
    name: Named = "",
    dry: Dry = False,
    common: Common = COMMON,
) -> None:
    """Publish messages of a topic again, exactly once. They are read from its log or its lake table.

    The same command resumes a replay that was interrupted; one that is complete publishes nothing again.
    """
    topic = from_topic or from_table
    if topic is None or (from_topic and from_table):
        raise typer.BadParameter("pass either --from-topic or --from-table")
    since_ms, until_ms = _time_ms(since, "--since"), _time_ms(until, "--until")
    if since_ms is not None and until_ms is not None and since_ms >= until_ms:
        raise typer.BadParameter("--since must be before --until")
    refuse_without_packages()
    from millstream.core.topic import check_topic_name
    from millstream.pipelines.jobs.replay import Replay, ReplayOrder

    order = ReplayOrder(
        topic=topic,
        into=into,
        from_table=from_table is not None,
        where=where,
        since_ms=since_ms,
        until_ms=until_ms,
        rate=_rate(rate),
        name=name,
    )
    check_topic_name(order.title, noun="replay")
    started = time.monotonic()
    with signed_in(common.brokers, common.timeout) as (_, _, access):
        made = Replay(order, common.brokers, access)
        with Stages(order.title) as stages, _advised(order):
            done = made.run(
                lambda at: stages.move(f"{at.written:,} of {at.examined:,} messages match, {at.left:,} are left"),
                dry=dry,
            )
    document = {
        "replay": order.title,
        "into": into,
        "examined": done.examined,
        "published": 0 if dry else done.written,
        "matched": done.written,
        "dry_run": dry,
        "seconds": round(time.monotonic() - started, 3),
    }
    if dry:
        text = f"Of {counted(done.examined, 'message')}, {done.written:,} would be published to {one_line(into)}."
    elif not done.examined:
        text = f"Replay {one_line(order.title)} is complete already; pass another --name to publish it again."
    else:
        text = f"Of {counted(done.examined, 'message')}, {done.written:,} were published to {one_line(into)}."
    print_result(document, text, as_json=common.as_json)


@contextmanager
def _advised(order: ReplayOrder) -> Iterator[None]:
    """Add advice about missing messages in terms of this command's flags."""
    table = f"--from-table {one_line(order.topic)} replays what a pipeline has landed of the topic"
    try:
        yield
    except UnreadableData as error:
        raise CommandFailed(
            f"{error.finding}. {table}; --since, with a later time, replays what follows them"
        ) from error
    except LostData as error:
        raise CommandFailed(f"{error.finding}. The same command continues without them; {table}") from error


def _time_ms(text: str | None, flag: str) -> int | None:
    if text is None:
        return None
    if parse_age_ms(text.strip()) is not None:
        raise typer.BadParameter(f"{flag} {text} would change when the replay resumes; pass an absolute time")
    with suppress(InvalidRequest):
        position = parse_position(text)
        if position.kind is Kind.TIME:
            return position.value
    raise typer.BadParameter(f"{flag} must be a time such as 2026-01-31T12:00:00Z, not {text!r}")


def _rate(text: str | None) -> float:
    if text is None:
        return 0.0
    match = _RATE.match(text.strip())
    if match is None or not float(match[1]):
        raise typer.BadParameter(f"--rate must be a number of messages per second, such as 500/s, not {text!r}")
    return float(match[1])
