"""Topics: list, create, describe, alter, delete."""

from __future__ import annotations

from http import HTTPStatus
from typing import Annotated, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from millstream.client.admin.dead_letter import check_no_open_letters, close_letters_of
from millstream.client.admin.pipelines import land_topic
from millstream.client.admin.topic_notes import change_notes, creation_notes, deletion_notes, schema_notes
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
from millstream.gateway.api.problem import invalid
from millstream.gateway.api.route import (
    ChangedSettings,
    GivenSettings,
    NoFields,
    Request,
    Route,
    TopicName,
    changes_of,
    texts_of,
)
from millstream.gateway.api.services import Services
from millstream.protocol.wire.cluster_metadata import TopicMetadata

BROKER_DECIDES: Final = -1
PARTITIONS_MAX: Final = 10_000
ADVICE: Final = "GET /v1/topics lists those that do"

Number = Annotated[int, Meta(ge=1, le=PARTITIONS_MAX)]
Copies = Annotated[int, Meta(ge=1, le=2**15 - 1)]


class Listing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The topics to list."""

    internal: Annotated[bool, Meta(description="Include internal topics.")] = False


class Deletion(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options for deleting a topic."""

    force: Annotated[bool, Meta(description="Delete it even if it has open dead letters.")] = False


class TopicSummary(msgspec.Struct, frozen=True):
    """A topic's summary."""

    topic: str
    id: str
    partitions: int
    replication: int
    internal: bool


class TopicCreated(TopicSummary, frozen=True):
    """A created topic."""

    pipeline: str | None
    """The pipeline that lands it, if one was requested."""
    notes: list[str]
    """Hints for the owner, such as replicas that the topic does not have."""


class TopicList(msgspec.Struct, frozen=True):
    """Topics, by name."""

    topics: list[TopicSummary]


class NewTopic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A topic to create; missing members take the node's defaults."""

    topic: TopicName | UnsetType = UNSET
    name: (
        Annotated[TopicName, Meta(description="An alias of `topic`.", extra_json_schema={"deprecated": True})]
        | UnsetType
    ) = UNSET
    partitions: Number | None = None
    replication: Copies | None = None
    owner: str | None = None
    description: str | None = None
    contract: str | None = None
    settings: GivenSettings = {}
    land: Annotated[bool, Meta(description="Land it in a lake table, with a pipeline called land-NAME.")] = False

    def __post_init__(self) -> None:
        """Refuse a topic without a name or with two."""
        if (self.topic is UNSET) == (self.name is UNSET):
            raise ValueError("`topic` is missing; it is the name of the topic")

    @property
    def called(self) -> str:
        """Return the name, from whichever member gives it."""
        return f"{self.name if self.topic is UNSET else self.topic}"


_Topic = Annotated[NewTopic, Meta(extra_json_schema={"oneOf": [{"required": ["topic"]}, {"required": ["name"]}]})]


class TopicChanges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes; null resets a setting to the node's default, an empty string clears a description."""

    partitions: Number | None = None
    owner: str | None = None
    description: str | None = None
    contract: str | None = None
    settings: ChangedSettings = {}


class DamagedOffsets(msgspec.Struct, frozen=True):
    """A range of offsets that the disk lost; `end` is exclusive."""

    start: int
    end: int


class PartitionDescription(msgspec.Struct, frozen=True):
    """A partition; `start` is its first offset, `end` the next one to be written."""

    partition: int
    leader: int
    replicas: list[int]
    in_sync: list[int]
    start: int
    end: int
    damage: list[DamagedOffsets] | None


class TopicDescription(msgspec.Struct, frozen=True):
    """A topic with its partitions and settings."""

    topic: str
    id: str
    internal: bool
    owner: str | None
    description: str | None
    contract: str | None
    partitions: list[PartitionDescription]
    settings: dict[str, str | None]
    overrides: dict[str, str | None]
    """The settings that the topic overrides."""


class TopicChanged(TopicDescription, frozen=True):
    """A topic after a change."""

    notes: list[str]
    """Hints for the owner, such as messages that a pipeline has not read yet."""


