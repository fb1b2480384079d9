"""`millstream cluster`: run a cluster on this machine, show its status, move partitions, rebuild what etcd lost."""

from __future__ import annotations

import asyncio
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.connection import call_broker
from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.cli.options import COMMON, AsJson, Common, Noun, Throttle, Wait, flag, note_password, parse_assignments
from millstream.cli.output import counted, print_json, print_line, print_note, print_result, print_table, sized
from millstream.core.errors import MillstreamError, NotFound

if TYPE_CHECKING:
    from millstream.cli.cluster_rebuild import Outcome
    from millstream.cli.cluster_up import LocalCluster
    from millstream.client.admin.cluster_status import ClusterStatus
    from millstream.core.cluster_plan import Plan
    from millstream.protocol.private.plan_messages import PlanResponse
    from millstream.protocol.wire.client import Client

NODES_MAX = 32
ROWS_MAX = 50
TOPICS_SHOWN = 5
POLL_S = 1.0
DEFAULT_KAFKA_PORT = 9092
DEFAULT_HTTP_PORT = 8080

Nodes = Annotated[int, typer.Option("--nodes", metavar="N", min=1, max=NODES_MAX, help="The number of nodes.")]
Data = Annotated[
    Path, typer.Option("--data", metavar="DIR", help="The folder that holds everything; created if it does not exist.")
]
Etcd = Annotated[str, flag("--etcd", "URL[,...]", "An existing etcd. Default: start one.")]
EtcdBinary = Annotated[
    str,
    flag(
        "--etcd-binary",
        "FILE",
        "The etcd binary to start, 3.5.6 or later. Default: the one on the PATH, else the packaged one.",
    ),
]
CatalogUrl = Annotated[str, flag("--catalog", "URL", "An existing PostgreSQL. Default: start one.")]
ClusterName = Annotated[str, typer.Option("--cluster", metavar="NAME", help="The name of the cluster.")]
KafkaPort = Annotated[
    int | None,
    flag(
        "--kafka-port-base",
        "PORT",
        "Kafka port of the first node, the next ones follow it; 0 picks free ports. "
        f"Default: {DEFAULT_KAFKA_PORT}, or free ports if it is taken.",
        min=0,
        max=65535 - NODES_MAX,
    ),
]
HttpPort = Annotated[
    int | None,
    flag(
        "--http-port-base",
        "PORT",
        "HTTP port of the first node, the next ones follow it; 0 picks free ports. "
        f"Default: {DEFAULT_HTTP_PORT}, or free ports if it is taken.",
        min=0,
        max=65535 - NODES_MAX,
    ),
]
Settings = Annotated[
    list[str] | None, flag("--set", "NAME=VALUE", "A flag of `serve` for every node; may be repeated.")
]

NodeNumber = Annotated[int, typer.Argument(metavar="NODE", min=0, help="The id of the node.", show_default=False)]
PlanId = Annotated[
    str, typer.Argument(metavar="PLAN", help="The id of the plan. Default: the last one.", show_default=False)
]


Locked = Annotated[
    bool,
    typer.Option(
        "--locked",
        help="Use TLS and require authentication; creates certificates and a user that may do everything, in DIR.",
    ),
]

app = Noun(
    help="Run a trial cluster, show its status, and move partitions. Also rebuild lost etcd data.",
    no_args_is_help=True,
)
plan_app = Noun(
    help="Compute which partitions to move, review it, and follow it. Nothing moves before `millstream cluster apply`.",
    no_args_is_help=True,
)
app.add_typer(plan_app, name="plan")


