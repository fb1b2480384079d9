"""`millstream subscription`: create, list, describe and change subscriptions; see who holds what; pull, seek, pause."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from ipaddress import ip_address
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar
from urllib.parse import urlsplit

import typer

from millstream.cli.connection import call_broker, complete_subscriptions, complete_topics
from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.cli.options import (
    COMMON,
    Common,
    IfMissing,
    Noun,
    Settings,
    Unset,
    Yes,
    confirm,
    duration,
    expand_options,
    flag,
    parse_assignments,
    parse_settings,
    read_secret,
)
from millstream.cli.output import (
    as_json_text,
    counted,
    one_line,
    print_json,
    print_line,
    print_list,
    print_note,
    print_result,
    print_settings,
    print_table,
)
from millstream.client.admin.position import POSITION_HELP
from millstream.client.admin.subscriptions import differences, place_of, start_of, summary_of, topics_text
from millstream.core.errors import MillstreamError, SubscriptionExists
from millstream.core.push import HEADERS, SECRET, URL
from millstream.core.setting import milliseconds_text, named_by_caller, parse_duration_ms, secret_names, value_text
from millstream.core.subscription import (
    ATTEMPTS,
    BACKOFF_MAX,
    BACKOFF_MIN,
    DEAD_LETTER_TOPIC,
    DELIVERY,
    EXPIRES,
    FILTER,
    IN_FLIGHT_MAX,
    LEASE,
    LEDGER,
    NO_DEAD_LETTERS,
    ORDERED,
    OWN_PREFIX,
    PAUSED,
    START,
    SubscriptionSettings,
    Verb,
    without_secrets,
)

if TYPE_CHECKING:
    from millstream.core.ids import NodeId
    from millstream.protocol.private.subscriptions import LeasedMessage, SubscriptionClient
    from millstream.protocol.wire.client import Client


_SETTING = "push-private-addresses"

_LOOPBACK = "localhost"


def private_host(url: str) -> str | None:
    """Return the host of a URL if it is a private address; None for others, and for names, which nodes resolve."""
    from millstream.gateway.push.address import is_public

    try:
        host = (urlsplit(url).hostname or "").rstrip(".")
    except ValueError:
        return None
    if host == _LOOPBACK or host.endswith(f".{_LOOPBACK}"):
        return host
    address = _address(host)
    return None if address is None or is_public(address) else host


async def push_note(client: Client, changes: Mapping[str, str | None]) -> str | None:
    host = private_host(changes.get(URL) or "")
    if host is None:
        return None
    refusing: list[str] = []
    # Only a note: the subscription was changed already.
    with suppress(MillstreamError):
        refusing = [str(node) for node in (await client.metadata([])).nodes if not await _may_push(client, node)]
    if not refusing:
        return None
    nodes_text = f"node {refusing[0]} does" if len(refusing) == 1 else f"nodes {', '.join(refusing)} do"
    return f"{one_line(host)} is a private address, to which {nodes_text} not push; allow it with --{_SETTING} true."


def _address(host: str) -> str | None:
    with suppress(ValueError):
        return str(ip_address(host.partition("%")[0]))
    # As the system parses them: 127.1, 0x7f.1 and 2130706433 are addresses too.
    with suppress(OSError):
        return socket.inet_ntoa(socket.inet_aton(host))
    return None


async def _may_push(client: Client, node: NodeId) -> bool:
    """Return whether a node pushes to private addresses; True if unknown."""
    from millstream.client.admin.topics import node_configs

    with suppress(MillstreamError):
        return (await node_configs(client, node, [_SETTING])).get(_SETTING) != "false"
    return True


_CREDENTIAL: Final = re.compile("authorization|cookie|key|password|secret|token", re.IGNORECASE)
"""Names of headers whose values are credentials."""

_SECRET_SETTINGS: Final = secret_names(SubscriptionSettings)


def _header_value(name: str, value: str) -> str:
    if value.startswith("@") or _CREDENTIAL.search(name):
        return read_secret(value, flag=f"--push-header {name}=")
    return value


def print_push(described: Mapping[str, Any]) -> None:
    rows = sorted(described.get("push", ()), key=lambda row: row["node"])
    if not rows:
        return
    keys = ("node", "state", "concurrency", "in_flight", "accepted", "refused", "failed", "unreachable")
    rates = ("accepted_per_s", "failed_per_s", "last_status")
    print_line()
    print_table((*keys, *rates), [[row[key] for key in (*keys, *rates)] for row in rows])
    for row in rows:
        if row["state"] == "parked":
            print_line(f"node {row['node']} does not push: {one_line(row['last_error'])}")
        elif row["last_error"]:
            print_line(f"last failure of node {row['node']}: {one_line(row['last_error'])}")


_FLAGS: Final = {
    FILTER: "--filter",
    LEASE: "--lease",
    ATTEMPTS: "--attempts",
    BACKOFF_MIN: "--backoff MIN",
    BACKOFF_MAX: "--backoff MAX",
    DEAD_LETTER_TOPIC: "--dead-letter",
    ORDERED: "--ordered",
    DELIVERY: "--delivery",
    IN_FLIGHT_MAX: "--in-flight",
    EXPIRES: "--expires",
    LEDGER: "--ledger",
    URL: "--push",
    SECRET: "--push-secret",
    HEADERS: "--push-header",
}
"""The flag of each setting."""

_PULLED_AT_ONCE = 4
"""A message may be as large as what a batch may decompress to, so few are held with their contents."""

_SETTLED = {Verb.ACCEPT: "Accepted", Verb.RELEASE: "Released", Verb.REJECT: "Rejected"}

T = TypeVar("T")

app = Noun(help="Create and manage subscriptions, seek, and pull messages.", no_args_is_help=True)

NewName = Annotated[str, typer.Argument(metavar="NAME", help="The name of the subscription.", show_default=False)]

Name = Annotated[
    str, typer.Argument(autocompletion=complete_subscriptions, help="The name of the subscription.", show_default=False)
]

Topics = Annotated[
    list[str] | None, flag("--topic", "TOPIC", "A topic to deliver; may be repeated.", autocompletion=complete_topics)
]


@dataclass(frozen=True, kw_only=True)
class Flags:
    """The flags of settings; None for those not given."""

    filter_: Annotated[
        str | None,
        flag(
            "--filter",
            "CONDITION",
            "Which messages to deliver, as in \"payload.total > 1000 AND headers['region'] = 'eu'\".",
        ),
    ] = None
    start: Annotated[
        str, typer.Option("--start", metavar="POSITION", help="Where to start: start, end, a time or an age.")
    ] = "end"
    lease: Annotated[float | None, duration("--lease", "How long a worker holds a message.")] = None
    attempts: Annotated[
        int | None,
        flag(
            "--attempts",
            "NUMBER",
            "The maximum number of deliveries; 0 means no limit. Default: 25, over more than an hour.",
        ),
    ] = None
    backoff: Annotated[
        str | None,
        flag("--backoff", "MIN[:MAX]", "The time between attempts, doubling up to MAX, as in 1s:5m, the default."),
    ] = None
    dead_letter: Annotated[
        str | None,
        flag(
            "--dead-letter",
            "TOPIC",
            "The topic for messages that exhaust their attempts, or none to drop them. Default: NAME-dlq.",
        ),
    ] = None
    ordered: Annotated[
        bool | None,
        typer.Option(
            "--ordered/--unordered",
            help="Deliver messages with the same key one at a time, in order.",
            show_default=False,
        ),
    ] = None
    delivery: Annotated[str | None, flag("--delivery", "GUARANTEE", "at-most-once, at-least-once or exactly-once.")] = (
        None
    )
    in_flight: Annotated[
        int | None,
        flag("--in-flight", "NUMBER", "The maximum number of messages of a partition that one worker holds."),
    ] = None
    expires: Annotated[float | None, duration("--expires", "Delete it after it has been unused for this time.")] = None
    ledger: Annotated[
        bool | None,
        typer.Option(
            "--ledger/--no-ledger",
            help="Keep every event of each message's delivery until the ledger has landed it.",
            show_default=False,
        ),
    ] = None
    push: Annotated[str | None, flag("--push", "URL", "Send messages to this address as HTTP requests.")] = None
    push_secret: Annotated[
        str | None,
        flag(
            "--push-secret", "@FILE", "Sign pushed messages with the secret in this file; @- reads the standard input."
        ),
    ] = None
    push_header: Annotated[
        list[str] | None,
        flag(
            "--push-header",
            "NAME=VALUE",
            "A header to send with pushed messages; may be repeated. NAME=@FILE reads a value that is secret.",
        ),
    ] = None

    def overrides(self) -> dict[str, str]:
        """Return the settings of the flags that are given, except where to start."""
        options: dict[str, Any] = {
            FILTER: self.filter_,
            LEASE: self.lease,
            ATTEMPTS: self.attempts,
            DEAD_LETTER_TOPIC: self.dead_letter,
            ORDERED: self.ordered,
            DELIVERY: self.delivery,
            IN_FLIGHT_MAX: self.in_flight,
            EXPIRES: self.expires,
            LEDGER: self.ledger,
        }
        if self.backoff is not None:
            least, _, most = self.backoff.partition(":")
            for name, text in ((BACKOFF_MIN, least), (BACKOFF_MAX, most)):
                options[name] = (
                    parse_duration_ms(text, name="--backoff") / 1000 if text or name == BACKOFF_MIN else None
                )
        overrides = {name: _setting_text(name, value) for name, value in options.items() if value is not None}
        if self.push is not None:
            overrides[URL] = self.push
        if self.push_secret is not None:
            overrides[SECRET] = read_secret(self.push_secret, flag="--push-secret") if self.push_secret else ""
        if self.push_header:
            values = parse_assignments(self.push_header, flag="--push-header")
            overrides[HEADERS] = json.dumps({name: _header_value(name, value) for name, value in values.items()})
        return overrides


NO_FLAGS: Final = Flags()


@app.command("create")
def create(
    name: NewName,
    topic: Topics = None,
    flags: Flags = NO_FLAGS,
    settings: Settings = None,
    if_missing: IfMissing = False,
    common: Common = COMMON,
) -> None:
    """Create a subscription: a queue over one or more topics."""
    if not topic:
        raise typer.BadParameter("name at least one topic with --topic")
    by_flags = flags.overrides()
    given = parse_settings(settings or [], secret=_SECRET_SETTINGS)
    overrides = {**by_flags, START: start_of(flags.start), **given}
    spelled = {name: _FLAGS.get(name, name) for name in by_flags}

    async def operation(client: Client) -> tuple[bool, dict[str, Any], list[str], str | None]:
        from millstream.protocol.private.subscriptions import SubscriptionClient

        subscriptions = SubscriptionClient(client)
        known = (await client.metadata(topic)).topics
        missing = [topic_name for topic_name in topic if topic_name not in known]
        created = True
        try:
            await subscriptions.create(name, topic, overrides)
        except SubscriptionExists:
            if not if_missing:
                raise
            created = False
        (described,) = await subscriptions.describe([name])
        if not created and (found := differences(described, topic, overrides, spelled=spelled)):
            raise SubscriptionExists(
                f"subscription {name!r} exists with other settings: {'; '.join(found)}; change it with "
                "millstream subscription update, or choose another name"
            )
        return created, described, missing, await push_note(client, overrides) if created else None

    with named_by_caller(spelled):
        created, described, missing, note = call_broker(common, operation)
    letters = described["settings"][DEAD_LETTER_TOPIC]
    document = {"subscription": name, "topics": topic, "created": created, "missing_topics": missing}
    text = "Created subscription" if created else "There is already a subscription"
    text = f"{text} {one_line(name)} on {', '.join(topic)}."
    print_result({**document, "dead_letter_topic": letters}, text, as_json=common.as_json)
    if created and letters == NO_DEAD_LETTERS and not common.as_json:
        print_note("Messages that exhaust their attempts are dropped (--dead-letter none).")
    for topic_name in missing:
        print_note(f"Topic {one_line(topic_name)} does not exist yet; its messages are delivered once it is created.")
    if note is not None:
        print_note(note)


@app.command("list")
def list_(
    internal: Annotated[bool, typer.Option("--internal", help="Also show Millstream's own subscriptions.")] = False,
    common: Common = COMMON,
) -> None:
    """List all subscriptions with their backlog."""
    found = [
        described
        for described in _call_subscriptions(common, lambda subscriptions: subscriptions.describe())
        if internal or not described["name"].startswith(OWN_PREFIX)
    ]
    keys = ("subscription", "topics", "backlog", "leased", "parked", "dead_lettered", "dropped", "paused")
    listed = [summary_of(described) for described in found]
    rows = [[topics_text(row) if key == "topics" else row[key] for key in keys] for row in listed]
    empty = "No subscriptions yet; create one with: millstream subscription create"
    print_list({"subscriptions": listed}, keys, rows, empty=empty, as_json=common.as_json)


@app.command("describe")
def describe(name: Name, common: Common = COMMON) -> None:
    """Show a subscription's settings and the state of its queues."""
    (described,) = _call_subscriptions(common, lambda subscriptions: subscriptions.describe([name]))
    if common.as_json:
        print_json(described)
        return
    print_line(f"{one_line(name)} on {topics_text(described) or 'what its members subscribe to'}")
    print_settings(described["settings"], described["overrides"])
    print_line()
    keys = ("topic", "partition", "oldest", "backlog", "available", "leased", "parked", "blocked", "accepted")
    more = ("released", "expired", "dead_lettered", "dropped", "filtered")
    queues = sorted(described["queues"], key=lambda queue: (queue["topic"], queue["partition"]))
    if queues:
        print_table((*keys, *more), [[queue[key] for key in (*keys, *more)] for queue in queues])
    elif not described["has_hidden_topics"]:
        print_line("No queue is open; its topics may not exist yet.")
    for reason in sorted({queue["letter_refusal"] for queue in queues if queue["refused_letters"]}):
        count = sum(queue["refused_letters"] for queue in queues if queue["letter_refusal"] == reason)
        print_note(f"{counted(count, 'message')} cannot be dead-lettered: {one_line(reason)}")
    print_push(described)


