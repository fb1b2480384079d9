"""`millstream cluster`: run a cluster on this machine, show its status, move partitions, rebuild what etcd lost."""

from __future__ import annotations

import asyncio
import dataclasses
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millstream.cli import cluster_plan
from millstream.cli.connection import call_broker
from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.cli.options import COMMON, AsJson, Common, Noun, flag, parse_assignments
from millstream.cli.output import counted, print_json, print_line, print_note, print_table
from millstream.core.errors import NotFound

if TYPE_CHECKING:
    from millstream.cli.cluster_rebuild import Outcome
    from millstream.cli.cluster_up import LocalCluster
    from millstream.client.admin.cluster_status import ClusterStatus

NODES_MAX = 32
ROWS_MAX = 50
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
app.add_typer(cluster_plan.plan_app, name="plan")
app.command("apply")(cluster_plan.apply)
app.command("cancel")(cluster_plan.cancel)
app.command("undrain")(cluster_plan.undrain)


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
        [one.topic, one.partition, one.leader, _numbers(one.replicas), _numbers(one.in_sync)]
        for one in cluster.troubled[:ROWS_MAX]
    ]
    print_table(("topic", "partition", "leader", "replicas", "in sync"), rows)
    if len(cluster.troubled) > ROWS_MAX:
        print_line(f"... and {counted(len(cluster.troubled) - ROWS_MAX, 'partition')} more; --json lists all.")


def _numbers(nodes: tuple[int, ...]) -> str:
    return ",".join(map(str, nodes)) or "-"


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

    given = {"etcd": etcd, "catalog": catalog, "cluster": cluster}
    settings = Config.load(flags={name: text for name, text in given.items() if text}, file=config)
    folders = [one.absolute() for one in data or ()]
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
    given = {"etcd": etcd, "catalog": catalog, "cluster": cluster}
    settings = Config.load(flags={name: text for name, text in given.items() if text}, file=config)
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
