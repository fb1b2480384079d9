"""`millstream mirror`: copy topics from another cluster, fail over from it, and switch back."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from millstream.cli.connection import call_broker
from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.cli.options import (
    COMMON,
    Common,
    Noun,
    Settings,
    Unset,
    Yes,
    confirm,
    duration,
    flag,
    parse_settings,
    read_text_file,
)
from millstream.cli.output import (
    counted,
    one_line,
    print_json,
    print_line,
    print_list,
    print_note,
    print_result,
    print_settings,
    print_table,
    print_with_notes,
    sized,
)

if TYPE_CHECKING:
    from millstream.client.admin.mirrors import MirrorClient
    from millstream.protocol.private.mirror_messages import (
        CutPartition,
        FailoverResponse,
        RemovedRange,
        ReverseRequest,
        ReverseResponse,
    )

app = Noun(help="Mirror topics of other clusters, fail over, switch back.", no_args_is_help=True)

T = TypeVar("T")
SECRETS = frozenset({"password", "token"})
PARTITIONS_SHOWN_MAX = 50
LONG_WAIT = Common(timeout=60.0)
START_S = 3.0
"""How long `create` waits until the mirror is connected to its source and knows what it cannot mirror."""

Name = Annotated[str, typer.Argument(metavar="MIRROR", help="The name of the mirror.", show_default=False)]
Topics = Annotated[
    list[str] | None,
    flag("--topics", "PATTERN", "Only copies whose whole name matches; may be repeated. Default: all."),
]
Address = Annotated[
    str,
    flag(
        "--address",
        "HOST:PORT[,...]",
        "Where the other cluster reaches this one; by default at the addresses of its nodes.",
    ),
]


@dataclass(frozen=True, kw_only=True)
class SourceAccess:
    source_user: Annotated[
        str, typer.Option(metavar="NAME", help="The user to sign in as at the source.", show_default=False)
    ] = ""
    source_password_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file with the user's password.", show_default=False)
    ] = None
    source_token_file: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file with an API token for the source.", show_default=False)
    ] = None
    source_mechanism: Annotated[
        str, typer.Option(metavar="NAME", help="SCRAM-SHA-512, SCRAM-SHA-256 or PLAIN.", show_default=False)
    ] = ""
    source_tls: Annotated[bool, typer.Option("--source-tls", help="Connect to the source with TLS.")] = False
    source_tls_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The certificate authority of the source, in PEM; implies --source-tls.",
            show_default=False,
        ),
    ] = None

    def settings(self) -> dict[str, str]:
        settings = {
            "user": self.source_user,
            "password": _read_file("--source-password-file", self.source_password_file),
            "token": _read_file("--source-token-file", self.source_token_file),
            "sasl.mechanism": self.source_mechanism,
            "tls": "true" if self.source_tls else "",
            "tls.ca": _read_file("--source-tls-ca", self.source_tls_ca),
        }
        return {name: text for name, text in settings.items() if text}


NO_ACCESS = SourceAccess()


@app.command("create")
def create(
    name: Name,
    source: Annotated[str, flag("--from", "HOST:PORT[,...]", "The brokers of the source.")],
    topics: Annotated[str, flag("--topics", "PATTERN", "Mirror topics whose whole name matches. Default: all.")] = "",
    exclude: Annotated[
        str, typer.Option(metavar="PATTERN", help="Exclude topics whose whole name matches.", show_default=False)
    ] = "",
    rename: Annotated[
        str, typer.Option(metavar="PREFIX", help="A prefix for the names of the copies.", show_default=False)
    ] = "",
    rate: Annotated[
        int, typer.Option(metavar="BYTES", min=0, help="The maximum bytes per second for each node; 0 means no limit.")
    ] = 0,
    schemas: Annotated[
        bool, typer.Option("--schemas", help="Also mirror the schema registry; the one of this cluster must be empty.")
    ] = False,
    acls: Annotated[
        bool, typer.Option("--acls", help="Also mirror access rules; this cluster must not have any yet.")
    ] = False,
    access: SourceAccess = NO_ACCESS,
    settings: Settings = None,
    common: Common = COMMON,
) -> None:
    """Mirror topics of another cluster, with groups and queues. Copies have the same offsets as their originals."""
    given = {
        **parse_settings(settings or [], secret=SECRETS),
        "from": source,
        "topics": topics,
        "exclude": exclude,
        "rename": rename,
        "rate": str(rate) if rate else "",
        "schemas": "true" if schemas else "",
        "acls": "true" if acls else "",
        **access.settings(),
    }
    chosen = {key: text for key, text in given.items() if text}
    _call_mirrors(common, lambda mirrors: mirrors.create(name, chosen))
    unconnected, problems = _call_mirrors(common, lambda mirrors: mirrors.start_problems(name, wait_s=START_S))
    if unconnected:
        problems = [
            f"It is not connected to its source yet, and keeps trying ({unconnected}); "
            f"`millstream mirror describe {name}` shows its current state"
        ]
    notes = [one_line(problem) for problem in problems]
    print_with_notes({"mirror": name}, f"Mirror {name} copies from {source}.", notes, as_json=common.as_json)


@app.command("list")
def list_(common: Common = COMMON) -> None:
    """List all mirrors and their lag."""
    # Imported on use, so that the other commands start faster.
    from millstream.client.admin.mirrors import summary_of

    described = _call_mirrors(common, lambda mirrors: mirrors.describe())
    keys = ("mirror", "state", "from", "topics", "lag", "lag_unknown", "lag_s", "bytes", "error")
    rows = [{key: row[key] for key in keys} for row in map(summary_of, described)]
    empty = "No mirrors yet; create one with: millstream mirror create"
    print_list({"mirrors": rows}, keys, [list(row.values()) for row in rows], empty=empty, as_json=common.as_json)


@app.command("describe")
def describe(name: Name, common: Common = COMMON) -> None:
    """Show a mirror's settings, its copies and the progress of each."""
    (described,) = _call_mirrors(common, lambda mirrors: mirrors.describe([name]))
    if common.as_json:
        print_json(described)
        return
    print_line(f"{one_line(name)}  ({described['state']}, from {described['from']})")
    lag = "unknown" if described["lag"] is None else f"{described['lag']:,} offsets, {described['lag_s']:.1f} s"
    if described["lag"] is not None and described["lag_unknown"]:
        lag += f", and unknown for {counted(described['lag_unknown'], 'partition')}"
    print_line(f"lag         {lag}")
    print_line(
        f"copied      {sized(described['bytes'])} since it started, {sized(int(described['bytes_per_s']))}/s now, "
        f"{counted(len(described['topics']), 'topic')}"
    )
    print_line(f"state       {counted(described['groups'], 'group')}, {counted(described['queues'], 'queue')}")
    if described["error"]:
        print_line(f"error       {one_line(described['error'])}")
    print_line()
    print_settings(described["settings"], described["overrides"])
    if described["partitions"]:
        print_line()
        keys = ("topic", "partition", "source_end", "end", "exposed", "lag", "lag_ms", "error")
        shown = described["partitions"][:PARTITIONS_SHOWN_MAX]
        print_table(keys, [[mirror[key] for key in keys] for mirror in shown])
        if len(described["partitions"]) > len(shown):
            print_line(f"… and {len(described['partitions']) - len(shown)} more; --json shows all")
    for note in described["notes"]:
        print_line(one_line(note))