@app.command("leases")
def leases(
    name: Name,
    limit: Annotated[
        int, typer.Option("-n", metavar="NUMBER", min=1, max=10_000, help="The maximum number of messages.")
    ] = 1000,
    common: Common = COMMON,
) -> None:
    """Show which worker holds which messages. The oldest come first, with the end of each lease and the attempt."""
    held = _call_subscriptions(common, lambda subscriptions: subscriptions.leases(name, limit=limit))
    if common.as_json:
        print_json(
            {"subscription": name, "leases": [lease._asdict() for lease in held.leases], "omitted": held.omitted}
        )
        return
    if not held.leases:
        elsewhere = f" here; at the source of this copy, workers hold {counted(held.omitted, 'message')}"
        print_line(f"No worker holds a message{elsewhere if held.omitted else ''}.")
        return
    header = ("topic", "partition", "start", "end", "attempt", "ends-in", "worker", "client-id", "address")
    rows = [
        (
            *lease[:5],
            f"{lease.remaining_ms / 1000:.1f} s",
            one_line(lease.worker),
            one_line(lease.client_id) or "-",
            lease.address,
        )
        for lease in held.leases
    ]
    print_table(header, rows)
    if held.omitted:
        print_note(f"Workers hold {counted(held.omitted, 'message')} more; -n shows more.")