class TopicDeleted(msgspec.Struct, frozen=True):
    """A deleted topic."""

    topic: str
    notes: list[str]
    """The pipelines that read it, and what they had not read yet."""


async def list_topics(services: Services, request: Request[Listing, NoFields]) -> TopicList:
    topics = (await services.client.metadata()).topics.values()
    shown = sorted(
        (topic for topic in topics if request.query.internal or not topic.is_internal), key=lambda topic: topic.name
    )
    return TopicList([_summary(topic) for topic in shown])


async def create(services: Services, request: Request[NoFields, NewTopic]) -> TopicCreated:
    new = request.body
    settings = {**texts_of(new.settings), **_card(new)}
    if new.land:
        await land_topic(services.client, new.called, validate_only=True)
    await create_topic(
        services.client,
        new.called,
        partitions=new.partitions or BROKER_DECIDES,
        replication=new.replication or BROKER_DECIDES,
        settings={key: text for key, text in settings.items() if text},
    )
    pipeline = await land_topic(services.client, new.called) if new.land else None
    made = await find_topic(services.client, new.called)
    notes = await creation_notes(services.client, made) if new.replication is None else []
    notes += await schema_notes(services.client, new.called, settings)
    return TopicCreated(**msgspec.structs.asdict(_summary(made)), pipeline=pipeline, notes=notes)


async def describe(services: Services, request: Request[NoFields, NoFields]) -> TopicDescription:
    return msgspec.convert(
        await describe_topic(services.client, request.path["topic"], advice=ADVICE), TopicDescription
    )


async def alter(services: Services, request: Request[NoFields, TopicChanges]) -> TopicChanged:
    name, body = request.path["topic"], request.body
    settings = changes_of(body.settings)
    changes: dict[str, str | None] = {**settings, **{key: text or None for key, text in _card(body).items()}}
    if not changes and body.partitions is None:
        raise invalid("nothing to change; send settings, partitions, owner, description or contract")
    topic = await find_topic(services.client, name, advice=ADVICE)
    await check_settings_exist(services.client, name, [key for key, value in settings.items() if value is None])
    if changes:
        await alter_topic(services.client, name, changes)
    if body.partitions is not None:
        await grow_topic(services.client, name, body.partitions)
    notes = [
        *await change_notes(services.client, topic, changes, body.partitions),
        *await schema_notes(services.client, name, changes),
    ]
    return msgspec.convert({**await describe_topic(services.client, name, advice=ADVICE), "notes": notes}, TopicChanged)


async def delete(services: Services, request: Request[Deletion, NoFields]) -> TopicDeleted:
    name = request.path["topic"]
    topic = await find_topic(services.client, name, advice=ADVICE)
    if request.query.force:
        await close_letters_of(services.client, name)
    else:
        await check_no_open_letters(services.client, name)
    notes = await deletion_notes(services.client, topic)
    await delete_topic(services.client, name)
    return TopicDeleted(name, notes)


def _card(body: NewTopic | TopicChanges) -> dict[str, str]:
    card = {key: getattr(body, word) for word, key in CARD.items()}
    return {key: text for key, text in card.items() if text is not None}


def _summary(topic: TopicMetadata) -> TopicSummary:
    return TopicSummary(topic.name, str(topic.topic_id), len(topic.partitions), topic.replication, topic.is_internal)


ROUTES: Final = (
    Route("GET", "/topics", "List topics", list_topics, TopicList, query=Listing),
    Route("POST", "/topics", "Create a topic", create, TopicCreated, body=_Topic, status=HTTPStatus.CREATED),
    Route("GET", "/topics/{topic}", "Describe a topic", describe, TopicDescription),
    Route(
        "PATCH",
        "/topics/{topic}",
        "Change a topic's settings, or add partitions",
        alter,
        TopicChanged,
        body=TopicChanges,
    ),
    Route("DELETE", "/topics/{topic}", "Delete a topic and every message in it", delete, TopicDeleted, query=Deletion),
)
