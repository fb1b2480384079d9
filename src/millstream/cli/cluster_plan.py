"""`millstream cluster plan`, `apply`, `cancel` and `undrain`: move partitions."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.connection import call_broker
from millstream.cli.exit_code import CommandFailed
from millstream.cli.options import COMMON, Common, Noun, Throttle, Wait
from millstream.cli.output import counted, print_json, print_line, print_result, print_table, sized

if TYPE_CHECKING:
    from millstream.core.cluster_plan import Plan
    from millstream.protocol.private.plan_messages import PlanResponse
    from millstream.protocol.wire.client import Client

ROWS_MAX = 50
POLL_S = 1.0

NodeNumber = Annotated[int, typer.Argument(metavar="NODE", min=0, help="The id of the node.", show_default=False)]
PlanId = Annotated[
    str, typer.Argument(metavar="[PLAN]", help="The id of the plan. Default: the last one.", show_default=False)
]
plan_app = Noun(
    help="Compute which partitions to move, review it, and follow it. Nothing moves before `millstream cluster apply`.",
    no_args_is_help=True,
)


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


def cancel(plan: PlanId = "", common: Common = COMMON) -> None:
    """Cancel a plan. Moves in progress are reverted, completed ones stay, and the node that it drained is undrained."""
    from millstream.client.admin.cluster_plans import cancel_plan

    cancelled = call_broker(common, lambda client: cancel_plan(client, plan))
    document = {"plan": cancelled.plan_id, "state": cancelled.state}
    print_result(document, f"Plan {cancelled.plan_id} is {cancelled.state}.", as_json=common.as_json)


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
    from millstream.core.errors import MillstreamError

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
            [move["topic"], move["partition"], _nodes(move["from"]), _nodes(move["to"]), sized(move["bytes"])]
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
        for one in document["partitions_moving"][:ROWS_MAX]:
            print_line(f"  moving {one['topic']}-{one['partition']} from {_nodes(one['from'])} to {_nodes(one['to'])}")
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


TOPICS_SHOWN = 5


def _nodes(nodes: list[int]) -> str:
    return ",".join(map(str, nodes)) or "-"


def _format_duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