@app.command("update")
def update(name: Name, settings: Settings = None, unset: Unset = None, common: Common = COMMON) -> None:
    """Change settings of a mirror, which continues with them."""
    changes: dict[str, str | None] = {
        **parse_settings(settings or [], secret=SECRETS),
        **dict.fromkeys(unset or []),
    }
    if not changes:
        raise CommandFailed("pass --set NAME=VALUE or --unset NAME", ExitCode.USAGE)
    _call_mirrors(common, lambda mirrors: mirrors.alter(name, changes))
    (described,) = _call_mirrors(common, lambda mirrors: mirrors.describe([name]))
    document, notes = {"mirror": name, "changed": sorted(changes)}, [one_line(note) for note in described["notes"]]
    print_with_notes(document, f"Changed mirror {name}.", notes, as_json=common.as_json)


@app.command("pause")
def pause(name: Name, common: Common = COMMON) -> None:
    """Stop copying for now; the copies stay readable."""
    _call_mirrors(common, lambda mirrors: mirrors.set_enabled(name, is_enabled=False))
    print_result({"mirror": name, "state": "paused"}, f"Paused mirror {name}.", as_json=common.as_json)


@app.command("resume")
def resume(name: Name, common: Common = COMMON) -> None:
    """Continue copying."""
    _call_mirrors(common, lambda mirrors: mirrors.set_enabled(name, is_enabled=True))
    print_result({"mirror": name, "state": "starting"}, f"Resumed mirror {name}.", as_json=common.as_json)