@app.command("up")
def up(
    nodes: Nodes = 3,
    data: Data = Path("millstream-cluster"),
    etcd: Etcd = "",
    etcd_binary: EtcdBinary = "",
    catalog: CatalogUrl = "",
    cluster: ClusterName = "millstream",
    kafka_port: KafkaPort = None,
    http_port: HttpPort = None,
    settings: Settings = None,
    locked: Locked = False,
    as_json: AsJson = False,
) -> None:
    """Start a cluster on this machine for evaluation. Runs etcd, PostgreSQL and nodes until SIGTERM or Ctrl-C.

    It runs in the foreground. Everything stops with this command, the nodes first; started again on the same folder, it
    continues with the same data. A node that exits is not restarted, but the command to do so is printed. With --json,
    one line with all addresses goes to stdout once every node is ready. All nodes share this machine: for data that
    matters, run the nodes, an etcd of three or five members, and PostgreSQL on separate machines.
    """
    from millstream.cli.cluster_up import LocalCluster, Plan, StopRequested, first_port, stop_by_signal

    plan = Plan(
        nodes=nodes,
        data=data.absolute(),
        name=cluster,
        etcd=etcd,
        etcd_binary=etcd_binary,
        catalog=catalog,
        kafka_port=first_port("--kafka-port-base", DEFAULT_KAFKA_PORT, nodes) if kafka_port is None else kafka_port,
        http_port=first_port("--http-port-base", DEFAULT_HTTP_PORT, nodes) if http_port is None else http_port,
        settings=parse_assignments(settings or [], flag="--set"),
        locked=locked,
    )
    if not as_json:
        print_note(f"starting {counted(nodes, 'node')} in {plan.data} ...")
    try:
        with stop_by_signal(), LocalCluster(plan) as running:
            if as_json:
                print_json(running.described())
            else:
                _print_running(running)
            running.watch()
    except StopRequested:
        return


def _print_running(running: LocalCluster) -> None:
    from millstream.cli.cluster_up import ADMIN

    rows = [[node.node_id, node.process.pid, node.kafka, node.http] for node in running.nodes]
    print_table(("node", "pid", "kafka", "http"), rows)
    print_line()
    if running.is_locked:
        print_line("Ready, with TLS and authentication. To administer it from another terminal:")
        print_line(f"  export MILLSTREAM_PROFILES={shlex.quote(str(running.profiles))} MILLSTREAM_PROFILE={ADMIN}")
        print_line("  millstream cluster status")
    else:
        print_line("Ready. To use it from another terminal:")
        print_line(f"  export MILLSTREAM_BROKERS={','.join(node.kafka for node in running.nodes)}")
        print_line("  millstream cluster status")
    print_line("To restart a node that was killed:")
    for node in running.nodes:
        print_line(f"  {node.command}")
    print_line("Ctrl-C stops everything.")


@app.command("status")
def status(common: Common = COMMON) -> None:
    """Show the nodes and the partitions that need attention. These lack a leader or an in-sync replica.

    Exits with 0 if every node responds and every replica is in sync, otherwise with 1.
    """
    from millstream.client.admin.cluster_status import cluster_status

    cluster = call_broker(common, cluster_status)
    if common.as_json:
        print_json(cluster.described())
    else:
        _print_status(cluster)
    if cluster.silent or cluster.troubled:
        parts = [f"no response from {counted(len(cluster.silent), 'node')}"] if cluster.silent else []
        if cluster.troubled:
            parts.append(
                f"{counted(len(cluster.troubled), 'partition')} without a leader or with a replica out of sync"
            )
        raise CommandFailed(f"not everything is in sync: {', '.join(parts)}")


def _print_status(cluster: ClusterStatus) -> None:
    controller = "none" if cluster.controller is None else f"node {cluster.controller}"
    print_line(f"Cluster {cluster.cluster_id}, controller {controller}, {counted(cluster.partitions, 'partition')}")
    print_line()
    keys = ("id", "address", "rack", "version", "state", "leads", "replicas", "behind")
    table = [[getattr(node, key) for key in keys] for node in cluster.nodes]
    for node, row in zip(cluster.nodes, table, strict=True):
        if node.state == "away":
            # A leader does not know where a node that is away stopped, and counts its whole log.
            row[-1] = None
    print_table(keys, table)
    for node in cluster.nodes:
        for reason in node.reasons:
            print_line(f"node {node.id}: {reason}")
    for text in cluster.warnings:
        print_line(f"warning: {text}")
    print_line()
    if not cluster.troubled:
        if cluster.silent:
            # What the other nodes report about partitions may predate the loss of these nodes.
            print_line(
                f"No response from {counted(len(cluster.silent), 'node')}: {_numbers(cluster.silent)}. "
                "Check again soon."
            )
        else:
            print_line("Every partition has a leader and all its replicas in sync.")
        return
    rows = [
        [
            partition.topic,
            partition.partition,
            partition.leader,
            _numbers(partition.replicas),
            _numbers(partition.in_sync),
        ]
        for partition in cluster.troubled[:ROWS_MAX]
    ]
    print_table(("topic", "partition", "leader", "replicas", "in sync"), rows)
    if len(cluster.troubled) > ROWS_MAX:
        print_line(f"... and {counted(len(cluster.troubled) - ROWS_MAX, 'partition')} more; --json lists all.")


