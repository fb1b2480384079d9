"""The audit log: sign-ins, denials and changes as OCSF events in the internal topic `__audit`.

Recording an event never waits and never fails: events are held in a bounded buffer, and one task writes them. Denials
and failed sign-ins recur, so each is written when it first happens and then at most once a minute, with a count. Events
that do not fit into the buffer are counted, and the next event says how many were dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from random import Random
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import uuid4

import msgspec

from millstream import __version__
from millstream.core.acl import CLUSTER_NAME, Operation, ResourceType, name_of
from millstream.core.backoff import Backoff
from millstream.core.clock import Clock, SystemClock
from millstream.core.config import Config
from millstream.core.crowding import network_of
from millstream.core.errors import MillstreamError, TopicExists
from millstream.core.metric import Metric, counter, gauge
from millstream.core.tasks import Supervise, within
from millstream.core.topic import AUDIT
from millstream.protocol.records.record import NewRecord, encode_batch

if TYPE_CHECKING:
    from millstream.broker.cluster.topics import Topics
    from millstream.broker.coordination.peers import LeaderAppender

_logger = logging.getLogger(__name__)

SCHEMA_VERSION: Final = "1.3.0"
EVENTS_MAX: Final = 10_000
REPEATED_MAX: Final = 10_000
REPEATED_PER_SOURCE_MAX: Final = 100
"""Beyond this many within a window, those of one principal or address are counted together."""
WINDOW_S: Final = 60.0
OTHERS: Final = "(others)"
HTTP: Final = "http"
"""Used instead of a listener's name: the gateway, acting for a caller."""
_BATCH_EVENTS_MAX: Final = 500
_BATCH_BYTES_MAX: Final = 256 * 1024
"""Well below the smallest limit that a topic is likely to have: a batch that is refused would be retried forever."""
_NAME_CHARACTERS_MAX: Final = 256
_DETAILS_BYTES_MAX: Final = 16 * 1024
_CLOSE_S: Final = 5.0
_PARTITION: Final = 0
_UNKNOWN, _SUCCESS, _FAILURE = 0, 1, 2
_INFORMATIONAL, _LOW, _HIGH = 1, 2, 4
_OTHER: Final = 99
_OAUTH: Final = 6
_CATEGORIES: Final = {1: "System Activity", 3: "Identity & Access Management", 6: "Application Activity"}

Event = dict[str, Any]


class EventClass(IntEnum):
    """The classes of OCSF that are used."""

    EVENT_LOG_ACTIVITY = 1008
    ACCOUNT_CHANGE = 3001
    AUTHENTICATION = 3002
    ENTITY_MANAGEMENT = 3004
    API_ACTIVITY = 6003


class Activity(IntEnum):
    """The activity on an entity, with the numbers of Entity Management and API Activity."""

    CREATE = 1
    READ = 2
    UPDATE = 3
    DELETE = 4


_ACCOUNT_ACTIVITY: Final = {Activity.CREATE: 1, Activity.UPDATE: 3, Activity.DELETE: 6}
_POLICY_ACTIVITY: Final = {Activity.CREATE: 7, Activity.DELETE: 8}
_DENIED_ACTIVITY: Final = {
    Operation.READ: Activity.READ,
    Operation.DESCRIBE: Activity.READ,
    Operation.DESCRIBE_CONFIGS: Activity.READ,
    Operation.CREATE: Activity.CREATE,
    Operation.DELETE: Activity.DELETE,
    Operation.WRITE: Activity.UPDATE,
    Operation.ALTER: Activity.UPDATE,
    Operation.ALTER_CONFIGS: Activity.UPDATE,
}
_LOGON: Final = 1