@app.command("delete")
def delete(
    name: Name,
    force: Annotated[
        bool, typer.Option("--force", help="Delete it even if `mirror reverse` needs it, after a failover.")
    ] = False,
    yes: Yes = False,
    common: Common = COMMON,
) -> None:
    """Delete a mirror that has no copies any more."""
    lost = ", and with it the way to let its source follow (mirror reverse)" if force else ""
    confirm(f"Delete mirror {name}{lost}?", unless=yes)
    _call_mirrors(common, lambda mirrors: mirrors.delete(name, force=force))
    print_result({"mirror": name, "deleted": True}, f"Deleted mirror {name}.", as_json=common.as_json)


@app.command("failover")
def failover(name: Name, topics: Topics = None, yes: Yes = False, common: Common = LONG_WAIT) -> None:
    """Make the copies writable at once. The source need not be reachable."""
    confirm(f"Make the copies of mirror {name} writable? Writers of the source are not stopped.", unless=yes)
    report = _call_mirrors(common, lambda mirrors: mirrors.fail_over(name, topics))
    if common.as_json:
        print_json(
            {
                "mirror": name,
                "source_error": report.source_error,
                "waited_ms": report.waited_ms,
                "partitions": [_cut_document(cut) for cut in report.partitions],
            }
        )
        return
    print_line(f"{counted(len(report.partitions), 'partition')} can be written, after {report.waited_ms / 1000:.1f} s.")
    _print_cuts(report.partitions)
    _warn_of_unknown(report)


@app.command("cutover")
def cutover(
    name: Name,
    topics: Topics = None,
    wait: Annotated[
        float, duration("--wait", "How long to wait until the copies have caught up. Default: 5m.", show_default=False)
    ] = 300.0,
    idle: Annotated[
        float,
        duration(
            "--idle",
            "How long the source must be idle before its writers count as stopped. Default: 5s.",
            show_default=False,
        ),
    ] = 5.0,
    yes: Yes = False,
    common: Common = LONG_WAIT,
) -> None:
    """Migrate from Kafka permanently. Waits until the copies are complete and the source is idle, then fails over.

    Nothing changes if the source is still written to when the time is up.
    """
    confirm(f"Wait until writers of the source have stopped, then make the copies of {name} writable?", unless=yes)
    result = _call_mirrors(
        common.waiting(wait + idle), lambda mirrors: mirrors.settle(name, topics, wait_s=wait, idle_s=idle)
    )
    if result is None:
        print_note("An earlier attempt has begun to make the copies writable, so nothing is waited for.")
    elif not common.as_json:
        print_line(f"The copies are complete, and nothing was written for {idle:g} s (waited {result:.1f} s).")
    report = _call_mirrors(common, lambda mirrors: mirrors.fail_over(name, topics, is_planned=True))
    late = [cut for cut in report.partitions if cut.missing]
    if common.as_json:
        cuts = [_cut_document(cut) for cut in report.partitions]
        is_known = all(cut.missing is not None for cut in report.partitions)
        complete = (not late) if late or is_known else None
        document = {"mirror": name, "waited_s": result, "partitions": cuts, "complete": complete}
        print_json({**document, "source_error": report.source_error})
    else:
        _print_cuts(report.partitions)
        _warn_of_unknown(report)
    if late:
        raise CommandFailed(
            f"the source was written to during the cutover: {late[0].topic}-{late[0].partition} lacks its last "
            f"{late[0].missing} offsets; publish them again from the source"
        )


@app.command("reverse")
def reverse(
    name: Name,
    address: Address = "",
    save_to: Annotated[str, flag("--save-to", "TOPIC", "Save dropped records in this topic of the old source.")] = "",
    access: SourceAccess = NO_ACCESS,
    yes: Yes = False,
    common: Common = LONG_WAIT,
) -> None:
    """Make the old source follow after a failover. Records that only it has are dropped.

    The --source options say how it signs in here.
    """
    confirm(
        f"Make the old source of mirror {name} follow this cluster, and drop the records that only it has?", unless=yes
    )
    request = _reversal(name, address, save_to, access, common.timeout)
    report = _call_mirrors(common, lambda mirrors: mirrors.reverse(request))
    removed = [_removed_document(lost_range) for lost_range in report.removed]
    if common.as_json:
        document = {"mirror": name, "removed": removed, "saved_to": report.saved_to, "recreated": report.recreated}
        print_json({**document, "waited_ms": report.waited_ms})
    else:
        print_line(f"The old source follows this cluster; mirror {name} is declared there now.")
        _print_removed(removed, report)
    _check_recreated(report)