def _numbers(nodes: Sequence[int]) -> str:
    return ",".join(map(str, nodes)) or "-"


@plan_app.command("drain")
def drain(node: NodeNumber, throttle: Throttle = None, common: Common = COMMON) -> None:
    """Plan to move everything away from a node. It then gets no leaders and replicas until `undrain`.

    New topics still use it if there are too few others. A partition that no other node can take stays and is listed;
    its leadership moves if another replica is in sync.
    """
    _plan("drain", node, throttle, common)


@plan_app.command("remove")
def remove(node: NodeNumber, throttle: Throttle = None, common: Common = COMMON) -> None:
    """Plan to remove a node that leaves permanently or is lost.

    Refused if no other node can take one of the partitions. When the plan has ended, stop the node.
    """
    _plan("remove", node, throttle, common)


@plan_app.command("balance")
def balance(throttle: Throttle = None, common: Common = COMMON) -> None:
    """Plan to balance the load of the nodes. It evens out bytes, write rates and leaders, and separates racks."""
    _plan("balance", None, throttle, common)


@plan_app.command("show")
def show(common: Common = COMMON) -> None:
    """Show the last plan, its progress, and the drained nodes."""
    from millstream.client.admin.cluster_plans import copied_bytes, current_plan

    async def operation(client: Client) -> tuple[PlanResponse, int]:
        current = await current_plan(client)
        return current, await copied_bytes(client, current)

    _print_progress(*call_broker(common, operation), as_json=common.as_json)


@app.command("apply")
def apply(plan: PlanId = "", throttle: Throttle = None, wait: Wait = False, common: Common = COMMON) -> None:
    """Apply a plan. The cluster carries it out; `millstream cluster plan show` shows its progress.

    Every step is safe on its own, and any node may fail meanwhile. Applying it again changes the throttle.
    """
    from millstream.client.admin.cluster_plans import apply_plan

    async def operation(client: Client) -> PlanResponse:
        applied = await apply_plan(client, plan, throttle_bytes=throttle)
        return await _until_ended(client, applied.plan_id) if wait else applied

    ended = call_broker(common, operation)
    if wait:
        _print_progress(ended, as_json=common.as_json)
        return
    document = {"plan": ended.plan_id, "state": ended.state, "throttle_bytes_per_s": ended.throttle_bytes}
    text = f"Plan {ended.plan_id} is running. Follow it with: millstream cluster plan show"
    print_result(document, text, as_json=common.as_json)


@app.command("cancel")
def cancel(plan: PlanId = "", common: Common = COMMON) -> None:
    """Cancel a plan. Moves in progress are reverted, completed ones stay, and the node that it drained is undrained."""
    from millstream.client.admin.cluster_plans import cancel_plan

    cancelled = call_broker(common, lambda client: cancel_plan(client, plan))
    document = {"plan": cancelled.plan_id, "state": cancelled.state}
    print_result(document, f"Plan {cancelled.plan_id} is {cancelled.state}.", as_json=common.as_json)


@app.command("undrain")
def undrain(node: NodeNumber, common: Common = COMMON) -> None:
    """Undrain a node, which may then get leaders and replicas. `cluster plan balance` gives it a share."""
    from millstream.client.admin import cluster_plans

    call_broker(common, lambda client: cluster_plans.undrain(client, node))
    print_result(
        {"node": node, "drained": False}, f"Node {node} may get leaders and replicas again.", as_json=common.as_json
    )