def update(
    name: Name,
    topic: Topics = None,
    flags: Flags = NO_FLAGS,
    settings: Settings = None,
    unset: Unset = None,
    common: Common = COMMON,
) -> None:
    """Change a subscription; other settings stay. A new filter does not affect messages that were already filtered."""
    by_flags = flags.overrides()
    changes: dict[str, str | None] = {
        **by_flags,
        **parse_settings(settings or [], secret=_SECRET_SETTINGS),
        **dict.fromkeys(unset or []),
    }
    if not changes and topic is None:
        raise typer.BadParameter("nothing to change; pass the flag of a setting, --topic, --set or --unset")

    async def operation(client: Client) -> list[str | None]:
        from millstream.protocol.private.subscriptions import SubscriptionClient

        subscriptions = SubscriptionClient(client)
        before = (await subscriptions.describe([name]))[0]["settings"] if DEAD_LETTER_TOPIC in changes else {}
        await subscriptions.alter(name, changes, topics=topic)
        left = await _describe_left_letters(client, before.get(DEAD_LETTER_TOPIC), changes.get(DEAD_LETTER_TOPIC))
        return [left, await push_note(client, changes)]

    with named_by_caller({name: _FLAGS.get(name, name) for name in by_flags}):
        notes = call_broker(common, operation)
    if common.as_json:
        changed = without_secrets({setting: value for setting, value in changes.items() if value is not None})
        print_json({"subscription": name, "changes": {**changes, **changed}, "topics": topic})
    else:
        print_line(f"Changed subscription {one_line(name)}.")
    for note in filter(None, notes):
        print_note(note)