@app.command("switch")
def switch(
    name: Name,
    address: Address = "",
    access: SourceAccess = NO_ACCESS,
    yes: Yes = False,
    common: Common = LONG_WAIT,
) -> None:
    """Change the direction of a mirror without loss. The source stops accepting writers, is drained, and follows.

    The --source options say how it signs in here.
    """
    confirm(f"Switch the direction of mirror {name}? Writers have to move to this cluster.", unless=yes)
    request = _reversal(name, address, "", access, common.timeout)
    report = _call_mirrors(common.waiting(10), lambda mirrors: mirrors.switch(request))
    removed = [_removed_document(lost_range) for lost_range in report.removed]
    if common.as_json:
        cuts = [_cut_document(cut) for cut in report.partitions]
        document = {"mirror": name, "removed": removed, "recreated": report.recreated, "partitions": cuts}
        print_json({**document, "waited_ms": report.waited_ms})
    else:
        print_line(f"This cluster accepts writers, after {report.waited_ms / 1000:.1f} s; the old source follows it.")
        _print_cuts(report.partitions)
        _print_removed(removed, report)
    _check_recreated(report)


def _reversal(name: str, address: str, save_to: str, access: SourceAccess, timeout_s: float) -> ReverseRequest:
    from millstream.protocol.private.mirror_messages import ReverseRequest

    return ReverseRequest(
        name=name,
        address=address,
        settings=access.settings(),
        save_to=save_to,
        timeout_ms=int(timeout_s * 900),
    )


def _check_recreated(report: ReverseResponse) -> None:
    """Raise an error that names the topics in which the old source does not follow."""
    if report.recreated:
        raise CommandFailed(
            f"the old source does not follow in {', '.join(map(one_line, report.recreated))}: deleted there and "
            "created again, it is another topic, and clients can write to both. Its records there were neither dropped "
            "nor saved; delete the topic on the side where it is not needed"
        )


def _removed_document(removed_range: RemovedRange) -> dict[str, Any]:
    return {
        "topic": removed_range.topic,
        "partition": removed_range.partition,
        "start": removed_range.start,
        "end": removed_range.end,
    }


def _print_removed(removed: list[dict[str, Any]], report: ReverseResponse) -> None:
    if not removed:
        if not report.recreated:
            print_line("The old source has no records that this cluster lacks.")
        return
    saved = f", saved to its topic {report.saved_to}" if report.saved_to else ""
    print_line(f"The old source drops these offsets{saved}:")
    keys = ("topic", "partition", "start", "end")
    print_table(keys, [[lost_range[key] for key in keys] for lost_range in removed])


def _cut_document(cut: CutPartition) -> dict[str, Any]:
    return {
        "topic": cut.topic,
        "partition": cut.partition,
        "offset": cut.offset,
        "epoch": cut.epoch,
        "dropped": cut.dropped,
        "aborted": len(cut.aborted),
        "source_end": cut.source_end,
        "missing": cut.missing,
    }


def _warn_of_unknown(report: FailoverResponse) -> None:
    if report.source_error:
        print_note(
            f"It is unknown which acknowledged records of the source are missing: {one_line(report.source_error)}"
        )


def _print_cuts(cuts: Iterable[CutPartition]) -> None:
    keys = ("topic", "partition", "offset", "epoch", "dropped", "aborted", "missing")
    print_table(keys, [[_cut_document(cut)[key] for key in keys] for cut in cuts])


def _read_file(flag: str, path: Path | None) -> str:
    return "" if path is None else read_text_file(path, flag=flag).strip()


def _call_mirrors(common: Common, operation: Callable[[MirrorClient], Awaitable[T]]) -> T:
    from millstream.client.admin.mirrors import MirrorClient

    return call_broker(common, lambda client: operation(MirrorClient(client)))
