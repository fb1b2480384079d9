"""Topics: the list, and one topic with its partitions, settings and consumers."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from millstream.client.admin.browse import topics_page
from millstream.client.admin.dead_letter import check_no_open_letters
from millstream.client.admin.subscriptions import summary_of
from millstream.client.admin.topic_notes import change_notes, deletion_notes, pipelines_reading
from millstream.client.admin.topics import (
    CARD,
    alter_topic,
    check_settings_exist,
    create_topic,
    delete_topic,
    describe_topic,
    find_topic,
    grow_topic,
)
from millstream.client.admin.transactions import active_producers
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import MillstreamError, NotAuthorized
from millstream.core.subscription import OWN_PREFIX
from millstream.core.topic import SCHEMA_KEY, SCHEMA_VALIDATE, SCHEMA_VALUE, TopicSettings, check_topic_name
from millstream.gateway.api.problem import invalid
from millstream.gateway.console.visit import (
    PAGE_ROWS,
    Page,
    PageRoute,
    Response,
    Visit,
    address,
    change,
    done,
    setting_rows,
)
from millstream.protocol.private.browse_messages import ORDERS
from millstream.protocol.wire.cluster_metadata import TopicMetadata
from millstream.protocol.wire.group_offsets import committed_by_group, list_groups

GROUPS_MAX: Final = 1000
"""Groups whose offsets a topic's page looks at."""
PARTITIONS_SHOWN: Final = 200
PRODUCERS_SHOWN: Final = 50
BROKER_DECIDES: Final = -1

_DECLARED: Final = TopicSettings.declared()
_TOPIC: Final = ResourceType.TOPIC


async def list_all(visit: Visit) -> Response:
    """List topics, searched, ordered and paged by the nodes."""
    internal = visit.text("internal") == "1"
    order, descending = visit.choice("order", ORDERS), visit.text("down") == "1"
    listing = await topics_page(
        visit.services.client,
        search=visit.search,
        internal=internal,
        order=order,
        descending=descending,
        offset=visit.page * PAGE_ROWS,
        limit=PAGE_ROWS,
    )
    rates = {
        topic.name: series.now
        for topic in listing.topics
        if (series := visit.history.topics.get(topic.name)) is not None
    }
    context = {
        **visit.paging(listing.total),
        "topics": listing.topics,
        "rates": rates,
        "internal": internal,
        "order": order,
        "descending": descending,
        "may_create": await visit.may_change(Operation.CREATE, ResourceType.CLUSTER),
    }
    return Page("topics.html", context)


async def create(visit: Visit) -> Response:
    name = visit.text("name")
    check_topic_name(name)
    partitions = visit.number("partitions", BROKER_DECIDES, low=1, high=10_000)
    await create_topic(visit.services.client, name, partitions=partitions, replication=BROKER_DECIDES, settings={})
    flags = ("--partitions", partitions) if partitions != BROKER_DECIDES else ()
    return done(address("topics", name), f"Topic {name} is created", "topic", "create", name, *flags)


async def show(visit: Visit) -> Response:
    """Show a topic's partitions, card and traffic."""
    name = visit.names["topic"]
    client = visit.services.client
    tabs = await visit.topic_tabs(name)
    described, listing = await asyncio.gather(
        describe_topic(
            client,
            name,
            advice="the list of topics shows those that do",
            # Damage is among the reasons that the overview shows.
            with_damage=False,
            with_settings=tabs["may_see_settings"],
        ),
        topics_page(client, names=[name], partitions=True),
    )
    series = visit.history.topics.get(name)
    partitions = described["partitions"]
    context = {
        **tabs,
        "described": described,
        "partitions": partitions[:PARTITIONS_SHOWN],
        "omitted": max(0, len(partitions) - PARTITIONS_SHOWN),
        "numbers": next(iter(listing.topics), None),
        "schemas": [
            (field, described["settings"][key])
            for field, key in (("key", SCHEMA_KEY), ("value", SCHEMA_VALUE))
            if described["settings"].get(key)
        ],
        "validates": described["settings"].get(SCHEMA_VALIDATE) or "id",
        "series": series,
        "may_delete": await visit.may_change(Operation.DELETE, _TOPIC, name),
        "notes": [],
    }
    if context["may_delete"]:
        context["notes"] = await deletion_notes(client, await find_topic(client, name))
    return Page("topic.html", context)