app.command("update")(expand_options(update, without=("start",)))


async def _describe_left_letters(client: Client, before: str | None, after: str | None) -> str | None:
    """Describe the open letters that a subscription leaves in its previous dead letter topic."""
    from millstream.protocol.private.subscriptions import open_letters

    letters = 0
    if before is not None and before != after:
        # Only a note: the subscription was changed, whatever keeps the letters from being counted.
        with suppress(MillstreamError):
            letters = await open_letters(client, before)
    if not letters:
        return None
    return (
        f"Topic {before} keeps {counted(letters, 'open dead letter')}, which can be redriven only while it is the dead "
        f"letter topic; see millstream dlq show {before}."
    )


@app.command("pause")
def pause(name: Name, common: Common = COMMON) -> None:
    """Pause delivery; existing leases can be settled."""
    _set_paused(name, "true", common)


@app.command("resume")
def resume(name: Name, common: Common = COMMON) -> None:
    """Resume delivery."""
    _set_paused(name, None, common)


@app.command("delete")
def delete(
    name: Name,
    force: Annotated[
        bool, typer.Option("--force", help="Delete it even if it has open dead letters, which are kept.")
    ] = False,
    yes: Yes = False,
    common: Common = COMMON,
) -> None:
    """Delete a subscription; the messages stay in their topics. Asks for confirmation at a terminal."""
    confirm(f"Delete subscription {name} and its delivery state?", unless=yes or common.as_json)

    _call_subscriptions(common, lambda subscriptions: subscriptions.delete(name, force=force))
    print_result(
        {"subscription": name, "deleted": True}, f"Deleted subscription {one_line(name)}.", as_json=common.as_json
    )


