"""`millstream topic`: create, list, describe, alter and delete topics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.connection import call_broker, complete_topics
from millstream.cli.options import COMMON, Common, Noun, Throttle, Wait, Yes, confirm, flag, parse_assignments
from millstream.cli.output import counted, print_json, print_line, print_list, print_table, print_with_notes
from millstream.core.errors import TopicExists, TopicNotAuthorized

if TYPE_CHECKING:
    from millstream.protocol.wire.client import Client
    from millstream.protocol.wire.cluster_metadata import TopicMetadata

BROKER_DECIDES = -1
_LIST_ADVICE = "millstream topic list shows those that do"

app = Noun(help="Create, list, describe, alter and delete topics.", no_args_is_help=True)

NewName = Annotated[str, typer.Argument(metavar="NAME", help="The name of the topic.", show_default=False)]
Name = Annotated[str, typer.Argument(autocompletion=complete_topics, help="The name of the topic.", show_default=False)]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A setting, such as retention.ms=86400000; may be repeated."),
]
Owner = Annotated[str | None, flag("--owner", "TEXT", "Who is responsible for the topic.")]
Description = Annotated[str | None, flag("--description", "TEXT", "What the topic is about.")]
Contract = Annotated[str | None, flag("--contract", "LINK", "A link to the definition of its messages.")]
Schemas = Annotated[
    list[str] | None,
    flag(
        "--schema",
        "FIELD=SUBJECT",
        "The subject whose schemas its values or keys must use: value=orders-value or key=orders-key; an empty "
        "subject removes it.",
    ),
]
Validate = Annotated[
    str | None,
    flag(
        "--validate",
        "HOW",
        "How messages are checked before they are stored: id (they name a schema of the subject), content (they also "
        "decode and satisfy it) or off. The default is id.",
    ),
]

Partitions = Annotated[
    int | None,
    flag("--partitions", "NUMBER", "How many partitions. Default: the node's default.", min=1, max=2**31 - 1),
]
Replication = Annotated[
    int | None,
    flag("--replication", "NUMBER", "How many replicas. Default: the node's default.", min=1, max=2**15 - 1),
]
Land = Annotated[
    bool, typer.Option("--land", help="Land its messages in a lake table, with a pipeline called land-NAME.")
]


@app.command("create")
def create(
    name: NewName,
    partitions: Partitions = None,
    replication: Replication = None,
    owner: Owner = None,
    description: Description = None,
    contract: Contract = None,
    schemas: Schemas = None,
    validate: Validate = None,
    land: Land = False,
    settings: Settings = None,
    if_missing: Annotated[
        bool, typer.Option("--if-not-exists", help="Succeed without changes if the topic exists.")
    ] = False,
    common: Common = COMMON,
) -> None:
    """Create a topic."""
    overrides = parse_assignments(settings or [], flag="--set")
    named_settings = {**_card(owner, description, contract), **_schema_rule(schemas, validate)}
    overrides.update({key: text for key, text in named_settings.items() if text})

    async def operation(client: Client) -> tuple[bool, TopicMetadata | None, list[str]]:
        from millstream.client.admin.topic_notes import creation_notes, schema_notes
        from millstream.client.admin.topics import create_topic, find_topic

        created = True
        if land:
            await _land(client, name, validate_only=True)
        try:
            await create_topic(
                client,
                name,
                partitions=partitions or BROKER_DECIDES,
                replication=replication or BROKER_DECIDES,
                settings=overrides,
            )
        except TopicExists:
            if not if_missing:
                raise
            created = False
        if land:
            await _land(client, name)
        try:
            topic = await find_topic(client, name)
        except TopicNotAuthorized:
            # The right to create a topic does not include the right to describe it.
            return created, None, ["You may not describe it."]
        notes = await creation_notes(client, topic) if created and replication is None else []
        return created, topic, [*notes, *(await schema_notes(client, name, overrides) if created else ())]

    created, topic, notes = call_broker(common, operation)
    made: dict[str, object] = {"topic": name, "id": None, "partitions": None, "replication": None, "created": created}
    text = "Created topic" if created else "There is already a topic"
    size = landed = ""
    if topic is not None:
        number = len(topic.partitions)
        made |= {"id": str(topic.topic_id), "partitions": number, "replication": topic.replication}
        size = f" with {counted(number, 'partition')}"
    if land:
        from millstream.core.pipeline import LAND_PREFIX

        made["pipeline"] = f"{LAND_PREFIX}{name}"
        landed = f", landed by pipeline {LAND_PREFIX}{name}"
    print_with_notes(made, f"{text} {name}{size}{landed}.", notes, as_json=common.as_json)


@app.command("list")
def list_(
    internal: Annotated[bool, typer.Option("--internal", help="Also show the broker's own topics.")] = False,
    common: Common = COMMON,
) -> None:
    """List all topics."""

    async def operation(client: Client) -> list[TopicMetadata]:
        topics = (await client.metadata()).topics.values()
        return sorted((topic for topic in topics if internal or not topic.is_internal), key=lambda topic: topic.name)

    topics = call_broker(common, operation)
    keys = ("topic", "partitions", "replication")
    rows = [(topic.name, len(topic.partitions), topic.replication) for topic in topics]
    listed = [
        {**dict(zip(keys, row, strict=True)), "internal": topic.is_internal, "id": str(topic.topic_id)}
        for row, topic in zip(rows, topics, strict=True)
    ]
    empty = "No topics yet; create one with: millstream topic create NAME"
    print_list({"topics": listed}, keys, rows, empty=empty, as_json=common.as_json)


@app.command("describe")
def describe(name: Name, common: Common = COMMON) -> None:
    """Show a topic's partitions, offsets and settings."""
    from millstream.client.admin.topics import describe_topic

    async def operation(client: Client) -> dict[str, Any]:
        from millstream.client.admin.topic_notes import topic_original, topic_readers, topic_writers
        from millstream.client.admin.topic_schema import topic_schemas

        described = await describe_topic(client, name, advice=_LIST_ADVICE)
        described["schema"] = await topic_schemas(client, described["settings"])
        described["readers"] = await topic_readers(client, name)
        described["writers"] = await topic_writers(client, name)
        described["copy_of"] = await topic_original(client, name)
        return described

    described = call_broker(common, operation)
    if common.as_json:
        print_json(described)
    else:
        _print_description(described)