async def settings(visit: Visit) -> Response:
    """Show every setting with its meaning and its default."""
    name = visit.names["topic"]
    described = await describe_topic(visit.services.client, name, with_damage=False)
    rows = [row for row in setting_rows(described, _DECLARED) if row["name"] not in CARD.values()]
    context = {
        **await visit.topic_tabs(name),
        "described": described,
        "rows": rows,
        "may_alter": await visit.may_change(Operation.ALTER_CONFIGS, _TOPIC, name),
        "may_grow": await visit.may_change(Operation.ALTER, _TOPIC, name),
    }
    return Page("topic_settings.html", context)


async def alter(visit: Visit) -> Response:
    """Change one setting, or the number of partitions."""
    name, key, value = visit.names["topic"], visit.text("setting"), visit.text("setting_value")
    client = visit.services.client
    topic = await find_topic(client, name)
    if visit.text("partitions"):
        number = visit.number("partitions", 0, low=1, high=10_000)
        await grow_topic(client, name, number)
        notes = await change_notes(client, topic, (), number)
        flags: tuple[object, ...] = ("--partitions", number)
    else:
        if not key:
            raise invalid("choose a setting")
        await check_settings_exist(client, name, [key])
        reset = visit.text("reset") == "1"
        await alter_topic(client, name, {key: None if reset else value})
        notes = await change_notes(client, topic, {key}, None)
        flags = ("--unset", key) if reset else ("--set", f"{key}={value}")
    text = f"Topic {name} is changed" + (f". {' '.join(notes)}" if notes else "")
    return done(address("topics", name, "settings"), text, "topic", "alter", name, *flags)


async def delete(visit: Visit) -> Response:
    name = visit.names["topic"]
    visit.confirm(name)
    client = visit.services.client
    await find_topic(client, name)
    await check_no_open_letters(client, name)
    await delete_topic(client, name)
    return done(address("topics"), f"Topic {name} is deleted", "topic", "delete", name)


async def consumers(visit: Visit) -> Response:
    """Show the readers of a topic with their lag, and its recent producers."""
    name = visit.names["topic"]
    client = visit.services.client
    topic = await find_topic(client, name)
    described = await visit.services.subscriptions.describe(without_silent=True)
    queues = [
        summary_of({**subscription, "queues": [queue for queue in subscription["queues"] if queue["topic"] == name]})
        for subscription in described
        if name in subscription["topics"] and not subscription["name"].startswith(OWN_PREFIX)
    ]
    groups, omitted = await _groups(visit, topic)
    head = await visit.topic_tabs(name)
    producers = await active_producers(client, name) if head["may_read"] else []
    context = {
        **head,
        "producers": producers[:PRODUCERS_SHOWN],
        "producers_left": max(0, len(producers) - PRODUCERS_SHOWN),
        "queues": queues,
        "groups": groups,
        "omitted": omitted,
        "pipelines": await pipelines_reading(client, topic),
    }
    return Page("topic_consumers.html", context)


async def _groups(visit: Visit, topic: TopicMetadata) -> tuple[list[dict[str, Any]], int]:
    client = visit.services.client
    try:
        listed = await list_groups(client)
    except NotAuthorized:
        return [], 0
    names = [name for name, _, kind in listed if kind != "share"][:GROUPS_MAX]
    committed = await committed_by_group(client, names)
    ends = await client.list_offsets(topic.name, dict.fromkeys(topic.partitions, -1))
    rows = []
    for name, state, kind in listed[:GROUPS_MAX]:
        offsets = committed.get(name)
        if offsets is None or isinstance(offsets, MillstreamError):
            continue
        here = {where.partition: offset for where, offset in offsets.items() if where.topic == topic.name}
        if here:
            lag = sum(max(0, ends[index].offset - offset) for index, offset in here.items() if index in ends)
            known = {"committed": len(here), "partitions": len(topic.partitions)}
            rows.append({"group": name, "state": state, "type": kind, "lag": lag, **known})
    return rows, max(0, len(listed) - GROUPS_MAX)


ROUTES: Final = (
    PageRoute(path="/topics", handle=list_all),
    change("/topics", create),
    PageRoute(path="/topics/{topic}", handle=show),
    PageRoute(path="/topics/{topic}/settings", handle=settings),
    change("/topics/{topic}/settings", alter),
    change("/topics/{topic}/delete", delete),
    PageRoute(path="/topics/{topic}/consumers", handle=consumers),
)