class Actor(NamedTuple):
    """The principal behind an event, and its address."""

    principal: str
    host: str
    token_id: str = ""
    """The API token that the client has shown; empty for other credentials."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    activity: Activity
    kind: str
    """`topic`, `subscription` and so on; `user` and `acl` are changes of accounts."""
    name: str
    data: Mapping[str, Any] = field(default_factory=dict)
    """Details, without secrets."""
    is_certain: bool = True
    """Whether it was made; after a timeout it may have been."""


@dataclass(slots=True, kw_only=True)
class _RepeatedEvent:
    source: str
    event: Event
    start_ms: int
    end_ms: int = 0
    count: int = 0
    due: float


class AuditTrail:
    """Collects the events of a node until they are written."""

    def __init__(self, clock: Clock | None = None) -> None:
        self._clock = clock or SystemClock()
        self._events: deque[Event] = deque()
        self._repeated: dict[tuple[str, ...], _RepeatedEvent] = {}
        self._by_source: Counter[str] = Counter()
        self._dropped = 0
        self.dropped = 0
        """All that were dropped so far."""
        self.written = 0
        self.changed = asyncio.Event()
        """Set when there is something to write."""

    def __len__(self) -> int:
        return len(self._events)

    def sign_in(self, actor: Actor, listener: str, mechanism: str, *, is_frequent: bool = False) -> None:
        """Record that a client has authenticated; frequent sign-ins with one API token are counted together."""
        key = ("sign-in", actor.principal, actor.token_id, listener)
        if is_frequent and self._is_crowded(actor.principal, key):
            actor, key = actor._replace(token_id=OTHERS), ("sign-in", actor.principal, OTHERS, listener)
        event = _authentication(actor.principal, actor.host, listener, mechanism)
        event |= _session(actor) | {"status_id": _SUCCESS}
        if is_frequent:
            self._add_repeated(actor.principal, key, event)
        else:
            self._add(event)

    def fail_sign_in(self, user: str, host: str, listener: str, mechanism: str, reason: str) -> None:
        """Record that a client has failed to authenticate."""
        user = _shorten(user)
        source = network_of(host)
        key = (source, user, mechanism, reason)
        if self._is_crowded(source, key):
            user, key = OTHERS, (source, OTHERS, mechanism, reason)
        event = _authentication(user, host, listener, mechanism)
        event.update(status_id=_FAILURE, severity_id=_LOW, status_detail=reason)
        self._add_repeated(source, key, event)

    def deny(self, actor: Actor, operation: Operation, kind: ResourceType, name: str) -> None:
        """Record that a client was refused an operation."""
        principal, name = actor.principal, _shorten(name)
        key = (principal, operation.name, kind.name, name)
        if self._is_crowded(principal, key):
            name, key = OTHERS, (principal, operation.name, kind.name, OTHERS)
        resource = {"type": name_of(kind), "name": CLUSTER_NAME if kind is ResourceType.CLUSTER else name}
        event = _new_event(EventClass.API_ACTIVITY, _DENIED_ACTIVITY.get(operation, _OTHER), severity=_LOW)
        event.update(
            status_id=_FAILURE,
            status_detail="not authorized",
            actor=_describe_actor(actor),
            src_endpoint={"ip": actor.host},
            api={"operation": name_of(operation)},
            resources=[resource],
            message=f"{principal} may not {name_of(operation)} {resource['type']} {resource['name']}",
        )
        self._add_repeated(principal, key, event)

    def change(self, actor: Actor, api: str, change: Change) -> None:
        if change.kind == "user":
            event = _new_event(EventClass.ACCOUNT_CHANGE, _ACCOUNT_ACTIVITY[change.activity])
            event["user"] = _user(f"User:{change.name}")
        elif change.kind == "acl":
            event = _new_event(EventClass.ACCOUNT_CHANGE, _POLICY_ACTIVITY[change.activity])
            event["user"] = _user(str(change.data["principal"]))
            event["policy"] = {"name": change.name}
        else:
            event = _new_event(EventClass.ENTITY_MANAGEMENT, change.activity)
            event["entity"] = {"type": change.kind, "name": _shorten(change.name), "data": _details_of(change)}
        event.update(
            status_id=_SUCCESS if change.is_certain else _UNKNOWN,
            actor=_describe_actor(actor),
            src_endpoint={"ip": actor.host},
            api={"operation": api},
            message=f"{actor.principal}: {change.activity.name.lower()} {change.kind} {_shorten(change.name)}",
        )
        if not change.is_certain:
            event["status_detail"] = "the request timed out; the change may have been made"
        self._add(event)

    def take(self) -> list[Event]:
        """Remove and return the next events to write."""
        self._add_due()
        if self._dropped and len(self._events) < EVENTS_MAX:
            self._events.append(self._dropped_event())
        events = [self._events.popleft() for _ in range(min(len(self._events), _BATCH_EVENTS_MAX))]
        if not self._events:
            self.changed.clear()
        return events

    def requeue(self, events: list[Event]) -> None:
        """Return events that could not be written, to be written next."""
        self._events.extendleft(reversed(events))
        while len(self._events) > EVENTS_MAX:
            self._events.pop()
            self._count_dropped()
        self.changed.set()

    def flush(self) -> None:
        """Make repeated events due now: the node stops."""
        for repeated in self._repeated.values():
            repeated.due = 0.0

    def next_due_s(self) -> float | None:
        """Return in how many seconds a repeated event is due; None if there is none."""
        if not self._repeated:
            return None
        return max(0.0, min(repeated.due for repeated in self._repeated.values()) - self._clock.monotonic())

    def _add(self, event: Event) -> None:
        if len(self._events) >= EVENTS_MAX:
            self._count_dropped()
            return
        event.setdefault("time", self._clock.now_ms())
        self._events.append(event)
        self.changed.set()

    def _count_dropped(self) -> None:
        self._dropped += 1
        self.dropped += 1

    def _is_crowded(self, source: str, key: tuple[str, ...]) -> bool:
        return key not in self._repeated and self._by_source[source] >= REPEATED_PER_SOURCE_MAX

    def _add_repeated(self, source: str, key: tuple[str, ...], event: Event) -> None:
        now_ms = self._clock.now_ms()
        repeated = self._repeated.get(key)
        if repeated is None:
            if len(self._repeated) >= REPEATED_MAX:
                self._count_dropped()
                return
            repeated = _RepeatedEvent(source=source, event=event, start_ms=now_ms, due=self._clock.monotonic())
            self._repeated[key] = repeated
            self._by_source[source] += 1
            self.changed.set()
        elif not repeated.count:
            repeated.start_ms = now_ms
        repeated.event = event
        repeated.count += 1
        repeated.end_ms = now_ms

    def _add_due(self) -> None:
        now = self._clock.monotonic()
        for key, repeated in list(self._repeated.items()):
            if repeated.due > now:
                continue
            if not repeated.count:
                del self._repeated[key]
                self._by_source[repeated.source] -= 1
                if not self._by_source[repeated.source]:
                    del self._by_source[repeated.source]
                continue
            times = {"time": repeated.end_ms, "start_time": repeated.start_ms, "end_time": repeated.end_ms}
            self._add({**repeated.event, **times, "count": repeated.count})
            repeated.count = 0
            repeated.due = now + WINDOW_S

    def _dropped_event(self) -> Event:
        dropped, self._dropped = self._dropped, 0
        event = _new_event(EventClass.EVENT_LOG_ACTIVITY, _OTHER, severity=_HIGH)
        event.update(
            activity_name="Drop",
            status_id=_FAILURE,
            log_name=AUDIT,
            count=dropped,
            time=self._clock.now_ms(),
            message=f"{dropped} audit events were dropped, because they could not be written in time",
        )
        return event


class AuditLog:
    """Writes the events of a trail to the topic, which it creates."""

    def __init__(self, trail: AuditTrail, topics: Topics, appender: LeaderAppender, config: Config) -> None:
        self._trail = trail
        self._topics = topics
        self._appender = appender
        self._retention = str(config.audit_retention_ms)
        self._node = str(config.node_id)
        self._backoff = Backoff(Random(), max_s=10.0)
        self._is_closing = False
        self._has_topic = False
        self._task: asyncio.Task[None] | None = None

    def metrics(self) -> Iterable[Metric]:
        trail = self._trail
        yield gauge("millstream_audit_events_waiting", "Audit events that wait to be written.", len(trail))
        yield counter("millstream_audit_events_total", "Audit events written.", trail.written)
        yield counter("millstream_audit_events_dropped_total", "Audit events dropped.", trail.dropped)

    def start(self, supervise: Supervise) -> None:
        """Write events as they come, until `close`."""
        self._task = supervise("audit log", self._run())

    async def _run(self) -> None:
        while not self._is_closing:
            with suppress(TimeoutError):
                await within(self._trail.next_due_s(), self._trail.changed.wait())
            try:
                await self._write()
                self._backoff.reset()
            except MillstreamError as error:
                _logger.warning("audit events could not be written; retrying", extra={"error": str(error)})
                await self._backoff.pause()

    async def close(self) -> None:
        """Write the remaining events, for a few seconds at most."""
        self._is_closing = True
        self._trail.flush()
        self._trail.changed.set()
        try:
            async with asyncio.timeout(_CLOSE_S):
                if self._task is not None:
                    await asyncio.wait([self._task])
                await self._write()
        except (MillstreamError, TimeoutError) as error:
            _logger.error("audit events were lost", extra={"events": len(self._trail), "error": str(error)})
        await self._appender.close()

    async def _ensure_topic(self) -> None:
        if self._has_topic:
            return
        settings = {"cleanup.policy": "delete", "retention.ms": self._retention, "max.message.bytes": "1048588"}
        topic = self._topics.get(AUDIT)
        if topic is None:
            with suppress(TopicExists):
                await self._topics.create(AUDIT, partitions=1, overrides=settings, internal=True)
        elif topic.overrides != settings:
            await self._topics.alter(AUDIT, dict(settings), replace=True, internal=True)
        self._has_topic = True

    async def _write(self) -> None:
        while events := self._trail.take():
            try:
                # Not earlier: the first node of a cluster to start would give the topic one replica only.
                await self._ensure_topic()
                records = self._encode(events)
                await self._appender.append(AUDIT, _PARTITION, encode_batch(records))
            except BaseException:
                self._trail.requeue(events)
                raise
            self._trail.written += len(records)
            if len(records) < len(events):
                self._trail.requeue(events[len(records) :])

    def _encode(self, events: Iterable[Event]) -> list[NewRecord]:
        """Encode the first events, as many as a batch takes."""
        records: list[NewRecord] = []
        size = 0
        for event in events:
            content = self._complete(event)
            size += len(content)
            if records and size > _BATCH_BYTES_MAX:
                break
            records.append(NewRecord(None, content, (), event["time"]))
        return records

    def _complete(self, event: Event) -> bytes:
        """Add the common fields of all events; by the id, readers recognize an event that was written twice."""
        metadata = event.setdefault("metadata", {"uid": str(uuid4())})
        metadata.update(
            version=SCHEMA_VERSION,
            product={"name": "Millstream", "vendor_name": "Millstream", "version": __version__},
            log_name=AUDIT,
            log_provider=f"node {self._node}",
        )
        return msgspec.json.encode(event)


def _new_event(kind: EventClass, activity: int, *, severity: int = _INFORMATIONAL) -> Event:
    category = kind // 1000
    return {
        "category_uid": category,
        "category_name": _CATEGORIES[category],
        "class_uid": int(kind),
        "class_name": kind.name.replace("_", " ").title().replace("Api", "API"),
        "activity_id": int(activity),
        "type_uid": kind * 100 + activity,
        "severity_id": severity,
    }


def _authentication(principal: str, host: str, listener: str, mechanism: str) -> Event:
    event = _new_event(EventClass.AUTHENTICATION, _LOGON)
    event.update(
        user=_user(principal),
        src_endpoint={"ip": host},
        service={"name": listener if listener == HTTP else f"kafka listener {listener}"},
        auth_protocol=mechanism,
        auth_protocol_id=_OAUTH if mechanism == "OAUTHBEARER" else _OTHER,
        is_remote=True,
    )
    return event


def _describe_actor(actor: Actor) -> Event:
    return {"user": _user(actor.principal), **_session(actor)}


def _session(actor: Actor) -> Event:
    return {"session": {"credential_uid": actor.token_id}} if actor.token_id else {}


def _user(principal: str) -> Event:
    return {"name": _shorten(principal.removeprefix("User:")), "uid": _shorten(principal)}


def _details_of(change: Change) -> Event:
    """Return the details of a change, or the beginning of long ones: clients may send any number of them."""
    content = msgspec.json.encode(change.data)
    if len(content) <= _DETAILS_BYTES_MAX:
        return dict(change.data)
    return {"shortened": content[:_DETAILS_BYTES_MAX].decode(errors="replace")}


def _shorten(text: str) -> str:
    return text[:_NAME_CHARACTERS_MAX]