def replicate_topics(
    pattern: str, replicas: int, *, throttle: int | None, dry_run: bool, wait: bool, common: Common
) -> None:
    """Plan to give topics another number of replicas, and carry it out unless it is a dry run."""
    from millstream.client.admin.cluster_plans import apply_plan, compute_replication, current_plan, propose_plan

    async def operation(client: Client) -> tuple[Plan, PlanResponse | None]:
        plan = await compute_replication(client, pattern, replicas)
        if dry_run or not plan.moves:
            return plan, None
        proposed = await propose_plan(client, plan, throttle_bytes=_throttle(throttle))
        await apply_plan(client, proposed.plan_id)
        return plan, await (_until_ended(client, proposed.plan_id) if wait else current_plan(client))

    plan, applied = call_broker(common, operation)
    if applied is not None and wait:
        _print_progress(applied, as_json=common.as_json)
    else:
        _print_plan(
            plan,
            "" if applied is None else applied.plan_id,
            _throttle(throttle),
            as_json=common.as_json,
            applied=not dry_run,
        )


async def _until_ended(client: Client, plan_id: str) -> PlanResponse:
    from millstream.client.admin.cluster_plans import current_plan

    failures = 0
    while True:
        try:
            current = await current_plan(client)
            failures = 0
        except MillstreamError:
            # The node that responded may be the one that is restarted; the plan continues.
            failures += 1
            if failures > 30:
                raise
        else:
            if current.plan_id != plan_id or current.state not in ("running", "cancelling"):
                return current
        await asyncio.sleep(POLL_S)


def _plan(kind: str, node: int | None, throttle: int | None, common: Common) -> None:
    from millstream.client.admin.cluster_plans import compute_plan, propose_plan

    async def operation(client: Client) -> tuple[Plan, str]:
        plan = await compute_plan(client, kind, node=node)
        if not plan.moves and kind == "balance":
            return plan, ""
        return plan, (await propose_plan(client, plan, throttle_bytes=_throttle(throttle))).plan_id

    plan, plan_id = call_broker(common, operation)
    _print_plan(plan, plan_id, _throttle(throttle), as_json=common.as_json, applied=False)


def _throttle(bytes_per_s: int | None) -> int:
    from millstream.core.cluster_plan import THROTTLE_BYTES

    return THROTTLE_BYTES if bytes_per_s is None else bytes_per_s


def _print_plan(plan: Plan, plan_id: str, throttle: int, *, as_json: bool, applied: bool) -> None:
    from millstream.client.admin.cluster_plans import describe_plan

    document = describe_plan(plan, plan_id=plan_id or None, throttle_bytes=throttle)
    if as_json:
        print_json(document)
        return
    what = f"{plan.kind} {'node ' if plan.kind in ('drain', 'remove') else ''}{_shortened(plan.subject)}".strip()
    print_line(
        f"{what}: {counted(len(plan.moves), 'move')}, {sized(plan.moved_bytes)}, "
        f"about {_format_duration(document['seconds'])} at {sized(throttle)}/s"
    )
    if plan.moves:
        print_line()
        rows = [
            [move["topic"], move["partition"], _numbers(move["from"]), _numbers(move["to"]), sized(move["bytes"])]
            for move in document["moves"][:ROWS_MAX]
        ]
        print_table(("topic", "partition", "replicas now", "replicas then", "to send"), rows)
        if len(plan.moves) > ROWS_MAX:
            print_line(f"... and {counted(len(plan.moves) - ROWS_MAX, 'move')} more; --json lists all.")
    for text in plan.staying[:ROWS_MAX]:
        print_line(f"stays: {text}")
    for text in plan.risks:
        print_line(f"at risk: {text}")
    print_line()
    if not plan_id:
        print_line("There is nothing to move." if not plan.moves else "Nothing was started.")
    elif applied:
        print_line(f"Plan {plan_id} is running. Follow it with: millstream cluster plan show")
    else:
        print_line(f"Apply it with: millstream cluster apply {plan_id}")