@app.command("replicate")
def replicate(
    pattern: Annotated[
        str,
        typer.Argument(
            metavar="PATTERN",
            help="The topics, such as orders or 'shop-*'; '*' includes internal ones.",
            show_default=False,
        ),
    ],
    to: Annotated[int, flag("--to", "NUMBER", "How many replicas.", min=1)],
    throttle: Throttle = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the moves without starting them.")] = False,
    wait: Wait = False,
    common: Common = COMMON,
) -> None:
    """Change the number of replicas of topics, in the background.

    It is a plan of the cluster: `millstream cluster plan show` follows it, `millstream cluster cancel` stops it.
    """
    # Imported on use, so that the other commands start faster.
    from millstream.cli.cluster import replicate_topics

    replicate_topics(pattern, to, throttle=throttle, dry_run=dry_run, wait=wait, common=common)


@app.command("alter")
def alter(
    name: Name,
    owner: Owner = None,
    description: Description = None,
    contract: Contract = None,
    schemas: Schemas = None,
    validate: Validate = None,
    settings: Settings = None,
    unset: Annotated[
        list[str] | None,
        typer.Option("--unset", metavar="NAME", help="Reset a setting to the node's default; may be repeated."),
    ] = None,
    partitions: Annotated[
        int | None,
        flag(
            "--partitions",
            "NUMBER",
            "Increase the number of partitions to this; it cannot be decreased.",
            min=1,
            max=2**31 - 1,
        ),
    ] = None,
    common: Common = COMMON,
) -> None:
    """Change a topic's settings and description, or add partitions.

    An empty text removes an owner, description or contract. Adding partitions moves keys: new messages of a key may go
    to a different partition than earlier ones.
    """
    changes: dict[str, str | None] = {**parse_assignments(settings or [], flag="--set"), **dict.fromkeys(unset or [])}
    named_settings = {**_card(owner, description, contract), **_schema_rule(schemas, validate)}
    changes.update({key: text or None for key, text in named_settings.items()})
    if not changes and partitions is None:
        raise typer.BadParameter(
            "nothing to change; pass --set, --unset, --partitions, --schema, --validate, --owner, --description or "
            "--contract"
        )

    async def operation(client: Client) -> list[str]:
        from millstream.client.admin.topic_notes import change_notes, schema_notes
        from millstream.client.admin.topics import alter_topic, check_settings_exist, find_topic, grow_topic

        topic = await find_topic(client, name, advice=_LIST_ADVICE)
        # The broker, like Kafka, accepts the removal of unknown settings; report typing errors here.
        await check_settings_exist(client, name, unset or [])
        if changes:
            await alter_topic(client, name, changes)
        if partitions is not None:
            await grow_topic(client, name, partitions)
        return [*await change_notes(client, topic, changes, partitions), *await schema_notes(client, name, changes)]

    notes = call_broker(common, operation)
    document = {"topic": name, "changed": changes, "partitions": partitions}
    print_with_notes(document, f"Changed topic {name}.", notes, as_json=common.as_json)


