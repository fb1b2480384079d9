"""Subscriptions: list, create, describe, change, delete, seek, pause, resume."""

from __future__ import annotations

from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from millstream.client.admin.messages import utc
from millstream.client.admin.subscriptions import place_of, start_of, summary_of
from millstream.core.setting import Setting, named_by_caller, settings_of, value_text
from millstream.core.subscription import (
    DEAD_LETTER_TOPIC,
    NAME_LENGTH_MAX,
    OWN_PREFIX,
    PAUSED,
    START,
    TOPICS_MAX,
    SubscriptionSettings,
)
from millstream.gateway.api.problem import Refused, invalid
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
from millstream.gateway.api.routes.topics import Deletion, Listing
from millstream.gateway.api.services import Services
from millstream.protocol.private.subscription_messages import PushState
from millstream.protocol.private.subscriptions import HeldLease

LEASES_MAX: Final = 10_000
SubscriptionName = Annotated[str, Meta(min_length=1, max_length=NAME_LENGTH_MAX)]
Topics = Annotated[list[TopicName], Meta(min_length=1, max_length=TOPICS_MAX)]

_OPTIONS: Final = {
    attribute: declared for attribute, declared in settings_of(SubscriptionSettings) if declared.name != START
}
"""Every setting except the start position, by its name in the API."""


def _type_of(declared: Setting) -> Any:
    kind: Any = Literal[declared.choices] if declared.choices else declared.kind
    ge = None if declared.minimum is None else int(declared.minimum)
    le = None if declared.maximum is None else int(declared.maximum)
    if declared.kind is int:
        kind = Annotated[kind, Meta(ge=ge, le=le)]
    return Annotated[kind | UnsetType | None, Meta(description=declared.description)]


_FIELDS: Final[list[Any]] = [(attribute, _type_of(declared), UNSET) for attribute, declared in _OPTIONS.items()]

if TYPE_CHECKING:

    class Options(msgspec.Struct, frozen=True, kw_only=True):
        """The settings of a subscription; null means the default."""

else:
    Options = msgspec.defstruct(
        "Options", _FIELDS, frozen=True, kw_only=True, module=__name__, namespace={"__doc__": "The settings."}
    )


