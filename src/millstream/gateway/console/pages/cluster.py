"""The cluster and everything beside it: nodes, transactions, clients, schemas, users, tokens, rules and quotas."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Final

from millstream.client.admin.browse import node_sums
from millstream.client.admin.clients import list_clients
from millstream.client.admin.cluster_status import AWAY, UNREACHABLE, ClusterStatus, cluster_status
from millstream.client.admin.quotas import list_quotas
from millstream.client.admin.schemas import SchemaClient
from millstream.client.admin.security import list_acls, list_tokens, list_users, revoke_token
from millstream.client.admin.transactions import (
    OPEN_STATES,
    abort_on_partition,
    abort_transaction,
    describe_transaction,
    hanging_transactions,
    list_transactions,
)
from millstream.core.acl import AclFilter, Operation, ResourceType, name_of
from millstream.core.errors import MillstreamError, NotAuthorized
from millstream.core.ids import PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.gateway.api.problem import invalid
from millstream.gateway.console.render import as_json
from millstream.gateway.console.visit import PAGE_ROWS, Answer, Done, Page, PageRoute, Visit, address, change, command
from millstream.protocol.private.schema_messages import GetSubject, ListSubjects

SHOWN: Final = 200
MEASURED_S: Final = 0.5


async def cluster(visit: Visit) -> Answer:
    """Show the nodes, and partitions in trouble; all partitions are looked at only if some are."""
    client = visit.services.client
    nodes = await node_sums(client)
    known = (await client.metadata([])).nodes
    places = {int(node_id): f"{node.host}:{node.port}" for node_id, node in known.items()}
    status: ClusterStatus | None = None
    if any(one.without_leader or one.under_replicated or one.state == UNREACHABLE for one in nodes):
        status = await cluster_status(client)
    context = {
        "nodes": nodes,
        "places": places,
        "racks": {int(node_id): node.rack for node_id, node in known.items()},
        "partitions": max((one.partitions for one in nodes), default=0),
        "warnings": sorted({text for one in nodes for text in one.warnings}),
        "away": [] if status is None else [node for node in status.nodes if node.state == AWAY],
        "troubled": [] if status is None else status.troubled[:SHOWN],
        "behind": [] if status is None else status.behind[:SHOWN],
        "more": 0 if status is None else max(0, len(status.troubled) - SHOWN),
    }
    return Page("cluster.html", context)


async def transactions(visit: Visit) -> Answer:
    """Show open transactions and, if asked for, those that no coordinator will end: that looks at every partition."""
    client = visit.services.client
    only_open = visit.text("all") != "1"
    listed = await list_transactions(client, states=sorted(OPEN_STATES) if only_open else ())
    page = visit.number("page", 0, high=1_000_000)
    shown = listed[page * PAGE_ROWS : (page + 1) * PAGE_ROWS]
    rows = []
    for one in shown:
        try:
            rows.append(
                (one, await describe_transaction(client, one.transactional_id) if one.state in OPEN_STATES else None)
            )
        except MillstreamError:
            # It ended meanwhile.
            rows.append((one, None))
    hanging, problem, looked = [], "", visit.text("hanging") == "1"
    try:
        hanging = await hanging_transactions(client) if looked else []
    except NotAuthorized as error:
        problem = str(error)
    context = {
        "transactions": rows,
        "total": len(listed),
        "page": page,
        "rows": PAGE_ROWS,
        "only_open": only_open,
        "hanging": hanging[:SHOWN],
        "looked": looked,
        "problem": problem,
        "may_abort": not visit.settings.read_only,
    }
    return Page("transactions.html", context)


async def abort(visit: Visit) -> Answer:
    """Abort a transaction, or end a hanging one on a partition."""
    client = visit.services.client
    if name := visit.text("transaction"):
        visit.confirm(name)
        before = await abort_transaction(client, name)
        words = command("transaction", "abort", name)
        return Done(address("transactions"), f"{name} is aborted; it was {before}: {words}")
    topic, partition = visit.text("topic"), visit.number("partition", 0)
    producer = visit.number("producer", 0, high=2**63 - 1)
    if not topic:
        raise invalid("name a transaction, or a topic, a partition and a producer")
    visit.confirm(topic)
    await abort_on_partition(client, TopicPartition(topic, PartitionIndex(partition)), producer)
    words = command("transaction", "abort", "--topic", topic, "--partition", partition, "--producer-id", producer)
    return Done(address("transactions"), f"The transaction of producer {producer} is ended: {words}")


async def clients(visit: Visit) -> Answer:
    """Show who is connected, and what they move."""
    found = await list_clients(visit.services.client, interval_s=MEASURED_S)
    every = visit.text("all") == "1"
    shown = [one for one in found.clients if every or one.roles]
    page = visit.number("page", 0, high=1_000_000)
    context = {
        "clients": shown[page * PAGE_ROWS : (page + 1) * PAGE_ROWS],
        "total": len(shown),
        "left_out": found.left_out,
        "page": page,
        "rows": PAGE_ROWS,
        "every": every,
    }
    return Page("clients.html", context)


async def schemas(visit: Visit) -> Answer:
    """List the subjects of the registry."""
    search, page = visit.text("search", length_max=249), visit.number("page", 0, high=1_000_000)
    found = (await SchemaClient(visit.services.client).subjects(ListSubjects())).subjects
    names = sorted(name for name in found if search.lower() in name.lower())
    shown = names[page * PAGE_ROWS : (page + 1) * PAGE_ROWS]
    context = {"subjects": shown, "total": len(names), "search": search, "page": page, "rows": PAGE_ROWS}
    return Page("schemas.html", context)


async def schema(visit: Visit) -> Answer:
    """Show a version of a subject."""
    name, version = visit.names["subject"], visit.text("version") or "latest"
    client = SchemaClient(visit.services.client)
    versions = (await client.subject(GetSubject(subject=name))).versions
    found = await client.version(name, version)
    settings = await client.settings(name, default_to_global=True)
    context = {
        "name": name,
        "versions": versions,
        "found": found,
        "text": as_json(found.schema.encode()) or found.schema,
        "compatibility": getattr(settings, "config", None),
    }
    return Page("schema.html", context)


async def access(visit: Visit) -> Answer:
    """Show users, tokens, access rules and quotas, as far as the person may see them."""
    client = visit.services.client
    problems: list[str] = []

    async def seen(asked: Awaitable[Any], empty: Any) -> Any:
        try:
            return await asked
        except MillstreamError as error:
            problems.append(str(error))
            return empty

    rules = await seen(list_acls(client, AclFilter()), [])
    context = {
        "users": sorted((await seen(list_users(client), {})).items())[:SHOWN],
        "tokens": list(await seen(list_tokens(client), []))[:SHOWN],
        "rules": [
            (
                one.principal,
                name_of(one.permission),
                name_of(one.operation),
                name_of(one.resource_type),
                one.resource_name,
                name_of(one.pattern),
                one.host,
            )
            for one in sorted(rules)[:SHOWN]
        ],
        "rules_total": len(rules),
        "quotas": [(str(entity), dict(limits)) for entity, limits in (await seen(list_quotas(client), {})).items()][
            :SHOWN
        ],
        "problems": sorted(set(problems)),
        "may_alter": await visit.may_change(Operation.ALTER, ResourceType.CLUSTER),
    }
    return Page("access.html", context)


async def revoke(visit: Visit) -> Answer:
    """Revoke an API token."""
    token = visit.text("token")
    visit.confirm(token)
    await revoke_token(visit.services.client, token)
    return Done(address("access"), f"Token {token} is revoked: {command('token', 'revoke', token)}")


ROUTES: Final = (
    PageRoute(path="/cluster", handle=cluster),
    PageRoute(path="/transactions", handle=transactions),
    change("/transactions/abort", abort),
    PageRoute(path="/clients", handle=clients),
    PageRoute(path="/schemas", handle=schemas),
    PageRoute(path="/schemas/{subject}", handle=schema),
    PageRoute(path="/access", handle=access),
    change("/access/revoke", revoke),
)