@app.command("seek")
def seek(
    name: Name,
    to: Annotated[str, flag("--to", "POSITION", f"Where to continue: {POSITION_HELP}.")],
    topic: Annotated[str | None, flag("--topic", "TOPIC", "Only this topic.", autocompletion=complete_topics)] = None,
    partition: Annotated[
        int | None, typer.Option("--partition", "-p", min=0, help="Only this partition.", show_default=False)
    ] = None,
    common: Common = COMMON,
) -> None:
    """Move a subscription backward or forward to another position. Existing leases become invalid."""
    place = place_of(to)
    found = _call_subscriptions(
        common, lambda subscriptions: subscriptions.seek(name, place, topic=topic, partition=partition)
    )
    moved = sorted(found, key=lambda queue: (queue["topic"], queue["partition"]))
    if not moved:
        raise CommandFailed(
            f"there is nothing to move: subscription {name!r} has no queue there; millstream subscription describe "
            f"{name} shows its topics and partitions",
            ExitCode.NOT_FOUND,
        )
    if common.as_json:
        print_json({"subscription": name, "queues": moved})
        return
    keys = ("topic", "partition", "offset")
    print_table(keys, [[queue[key] for key in keys] for queue in moved])
    print_line(f"Moved subscription {one_line(name)} in {counted(len(moved), 'partition')}.")