class NewSubscription(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A subscription to create."""

    name: SubscriptionName
    topics: Topics
    start: str = "end"
    """The start position: start, end, a time, or an age."""
    settings: GivenSettings = msgspec.field(default_factory=dict)
    """Settings by their full names."""


class SubscriptionChanges(Options, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Changes; null resets a setting to its default."""

    topics: Topics | None = None
    settings: ChangedSettings = msgspec.field(default_factory=dict)


class Created(msgspec.Struct, frozen=True):
    """A created subscription."""

    subscription: str
    id: str
    topics: list[str]
    missing_topics: list[str]
    """Topics that do not exist yet; their messages are delivered once they do."""
    dead_letter_topic: str
    """The topic for messages that fail permanently; `none` if they are dropped."""


class SubscriptionSummary(msgspec.Struct, frozen=True):
    """A subscription's summary."""

    subscription: str
    topics: list[str]
    has_hidden_topics: bool
    """Whether it has topics that the caller may not describe; their messages are not counted."""
    backlog: int
    leased: int
    parked: int
    dead_lettered: int
    dropped: int
    """Messages that failed permanently and were dropped."""
    paused: bool


class SubscriptionList(msgspec.Struct, frozen=True):
    """Subscriptions, by name."""

    subscriptions: list[SubscriptionSummary]


class QueueState(msgspec.Struct, frozen=True):
    """The queue of one partition: messages by state and by outcome."""

    topic: str
    partition: int
    oldest: int
    backlog: int
    oldest_age_ms: int
    """How long ago the oldest unfinished message was published; 0 without one."""
    waiting_workers: int
    available: int
    leased: int
    parked: int
    blocked: int
    rejecting: int
    accepted: int
    released: int
    expired: int
    rejected: int
    dead_lettered: int
    dropped: int
    filtered: int
    redelivered: int
    refused_letters: int
    """Messages on their way to the dead letter topic that it refuses, since they are too large for it."""
    letter_refusal: str
    """The reasons for the refusals, and what to do."""


class NodePushState(PushState, frozen=True, kw_only=True):
    """The state of push to the subscription's endpoint on one node."""

    node: int


class SubscriptionDescription(msgspec.Struct, frozen=True):
    """A subscription with its settings and queues, without secrets."""

    name: str
    subscription_id: str
    topics: list[str]
    has_hidden_topics: bool
    """Whether it has topics that the caller may not describe; they and their queues are left out."""
    settings: dict[str, str]
    """The settings that the caller may see."""
    overrides: dict[str, str]
    created_ms: int
    queues: list[QueueState]
    push: list[NodePushState] = []


class HeldLeaseDocument(msgspec.Struct, frozen=True):
    """Consecutive messages that one worker holds; the end is exclusive."""

    topic: str
    partition: int
    start: int
    end: int
    attempt: int
    deadline: str
    """When the lease ends, unless the worker extends it."""
    remaining_ms: int
    worker: str
    client_id: str
    """The client through which the worker requested messages; empty if the queue has moved to another node since."""
    address: str


class ListedLeases(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The number of leases to list."""

    limit: Annotated[int, Meta(ge=1, le=LEASES_MAX)] = 1000


class Leases(msgspec.Struct, frozen=True):
    """The leases of a subscription, the oldest of each partition first."""

    leases: list[HeldLeaseDocument]
    omitted: int
    """How many more messages are held."""


class Seek(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The new position: start, end, an offset, a time, or an age."""

    to: Annotated[str, Meta(min_length=1, max_length=100)]
    topic: str | None = None
    partition: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


class MovedQueue(msgspec.Struct, frozen=True):
    """The new position of one queue."""

    topic: str
    partition: int
    offset: int


class Moved(msgspec.Struct, frozen=True):
    """The new positions of a subscription's queues."""

    subscription: str
    queues: list[MovedQueue]


class SubscriptionPaused(msgspec.Struct, frozen=True):
    """Whether a subscription is paused."""

    subscription: str
    paused: bool


async def list_subscriptions(services: Services, request: Request[Listing, NoFields]) -> SubscriptionList:
    subscriptions = await services.subscriptions.describe()
    shown = [
        subscription
        for subscription in subscriptions
        if request.query.internal or not subscription["name"].startswith(OWN_PREFIX)
    ]
    return SubscriptionList([msgspec.convert(summary_of(subscription), SubscriptionSummary) for subscription in shown])


async def create(services: Services, request: Request[NoFields, NewSubscription]) -> Created:
    new = request.body
    settings = {
        name: value for name, value in {**_parse_options(new), **texts_of(new.settings)}.items() if value is not None
    }
    known = (await services.client.metadata(new.topics)).topics
    with named_by_caller(_option_fields(new)):
        made = await services.subscriptions.create(new.name, new.topics, {START: start_of(new.start), **settings})
    (described,) = await services.subscriptions.describe([new.name])
    missing = [topic for topic in new.topics if topic not in known]
    return Created(new.name, str(made), new.topics, missing, described["settings"][DEAD_LETTER_TOPIC])


async def describe(services: Services, request: Request[NoFields, NoFields]) -> SubscriptionDescription:
    (described,) = await services.subscriptions.describe([request.path["subscription"]])
    described["queues"].sort(key=lambda queue: (queue["topic"], queue["partition"]))
    return msgspec.convert(described, SubscriptionDescription)


async def leases(services: Services, request: Request[ListedLeases, NoFields]) -> Leases:
    held = await services.subscriptions.leases(request.path["subscription"], limit=request.query.limit)
    return Leases([_lease_document(lease) for lease in held.leases], held.omitted)


def _lease_document(held: HeldLease) -> HeldLeaseDocument:
    fields = held._asdict()
    return HeldLeaseDocument(deadline=utc(fields.pop("deadline_ms")) or "", **fields)


async def change(services: Services, request: Request[NoFields, SubscriptionChanges]) -> SubscriptionDescription:
    body = request.body
    changes = {**_parse_options(body), **changes_of(body.settings)}
    if not changes and body.topics is None:
        raise invalid("nothing to change; send `topics` or settings")
    with named_by_caller(_option_fields(body)):
        await services.subscriptions.alter(request.path["subscription"], changes, topics=body.topics)
    return await describe(services, Request(request.path, NoFields(), NoFields(), request.headers, request.memory))


async def delete(services: Services, request: Request[Deletion, NoFields]) -> None:
    """Delete a subscription; the messages stay in their topics."""
    await services.subscriptions.delete(request.path["subscription"], force=request.query.force)


async def seek(services: Services, request: Request[NoFields, Seek]) -> Moved:
    """Move a subscription to another position; open leases become invalid."""
    name, body = request.path["subscription"], request.body
    moved = await services.subscriptions.seek(name, place_of(body.to), topic=body.topic, partition=body.partition)
    if not moved:
        raise Refused(HTTPStatus.NOT_FOUND, f"subscription {name!r} has no such queue; check topic and partition")
    moved.sort(key=lambda queue: (queue["topic"], queue["partition"]))
    return Moved(name, msgspec.convert(moved, list[MovedQueue]))


async def pause(services: Services, request: Request[NoFields, NoFields]) -> SubscriptionPaused:
    """Stop delivering messages; open leases can still be settled."""
    return await _set_paused(services, request.path["subscription"], "true")


async def resume(services: Services, request: Request[NoFields, NoFields]) -> SubscriptionPaused:
    return await _set_paused(services, request.path["subscription"], None)


async def _set_paused(services: Services, name: str, value: str | None) -> SubscriptionPaused:
    await services.subscriptions.alter(name, {PAUSED: value})
    return SubscriptionPaused(name, value is not None)


def _parse_options(body: Options) -> dict[str, str | None]:
    """Return the given settings by full name, as text."""
    options = {declared.name: getattr(body, attribute) for attribute, declared in _OPTIONS.items()}
    return {name: None if value is None else value_text(value) for name, value in options.items() if value is not UNSET}


def _option_fields(body: NewSubscription | SubscriptionChanges) -> dict[str, str]:
    """Return the given fields by setting, but for settings that were also given by their full names."""
    names = _parse_options(body).keys() - body.settings.keys()
    return {option.name: attribute for attribute, option in _OPTIONS.items() if option.name in names}


_ONE: Final = "/subscriptions/{subscription}"

ROUTES: Final = (
    Route("GET", "/subscriptions", "List subscriptions", list_subscriptions, SubscriptionList, query=Listing),
    Route(
        "POST",
        "/subscriptions",
        "Create a subscription",
        create,
        Created,
        body=NewSubscription,
        status=HTTPStatus.CREATED,
    ),
    Route("GET", _ONE, "Describe a subscription", describe, SubscriptionDescription),
    Route("GET", f"{_ONE}/leases", "List the leases of a subscription", leases, Leases, query=ListedLeases),
    Route("PATCH", _ONE, "Change a subscription", change, SubscriptionDescription, body=SubscriptionChanges),
    Route("DELETE", _ONE, "Delete a subscription; messages stay in their topics", delete, None, query=Deletion),
    Route("POST", f"{_ONE}/seek", "Move a subscription to another position", seek, Moved, body=Seek),
    Route("POST", f"{_ONE}/pause", "Pause delivery", pause, SubscriptionPaused),
    Route("POST", f"{_ONE}/resume", "Resume delivery", resume, SubscriptionPaused),
)