@app.command("delete")
def delete(
    name: Name,
    force: Annotated[bool, typer.Option("--force", help="Delete it even if it holds open dead letters.")] = False,
    yes: Yes = False,
    common: Common = COMMON,
) -> None:
    """Delete a topic and every message in it. Asks for confirmation at a terminal, not in a script."""

    async def look(client: Client) -> list[str]:
        from millstream.client.admin.dead_letter import check_no_open_letters
        from millstream.client.admin.topic_notes import deletion_notes
        from millstream.client.admin.topics import find_topic

        if not force:
            await check_no_open_letters(client, name)
        return await deletion_notes(client, await find_topic(client, name, advice=_LIST_ADVICE))

    async def operation(client: Client) -> None:
        from millstream.client.admin.dead_letter import close_letters_of
        from millstream.client.admin.topics import delete_topic

        if force:
            await close_letters_of(client, name)
        await delete_topic(client, name)

    notes = call_broker(common, look)
    confirm(" ".join([*notes, f"Delete topic {name} and every message in it?"]), unless=yes or common.as_json)
    call_broker(common, operation)
    print_with_notes({"topic": name, "deleted": True}, f"Deleted topic {name}.", notes, as_json=common.as_json)


async def _land(client: Client, name: str, *, validate_only: bool = False) -> None:
    """Declare that a topic is landed, or only check whether it can be, before it is created."""
    from millstream.client.admin.pipelines import land_topic

    await land_topic(client, name, validate_only=validate_only)


def _card(owner: str | None, description: str | None, contract: str | None) -> dict[str, str]:
    """Return the settings for a topic's descriptive fields."""
    from millstream.core.topic import CONTRACT, DESCRIPTION, OWNER

    card = {OWNER: owner, DESCRIPTION: description, CONTRACT: contract}
    return {key: text for key, text in card.items() if text is not None}


def _schema_rule(schemas: list[str] | None, validate: str | None) -> dict[str, str]:
    """Return the settings for the schemas of a topic's records."""
    from millstream.core.topic import SCHEMA_KEY, SCHEMA_VALIDATE, SCHEMA_VALUE

    names = {"key": SCHEMA_KEY, "value": SCHEMA_VALUE}
    rule: dict[str, str] = {}
    for text in schemas or ():
        field, equals, subject = text.partition("=")
        if not equals or field not in names:
            raise typer.BadParameter(f"--schema takes value=SUBJECT or key=SUBJECT, not {text!r}")
        rule[names[field]] = subject
    if validate is not None:
        rule[SCHEMA_VALIDATE] = validate
    return rule


def _print_description(described: dict[str, Any]) -> None:
    from millstream.client.admin.topics import CARD
    from millstream.core.topic import SCHEMA_KEY, SCHEMA_VALIDATE, SCHEMA_VALUE

    partitions = described["partitions"]
    messages = sum(partition["end"] - partition["start"] for partition in partitions)
    print_line(f"{described['topic']}  ({counted(len(partitions), 'partition')}, {counted(messages, 'message')})")
    facts = {"id": described["id"], **{word: described[word] for word in CARD}}
    if (original := described["copy_of"]) is not None:
        facts["copy of"] = f"{original['topic']} by mirror {original['mirror']}"
    facts |= _schema_facts(described["schema"])
    for word in ("readers", "writers"):
        known = described[word]
        facts[word] = (
            None if known is None else ", ".join(f"{reader['kind']} {reader['name']}" for reader in known) or "none"
        )
    for word, text in facts.items():
        if text is not None:
            print_line(f"{word.ljust(11)}  {text}")
    print_line()
    header = ["partition", "leader", "replicas", "in sync", "start", "end", "messages"]
    print_table(header, [_row(partition) for partition in partitions])
    print_line()
    _print_damage(described)
    print_table(
        ["setting", "value", "set by"],
        [
            [name, value, "this topic" if name in described["overrides"] else "the node"]
            for name, value in sorted(described["settings"].items())
            if name not in (*CARD.values(), SCHEMA_KEY, SCHEMA_VALUE, SCHEMA_VALIDATE)
        ],
    )


def _schema_facts(schema: dict[str, Any] | None) -> dict[str, str]:
    if schema is None:
        return {}
    facts = {}
    for field in ("key", "value"):
        if field in schema:
            rule = schema[field]
            versions = ", ".join(map(str, rule["versions"])) or "none yet: messages are refused until one is registered"
            kind = f", {rule['type']}" if rule["type"] else ""
            facts[f"{field} schema"] = f"{rule['subject']}{kind} (versions {versions}; validate {schema['validate']})"
    return facts


def _row(row: dict[str, Any]) -> list[Any]:
    leader = None if row["leader"] < 0 else row["leader"]
    nodes = [",".join(map(str, row[key])) for key in ("replicas", "in_sync")]
    return [row["partition"], leader, *nodes, row["start"], row["end"], row["end"] - row["start"]]


def _print_damage(described: dict[str, Any]) -> None:
    from millstream.client.admin.cluster_status import DamagedOffsets

    lost = [
        DamagedOffsets(described["topic"], partition["partition"], damage["start"], damage["end"])
        for partition in described["partitions"]
        for damage in partition["damage"] or ()
    ]
    for damage in lost:
        print_line(f"DAMAGED  {damage}")
        print_line(f"         -> {damage.advice}")
    if lost:
        print_line()