def _print_progress(current: PlanResponse, copied: int = 0, *, as_json: bool) -> None:
    from millstream.client.admin.cluster_plans import describe_progress

    document = describe_progress(current, copied)
    if as_json:
        print_json(document)
    else:
        _print_state(document)
    if document["state"] == "done" and document["superseded"]:
        raise CommandFailed(
            f"{counted(document['superseded'], 'partition')} {'was' if document['superseded'] == 1 else 'were'} "
            "reassigned by other means and skipped; compute another plan"
        )


def _print_state(document: dict[str, Any]) -> None:
    if document["plan"] is None:
        print_line("There is no plan.")
    else:
        what = f"{document['kind']} {_shortened(document['subject'])}".strip()
        print_line(
            f"Plan {document['plan']} ({what}): {document['state']}, "
            f"{document['moved']} of {counted(document['moves'], 'move')} done, "
            f"{sized(document['moved_bytes'])} of {sized(document['bytes'])}"
        )
        for move in document["partitions_moving"][:ROWS_MAX]:
            print_line(
                f"  moving {move['topic']}-{move['partition']} from {_numbers(move['from'])} to {_numbers(move['to'])}"
            )
    if document["drained"]:
        print_line(
            f"Drained: {', '.join(map(str, document['drained']))}. To use one again: millstream cluster undrain NODE"
        )


def _shortened(subject: str) -> str:
    """Shorten a long list of topics, which ends with their new number of replicas."""
    names, to, replicas = subject.rpartition(" to ")
    listed = names.split(", ")
    if len(listed) <= TOPICS_SHOWN:
        return subject
    return f"{', '.join(listed[:TOPICS_SHOWN])} and {len(listed) - TOPICS_SHOWN} more topics{to}{replicas}"


def _format_duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@app.command("inventory")
def inventory(
    data: Annotated[Path, typer.Option("--data", metavar="DIR", help="The data folder of a stopped node.")],
    as_json: AsJson = False,
) -> None:
    """Inspect the logs of a stopped node. With --json, prints what `cluster rebuild --from` needs."""
    from millstream.cli.cluster_rebuild import existing_folder, inventory_of

    summary = asyncio.run(inventory_of(existing_folder(data)))
    if as_json:
        print_line(summary.to_json())
        return
    whole = "" if summary.whole else ", and a log may have a hole, since the machine went down"
    print_line(
        f"Node {summary.node_id} of the cluster {summary.cluster}: "
        f"{counted(len(summary.replicas), 'partition')}{whole}."
    )