@app.command("pull")
def pull(
    name: Name,
    number: Annotated[int, typer.Option("-n", metavar="NUMBER", min=1, help="The maximum number of messages.")] = 10,
    wait: Annotated[float, duration("--wait", "How long to wait for messages. Default: 0s.", show_default=False)] = 0.0,
    accept: Annotated[bool, typer.Option("--accept", help="Accept them once they are printed.")] = False,
    release: Annotated[bool, typer.Option("--release", help="Release them once they are printed.")] = False,
    reject: Annotated[
        str | None, flag("--reject", "REASON", "Reject them for this reason, which dead-letters them.")
    ] = None,
    common: Common = COMMON,
) -> None:
    """Lease messages like a worker. By default they are delivered again when their lease ends."""
    if sum((accept, release, reject is not None)) > 1:
        raise typer.BadParameter("--accept, --release and --reject are mutually exclusive")
    worker = f"cli/{socket.gethostname()}-{os.getpid()}"
    verb = Verb.ACCEPT if accept else Verb.RELEASE if release else Verb.REJECT if reject is not None else None

    async def operation(subscriptions: SubscriptionClient) -> list[LeasedMessage]:
        pulled: list[LeasedMessage] = []
        while len(pulled) < number:
            count, wait_ms = min(_PULLED_AT_ONCE, number - len(pulled)), 0 if pulled else int(wait * 1000)
            messages = await subscriptions.receive(name, worker, max_records=count, wait_ms=wait_ms)
            if not messages:
                break
            _show(messages, as_json=common.as_json)
            pulled += [
                message._replace(record=message.record._replace(key=None, value=None, headers=()))
                for message in messages
            ]
        if verb is not None and pulled:
            errors = await subscriptions.settle(name, worker, pulled, verb, reason=reject or "")
            for error in errors:
                if error is not None:
                    raise error
        return pulled

    pulled = _call_subscriptions(common.waiting(wait), operation)
    if not common.as_json:
        is_leased = any(message.lease_ms is not None for message in pulled)
        print_note(_summarize_pull(len(pulled), verb, is_leased=is_leased))


def _summarize_pull(count: int, verb: Verb | None, *, is_leased: bool) -> str:
    if not count:
        return "No messages now."
    if not is_leased:
        return f"{counted(count, 'message')} received at most once, and not delivered again."
    if verb is None:
        they = "it is redelivered when its lease expires" if count == 1 else "they are redelivered when leases expire"
        return f"{counted(count, 'message')} leased; {they} (--accept accepts {'it' if count == 1 else 'them'})."
    return f"{_SETTLED[verb]} {counted(count, 'message')}."


def _show(messages: Iterable[LeasedMessage], *, as_json: bool) -> None:
    from millstream.cli.message_text import as_text
    from millstream.client.admin.messages import as_document

    indent = sys.stdout.isatty()
    for message in messages:
        if as_json:
            document = as_document(message.topic, message.topic_id, message.partition, message.record)
            print_line(as_json_text({**document, "attempt": message.attempt, "deadline_ms": message.deadline_ms}))
        else:
            print_line(as_text(message.topic, message.partition, message.record, colour=False, indent=indent))


def _call_subscriptions(common: Common, operation: Callable[[SubscriptionClient], Awaitable[T]]) -> T:
    # Imported on use, so that help is quick.
    from millstream.protocol.private.subscriptions import SubscriptionClient

    return call_broker(common, lambda client: operation(SubscriptionClient(client)))


def _set_paused(name: str, value: str | None, common: Common) -> None:
    _call_subscriptions(common, lambda subscriptions: subscriptions.alter(name, {PAUSED: value}))
    print_result(
        {"subscription": name, "paused": value is not None},
        f"{'Paused' if value else 'Resumed'} subscription {one_line(name)}.",
        as_json=common.as_json,
    )


def _setting_text(name: str, value: Any) -> str:
    """Convert a flag's value to its setting; errors name the flag, in the flag's unit."""
    declared = replace(SubscriptionSettings.declared()[name], name=_FLAGS[name])
    if not isinstance(value, float):
        declared.check(value)
        return value_text(value)
    return milliseconds_text(value, declared, name=declared.name)
