"""The overview: rates, backlogs, nodes, and warnings with remedies; and the stream that refreshes pages."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any, Final, NamedTuple

from millstream.client.admin.browse import node_summaries
from millstream.client.admin.cluster_status import UNREACHABLE
from millstream.client.admin.dead_letter import DeadLetterTopic, count_letters
from millstream.client.admin.mirrors import MirrorClient
from millstream.client.admin.pipelines import PipelineClient, pipeline_warnings, summary_of
from millstream.client.admin.subscriptions import push_problems
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import MillstreamError, NotAuthorized
from millstream.gateway.api.event_stream import event
from millstream.gateway.api.route import EVENT_STREAM, Lane
from millstream.gateway.console.pages.subscriptions import rows_of
from millstream.gateway.console.render import age, counted
from millstream.gateway.console.visit import Download, Page, PageRoute, Response, Visit, address
from millstream.protocol.private.browse_messages import NodeSummaryResponse

OLD_S: Final = 300.0
"""A message that waits for longer than this is worth a warning."""


class ConsoleWarning(NamedTuple):
    """A problem, as a sentence, and the page that helps to solve it."""

    text: str
    href: str
    label: str
    is_bad: bool = False


async def show(visit: Visit) -> Response:
    """Show the state of everything that the person may see."""
    return Page("overview.html", await visit.shared(lambda: _state(visit)))


async def _state(visit: Visit) -> dict[str, Any]:
    may_describe = await visit.may(Operation.DESCRIBE, ResourceType.CLUSTER)
    nodes: list[NodeSummaryResponse] = []
    if may_describe:
        visit.history.record_visit()
        nodes = await node_summaries(visit.services.client)
    # Users open this page when a node is down, so parts that need that node are omitted instead of failing.
    missing: list[str] = []
    described = await _or_empty(visit.services.subscriptions.describe(without_silent=True), missing)
    rows = rows_of(described)
    letters = await _or_empty(count_letters(visit.services.client, described), missing)
    pipelines = await _or_empty(PipelineClient(visit.services.client).describe(), missing)
    mirrors = await _or_empty(MirrorClient(visit.services.client).describe(), missing)
    return {
        "may_describe": may_describe,
        "nodes": nodes,
        "partitions": max((node.partitions for node in nodes), default=0),
        "history": visit.history if may_describe else None,
        "stored": sum(node.stored_bytes for node in nodes),
        "disk_free": min((node.disk_free_bytes for node in nodes if node.disk_bytes), default=None),
        "waiting": sorted((row for row in rows if row["backlog"]), key=lambda row: -row["backlog"])[:5],
        "backlog": sum(row["backlog"] for row in rows),
        "oldest_s": max((row["oldest_s"] for row in rows if row["oldest_s"] is not None), default=None),
        "letters": sum(letter.letters for letter in letters),
        "dropped": sum(row["dropped"] for row in rows),
        "pipelines": [summary_of(pipeline) for pipeline in pipelines],
        "top": visit.history.top(5) if may_describe else [],
        "warnings": [
            *(ConsoleWarning(f"Incomplete: {text}", address("cluster"), "See the cluster", True) for text in missing),
            *_push_warnings(described),
            *_warnings(nodes, rows, letters, pipelines, mirrors),
        ],
    }


async def _or_empty(request: Any, missing: list[str]) -> list[Any]:
    """Return the visible items; none without the rights, or if they are unavailable, which is recorded."""
    try:
        items: list[Any] = await request
    except NotAuthorized:
        return []
    except MillstreamError as error:
        missing.append(str(error))
        return []
    return items


def _push_warnings(described: list[dict[str, Any]]) -> list[ConsoleWarning]:
    return [
        ConsoleWarning(text, address("subscriptions", name), "See the subscription", True)
        for name, text in push_problems(described)
    ]


def _warnings(
    nodes: list[NodeSummaryResponse],
    rows: list[dict[str, Any]],
    letters: list[DeadLetterTopic],
    pipelines: list[dict[str, Any]],
    mirrors: list[dict[str, Any]],
) -> list[ConsoleWarning]:
    warnings: list[ConsoleWarning] = []
    cluster = address("cluster")
    for node in nodes:
        if node.state == UNREACHABLE:
            warnings.append(ConsoleWarning(f"Node {node.node_id} does not respond.", cluster, "See the cluster", True))
        warnings += [
            ConsoleWarning(f"Node {node.node_id}: {reason}.", cluster, "See the cluster", True)
            for reason in node.reasons
        ]
    orphans = max((node.without_leader for node in nodes), default=0)
    if orphans:
        text = f"{counted(orphans, 'partition')} without a leader cannot be read or written."
        warnings.append(ConsoleWarning(text, cluster, "See the cluster", True))
    lacking = max((node.under_replicated for node in nodes), default=0)
    if lacking:
        text = f"{counted(lacking, 'partition')} with replicas that are not in sync."
        warnings.append(ConsoleWarning(text, cluster, "See the cluster"))
    texts = sorted({text for node in nodes for text in node.warnings})
    warnings += [ConsoleWarning(f"{text[:1].upper()}{text[1:]}.", cluster, "See the cluster") for text in texts]
    for letter in letters:
        if letter.letters:
            named = ", ".join(letter.subscriptions[:3]) or letter.topic
            text = f"{counted(letter.letters, 'open dead letter')} of {named}: these messages have failed permanently."
            warnings.append(ConsoleWarning(text, address("dead-letters", letter.topic), "See why and redrive"))
        for refusal in letter.refusals:
            warnings.append(
                ConsoleWarning(
                    f"{letter.topic} refuses letters: {refusal}",
                    address("topics", letter.topic, "settings"),
                    "Settings",
                    True,
                )
            )
    for row in rows:
        page = address("subscriptions", row["subscription"])
        if row["paused"] and row["backlog"]:
            text = f"{row['subscription']} is paused, and {counted(row['backlog'], 'message')} wait."
            warnings.append(ConsoleWarning(text, page, "Resume it"))
        elif row["backlog"] and (row["oldest_s"] or 0) > OLD_S:
            who = (
                "no worker is waiting for messages"
                if not row["leased"] and not row["waiting_workers"]
                else "see who holds it"
            )
            text = f"{row['subscription']}: the oldest message has waited {age(row['oldest_s'])}; {who}."
            warnings.append(ConsoleWarning(text, page, "See the subscription"))
    for warned in pipeline_warnings(pipelines, now_ms=time.time() * 1000):
        page = address("pipelines", *warned.names) if len(warned.names) == 1 else address("pipelines")
        label = "See the pipeline" if len(warned.names) == 1 else "See the pipelines"
        warnings.append(
            ConsoleWarning(f"{warned.text[:1].upper()}{warned.text[1:300].rstrip('.')}.", page, label, True)
        )
    for mirror in mirrors:
        if mirror["error"]:
            text = f"Mirror {mirror['mirror']} is {mirror['state']}: {mirror['error'][:200]}."
            warnings.append(ConsoleWarning(text, address("mirrors", mirror["mirror"]), "See the mirror", True))
    return sorted(warnings, key=lambda warning: not warning.is_bad)[:20]


async def events(visit: Visit) -> Response:
    """Notify a browser of new numbers."""
    visit.history.record_visit()
    return Download(_sampled(visit), EVENT_STREAM)


async def _sampled(visit: Visit) -> AsyncGenerator[bytes, None]:
    while True:
        await visit.history.sampled()
        yield event("sampled", b"{}")


ROUTES: Final = (
    PageRoute(path="/", handle=show),
    PageRoute(path="/events", handle=events, lane=Lane.WAIT),
)