@app.command("rebuild")
def rebuild(
    data: Annotated[
        list[Path] | None,
        typer.Option("--data", metavar="DIR", help="The data folder of a stopped node; repeat it for each."),
    ] = None,
    inventories: Annotated[
        list[Path] | None,
        typer.Option(
            "--from", metavar="FILE", help="Output of `cluster inventory --json` on another machine; may be repeated."
        ),
    ] = None,
    etcd: Annotated[str, flag("--etcd", "URL[,...]", "The new etcd.")] = "",
    catalog: Annotated[str, flag("--catalog", "URL", "The catalog of the cluster.")] = "",
    cluster: Annotated[str, flag("--cluster", "NAME", "The name of the cluster.")] = "",
    config: Annotated[
        Path | None, flag("--config", "FILE", "The config file of a node, to read these settings from.")
    ] = None,
    accept_loss: Annotated[
        bool, typer.Option("--accept-loss", help="Proceed without nodes that may hold the only copy of some messages.")
    ] = False,
    replaced: Annotated[
        list[int] | None,
        typer.Option(
            "--replace",
            metavar="ID",
            min=0,
            help="A lost node that returns with an empty folder; it gets a replica of each partition that lacks one.",
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be written, without writing it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild lost etcd data from the nodes' logs and the catalog. The new etcd must be empty.

    Use it if etcd has lost all its data and there is no snapshot. Every node must be stopped. For each partition the
    most complete log decides, and the other replicas fetch what they lack once the nodes are started again.
    """
    from millstream.cli.cluster_rebuild import rebuild as rebuild_etcd
    from millstream.core.config import Config

    note_password(catalog, flag="--catalog", instead="set catalog in the file of --config")
    options = {"etcd": etcd, "catalog": catalog, "cluster": cluster}
    settings = Config.load(flags={name: text for name, text in options.items() if text}, file=config)
    folders = [folder.absolute() for folder in data or ()]
    work = rebuild_etcd(
        settings, folders, inventories or (), replaced=replaced or (), accept_loss=accept_loss, dry_run=dry_run
    )
    outcome = asyncio.run(work)
    if as_json:
        print_json(outcome.described())
    else:
        _print_rebuilt(outcome)


def _print_rebuilt(outcome: Outcome) -> None:
    rebuilt = outcome.rebuilt
    subject = f"{counted(len(rebuilt.states), 'partition')} of {counted(len(outcome.nodes), 'node')}"
    print_line(f"{'Wrote' if outcome.written else 'Would write'} {subject}.")
    lists = (
        (rebuilt.missing, "without any log, which start empty"),
        (rebuilt.short, "with logs missing"),
        (rebuilt.fewer, "with fewer replicas than declared; --replace ID assigns them to a node that starts empty"),
    )
    for names, description in lists:
        if names:
            more = ", …" if len(names) > ROWS_MAX else ""
            print_line(f"{counted(len(names), 'partition')} {description}: {', '.join(names[:ROWS_MAX])}{more}")
    if rebuilt.unknown_topics:
        print_line(
            f"{counted(len(rebuilt.unknown_topics), 'topic')} on disk that the catalog does not know: left unchanged."
        )
    if outcome.written:
        print_line("Start the nodes now.")
    elif not rebuilt.is_safe:
        print_line("Logs are missing, so this is refused without --accept-loss.")


@app.command("adopt")
def adopt(
    data: Annotated[Path, typer.Option("--data", metavar="DIR", help="The data folder of a stopped machine.")],
    etcd: Annotated[str, flag("--etcd", "URL[,...]", "The etcd of the cluster.")] = "",
    catalog: Annotated[str, flag("--catalog", "URL", "An empty PostgreSQL database.")] = "",
    cluster: Annotated[str, flag("--cluster", "NAME", "The name of the cluster.")] = "",
    config: Annotated[
        Path | None, flag("--config", "FILE", "The config file of a node, to read these settings from.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check everything, and change nothing.")] = False,
    undo: Annotated[
        bool, typer.Option("--undo", help="Undo it, as long as no node has started in the cluster.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Make a stopped machine the first member of a cluster. Its catalog and states move, its messages stay.

    Groups, transactions, subscriptions and pipelines continue where they were. It can be repeated after any
    interruption; until it is complete, the machine cannot be started.
    """
    from millstream.broker.cluster.adoption import adopt as adopt_machine
    from millstream.core.config import Config

    if not data.is_dir():
        raise NotFound(f"{data} does not exist; pass the data folder of the machine with --data")
    if undo and dry_run:
        raise CommandFailed(
            "--dry-run shows what an adoption would do; it cannot be combined with --undo", ExitCode.USAGE
        )
    note_password(catalog, flag="--catalog", instead="set catalog in the file of --config")
    options = {"etcd": etcd, "catalog": catalog, "cluster": cluster}
    settings = Config.load(flags={name: text for name, text in options.items() if text}, file=config)
    result = asyncio.run(adopt_machine(settings, data.absolute(), dry_run=dry_run, undo=undo))
    if as_json:
        print_json({"undone": True} if result is None else {**dataclasses.asdict(result), "written": not dry_run})
        return
    if result is None:
        print_line(f"{data} is a standalone machine again. The cluster's etcd and catalog may be deleted.")
        return
    verb = "Would move" if dry_run else "Moved"
    print_line(f"{verb} {counted(result.topics, 'topic')} with {counted(result.partitions, 'partition')}.")
    if dry_run:
        return
    flags = f"--data {data} {result.flags} --cluster {settings.cluster}"
    print_line(f"Start it with: millstream serve {flags} --etcd URL --catalog URL")
    if result.has_secrets:
        print_line("The catalog has sealed secrets: start every node with their keys, using --secrets-key-file.")
    print_line("To go back before that: the same command with --undo. Afterwards, raise the replicas of topics.")
