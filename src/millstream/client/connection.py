"""`millstream.connect`: publish, subscribe and listen, over one connection to a cluster.

    async with millstream.connect("localhost:9092") as ms:
        await ms.publish("orders", {"order_id": 1}, key="customer-7")
        subscriber = await ms.subscribe("orders", bill, name="billing")

This module encodes payloads; the publisher and the receivers do the rest.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import ssl
import time
import uuid
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Literal, Self, TypedDict, Unpack

from millstream.client import tracing
from millstream.client.admin.subscriptions import differences, start_of
from millstream.client.live_receiver import LiveReceiver
from millstream.client.message import Receipt, check_bool, check_integer, check_number, check_pair, check_text
from millstream.client.message_stream import MessageStream, Source
from millstream.client.node_sender import ACKS_NONE
from millstream.client.payload import Delay, GivenHeaders, NewMessage, encoded, headers_of, key_bytes
from millstream.client.profile import Profile, load_profile
from millstream.client.publisher import ACKS_ALL, BATCH_BYTES, BUFFER_BYTES, COMPRESSIONS, Publisher
from millstream.client.receipt_book import ReceiptBook
from millstream.client.receiver import Receiver
from millstream.client.subscriber import DRAIN_S, Handler, Subscriber
from millstream.core.errors import (
    InvalidRequest,
    InvalidSubscription,
    InvalidTopicName,
    PublishFailed,
    SubscriptionExists,
    UnknownTopic,
)
from millstream.core.headers import MESSAGE_ID
from millstream.core.setting import milliseconds_text, named_by_caller, value_text
from millstream.core.subscription import (
    AT_TIME,
    ATTEMPTS,
    BACKOFF_MAX,
    BACKOFF_MIN,
    BY_DURATION,
    DEAD_LETTER_TOPIC,
    DELIVERY,
    EXPIRES,
    FILTER,
    LEASE,
    LEDGER,
    ORDERED,
    START,
    SubscriptionSettings,
)
from millstream.core.tasks import cancel_and_wait
from millstream.core.topic import check_topic_name
from millstream.protocol.private.publish_once import partition_of, publish_once
from millstream.protocol.private.subscriptions import (
    WAIT_MS_MAX,
    HeldLeases,
    MessageDelivery,
    SubscriptionClient,
    delivery_state,
)
from millstream.protocol.records.record import Headers, NewRecord
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import SDK_SPELLED, Credentials, client_tls

_logger = logging.getLogger(__name__)

Start = str | datetime | timedelta
Seconds = float


@dataclass(frozen=True, slots=True)
class DeclaredSubscription:
    name: str
    lease_s: float
    delivery: str


class SubscriptionOptions(TypedDict, total=False):
    """Settings of a subscription; those left out, or None, keep their declared value."""

    filter: str | None
    """A condition; messages that do not match are skipped."""
    delivery: str | None
    """`at-most-once`, `at-least-once` or `exactly-once`."""
    ordered: bool | None
    """Whether messages with the same key are handled one at a time."""
    lease: Seconds | None
    """How long a message stays with a worker that is silent."""
    attempts: int | None
    """The maximum number of deliveries; 0 for no limit."""
    backoff: Seconds | tuple[Seconds, Seconds] | None
    """The delay before the next attempt: the first, or the first and the longest; it doubles."""
    dead_letter: str | None
    """The topic for messages that fail permanently."""
    start: Start | None
    """The start position of a new subscription."""
    expires: Seconds | None
    """How long it may be unused before it is deleted."""
    ledger: bool | None
    """Whether every event of its deliveries is kept for the ledger."""


def requested_settings(options: SubscriptionOptions) -> dict[str, str]:
    """Convert arguments to settings by name; raise `InvalidRequest` for invalid ones."""
    texts: dict[str, str] = {}
    for name, value in options.items():
        if name not in _SETTINGS:
            raise InvalidSubscription(f"a subscription has no {name!r}; the settings are: {', '.join(_SETTINGS)}")
        if value is not None:
            texts |= _SETTINGS[name](name, value)
    with named_by_caller(_SPELLED):
        SubscriptionSettings.from_strings(texts)
    return texts


async def declare(
    subscriptions: SubscriptionClient, name: str, topics: Sequence[str], settings: Mapping[str, str], *, update: bool
) -> DeclaredSubscription:
    """Create the subscription, or use the existing one if it matches or may be changed."""
    try:
        await subscriptions.create(name, topics, settings)
    except SubscriptionExists:
        return await _reconcile(subscriptions, name, topics, settings, update=update)
    return _declared(name, SubscriptionSettings.from_strings(settings))


async def _reconcile(
    subscriptions: SubscriptionClient, name: str, topics: Sequence[str], settings: Mapping[str, str], *, update: bool
) -> DeclaredSubscription:
    (described,) = await subscriptions.describe([name])
    known: dict[str, str] = described["settings"]
    found = differences(described, topics, settings, spelled=_SPELLED)
    if found and not update:
        raise SubscriptionExists(
            f"subscription {name!r} exists with other settings: {'; '.join(found)}; update=True changes it"
        )
    changed = {
        setting: value for setting, value in settings.items() if setting != START and known.get(setting) != value
    }
    other_topics = set(topics) != set(described["topics"]) or described["has_hidden_topics"]
    if changed or other_topics:
        await subscriptions.alter(name, changed, topics=topics if other_topics else None)
    return _declared(name, SubscriptionSettings.from_strings({**known, **changed}))


def _declared(name: str, settings: SubscriptionSettings) -> DeclaredSubscription:
    return DeclaredSubscription(name, settings.lease_ms / 1000, settings.delivery)


_Reading = Callable[[str, Any], dict[str, str]]
"""Converts an argument, given by name and value, to settings."""


def _checked(setting: str, check: Callable[..., None]) -> _Reading:
    def read(name: str, value: Any) -> dict[str, str]:
        check(name, value, error=InvalidSubscription)
        return {setting: value_text(value)}

    return read


def _seconds(setting: str) -> _Reading:
    def read(name: str, value: Any) -> dict[str, str]:
        check_number(name, value, error=InvalidSubscription)
        return {setting: milliseconds_text(value, SubscriptionSettings.declared()[setting], name=name)}

    return read


def _backoff(name: str, value: Any) -> dict[str, str]:
    if isinstance(value, int | float):
        return _seconds(BACKOFF_MIN)(name, value)
    check_pair(name, value, InvalidSubscription)
    return {**_seconds(BACKOFF_MIN)(name, value[0]), **_seconds(BACKOFF_MAX)(name, value[1])}


_SETTINGS: Final[dict[str, _Reading]] = {
    "filter": _checked(FILTER, check_text),
    "delivery": _checked(DELIVERY, check_text),
    "ordered": _checked(ORDERED, check_bool),
    "lease": _seconds(LEASE),
    "attempts": _checked(ATTEMPTS, check_integer),
    "backoff": _backoff,
    "dead_letter": _checked(DEAD_LETTER_TOPIC, check_text),
    "start": lambda _name, value: {START: _start(value)},
    "expires": _seconds(EXPIRES),
    "ledger": _checked(LEDGER, check_bool),
}


_SPELLED: Final = {
    FILTER: "filter",
    DELIVERY: "delivery",
    ORDERED: "ordered",
    LEASE: "lease",
    ATTEMPTS: "attempts",
    BACKOFF_MIN: "backoff minimum",
    BACKOFF_MAX: "backoff maximum",
    DEAD_LETTER_TOPIC: "dead_letter",
    EXPIRES: "expires",
    LEDGER: "ledger",
}
"""The names of the arguments of settings."""


def _start(start: Start) -> str:
    if isinstance(start, timedelta):
        return f"{BY_DURATION}PT{int(start.total_seconds())}S"
    if isinstance(start, datetime):
        if start.tzinfo is None:
            raise InvalidSubscription("start: the start time of a subscription needs a time zone")
        return f"{AT_TIME}{int(start.timestamp() * 1000)}"
    if not isinstance(start, str):
        raise InvalidSubscription(f"start must be a string, a time or a timedelta, not {start!r}")
    try:
        text = start if start.startswith(AT_TIME) else start_of(start)
        SubscriptionSettings.from_strings({START: text})
        return text
    except InvalidRequest as error:
        raise InvalidSubscription(f"start: {error}") from error


_WAITING_MAX: Final = 1000
"""How many subscriptions and listeners of one connection may wait at a node."""


class AccessOptions(TypedDict, total=False):
    """The encryption and authentication of a connection."""

    tls: bool | str | Path | ssl.SSLContext
    user: str | None
    password: str | None
    token: str | Callable[[], str] | None


def connect(
    *addresses: str,
    client_id: str = "millstream-python",
    timeout: float = 30.0,
    connect_timeout: float = 10.0,
    publish_timeout: float = 120.0,
    linger: float = 0.0,
    compression: str = "none",
    acks: int | Literal["all"] = ACKS_ALL,
    batch_bytes: int = BATCH_BYTES,
    buffer_bytes: int = BUFFER_BYTES,
    receipts: str | Path | None = None,
    profile: str | None = None,
    **access: Unpack[AccessOptions],
) -> Connection:
    """Prepare a connection to the cluster at these addresses; enter it to connect.

    If no broker listens there, connecting is retried for `connect_timeout` seconds: broker and program may start
    together. `timeout` bounds requests, in seconds; `publish_timeout` bounds a publish, which is retried through
    failures until then. `linger` makes messages wait for others; without it they are sent at once, and batches grow
    under load. `acks` is "all" (or -1) for all in-sync replicas, 1 for the leader alone, 0 for no acknowledgement.
    `receipts` names a file in which every acknowledged message is recorded, to be checked against the log later. `tls`
    is a file with the authority that signed the brokers' certificates, True for those that the machine trusts, or a
    context of your own, which may hold a certificate of the client. `user` and `password` authenticate by SCRAM,
    `token` by a bearer token, or a function that returns one when it is needed. `profile` names the user's profile from
    which addresses, TLS and identity are taken if they are not given here.
    """
    for name in access.keys() - AccessOptions.__annotations__.keys():
        raise TypeError(f"connect() got an unexpected keyword argument {name!r}")
    if profile is not None:
        chosen = load_profile(profile)
        addresses = addresses or tuple(filter(None, chosen.brokers.split(",")))
        access = _completed(access, chosen)
    needed = ACKS_ALL if acks == "all" else acks
    _check_options(addresses, needed, compression, receipts)
    check_text("client_id", client_id)
    times = {
        "timeout": timeout,
        "connect_timeout": connect_timeout,
        "publish_timeout": publish_timeout,
        "linger": linger,
    }
    for name, seconds in times.items():
        check_number(name, seconds)
    check_integer("batch_bytes", batch_bytes, 1)
    check_integer("buffer_bytes", buffer_bytes, 1)
    client = Client.connect(
        ",".join(addresses),
        client_id=client_id,
        timeout_s=timeout,
        connect_s=connect_timeout,
        waiting_max=_WAITING_MAX,
        advice="start one with `millstream serve`, or pass the address of a running one to millstream.connect",
        credentials=_credentials(**access),
    )

    def publisher() -> Publisher:
        return Publisher(
            client,
            linger_s=linger,
            batch_bytes=batch_bytes,
            buffer_bytes=buffer_bytes,
            compression=compression,
            acks=needed,
            timeout_s=publish_timeout,
        )

    book = None if receipts is None else ReceiptBook(receipts)
    return Connection(client, publisher, client_id=client_id, book=book)


def _completed(access: AccessOptions, profile: Profile) -> AccessOptions:
    """Return the options completed by the profile; an identity comes as a whole from one of the two."""
    merged = access.copy()
    if "tls" not in access and (context := profile.tls_context()) is not None:
        merged["tls"] = context
    if access.get("user") is None and access.get("token") is None:
        if profile.user:
            merged["user"], merged["password"] = profile.user, profile.read_password()
        elif profile.token or profile.token_file:
            # Read for each connection: tokens are short-lived.
            merged["token"] = profile.read_token
    return merged


def _credentials(
    tls: bool | str | Path | ssl.SSLContext = False,
    user: str | None = None,
    password: str | None = None,
    token: str | Callable[[], str] | None = None,
) -> Credentials:
    """Raise for options that exclude each other; no message contains a secret."""
    if (user is None) != (password is None):
        raise InvalidRequest("pass user and password together")
    if user is not None and token is not None:
        raise InvalidRequest("pass a user with its password, or a token, not both")
    if isinstance(tls, ssl.SSLContext):
        context: ssl.SSLContext | None = tls
    elif isinstance(tls, bool):
        context = client_tls() if tls else None
    elif isinstance(tls, str | os.PathLike):
        context = client_tls(tls)
    else:
        raise InvalidRequest(
            "tls must be the file of an authority, True, or an ssl.SSLContext (with load_cert_chain for a client "
            f"certificate), not {tls!r}"
        )
    token_source = (lambda: token) if isinstance(token, str) else token
    return Credentials(tls=context, user=user or "", password=password or "", token=token_source, spelled=SDK_SPELLED)


def _check_options(addresses: Sequence[object], acks: object, compression: object, receipts: object) -> None:
    """Reject invalid options, by the name of the argument."""
    if not addresses:
        raise InvalidRequest('pass the address of a broker, as in millstream.connect("localhost:9092")')
    for address in addresses:
        if not isinstance(address, str):
            raise InvalidRequest(f'an address must be a string such as "localhost:9092", not {address!r}')
    if isinstance(acks, bool) or acks not in (ACKS_ALL, 1, ACKS_NONE):
        raise InvalidRequest(f'acks must be "all" (or -1), 1 or 0, not {acks!r}')
    if compression not in COMPRESSIONS:
        raise InvalidRequest(f"compression must be one of {', '.join(COMPRESSIONS)}, not {compression!r}")
    if receipts is not None and not isinstance(receipts, str | os.PathLike):
        raise InvalidRequest(f"receipts must be a file name, not {receipts!r}")
    if receipts is not None and acks == ACKS_NONE:
        raise InvalidRequest("without acknowledgements (acks=0) there are no receipts to keep")


class Connection:
    """A program's connection to Millstream. Use it as a context manager, on one event loop."""

    def __init__(
        self, client: Client, publisher: Callable[[], Publisher], *, client_id: str, book: ReceiptBook | None = None
    ) -> None:
        self.client = client
        """The underlying client of the wire protocol, for operations that this class does not offer."""
        self._client_id = client_id
        self._make_publisher = publisher
        self._publisher: Publisher | None = None
        self._book = book
        self._subscriptions = SubscriptionClient(client)
        self._subscribers: list[Subscriber] = []
        self._streams: weakref.WeakSet[MessageStream] = weakref.WeakSet()
        """Weak: a stream ends when nothing iterates over it any more."""
        self._leaving: dict[asyncio.Task[None], Source] = {}
        """The sources of streams that ended this way, until their messages are settled."""
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        if self._book is not None:
            self._book.__enter__()
        try:
            await self.client.__aenter__()
        except BaseException:
            if self._book is not None:
                self._book.close()
            raise
        self._publisher = self._make_publisher()
        self._loop = asyncio.get_running_loop()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self, timeout: float | None = DRAIN_S) -> None:
        """Wait for handlers, send published messages, and close."""
        try:
            ends = [
                *(subscriber.drain(timeout) for subscriber in self._subscribers),
                *(stream.close() for stream in self._streams),
                *(_return_unsettled(task, source) for task, source in self._leaving.items()),
            ]
            ended = await asyncio.gather(*ends, return_exceptions=True)
            # Handlers may publish until they have ended.
            if self._publisher is not None:
                await self._publisher.close()
            for error in ended:
                if error is not None:
                    raise error
        finally:
            await self.client.close()
            if self._book is not None:
                self._book.close()

    # -- publishing -----------------------------------------------------------------------------------------

    @property
    def publisher(self) -> Publisher:
        """Return the publisher, for records that are already encoded."""
        if self._publisher is None:
            raise InvalidRequest("not connected: use `async with millstream.connect(…) as ms`")
        return self._publisher

    async def publish(
        self,
        topic: str,
        value: Any = None,
        *,
        key: str | bytes | None = None,
        headers: GivenHeaders = (),
        id: str | None = None,
        delay: Delay | None = None,
        deduplicate: bool = False,
        correlation_id: str | None = None,
        partition: int | None = None,
        schema: str | None = None,
    ) -> Receipt:
        """Publish a message and return when it is stored as the topic's settings require.

        Values are bytes, strings, or anything that JSON can represent. With `schema`, a subject of the registry, the
        value is encoded with its latest version instead. Messages with the same key keep their order.
        `delay`, in seconds or a time, is honoured by subscriptions. With `deduplicate`, a message whose `id` was
        published within the topic's `deduplication.window.ms` is not stored again, and the receipt is that of the
        first.
        """
        _check_topic(topic)
        content, kind = encoded(value) if schema is None else (await self._encoded(schema, value), ())
        written = headers_of(headers, kind, id, delay)
        if correlation_id is not None:
            check_text("correlation_id", correlation_id)
        if tracing.is_enabled():
            with tracing.publish_span(topic, client_id=self._client_id, correlation=correlation_id) as span:
                written = tracing.outgoing(written, correlation_id)
                receipt = await self._send(topic, key_bytes(key), content, written, partition, deduplicate)
                span.record_receipts([receipt])
                return receipt
        written = tracing.outgoing(written, correlation_id)
        if deduplicate or self._book is not None:
            return await self._send(topic, key_bytes(key), content, written, partition, deduplicate)
        return await self.publisher.send(topic, key_bytes(key), content, written, -1, partition)

    async def publish_many(
        self, topic: str, values: Iterable[Any], *, partition: int | None = None, schema: str | None = None
    ) -> list[Receipt]:
        """Publish values, or `NewMessage`s, and wait for all of them; receipts are in the order given.

        `schema` is as for `publish`; a message may name another.

        Raises `PublishFailed` if some could not be stored: it says which, and holds the receipts of the others.
        """
        _check_topic(topic)
        if isinstance(values, str | bytes | bytearray | memoryview | Mapping) or not isinstance(values, Iterable):
            raise InvalidRequest(
                f"values must be a list, or another iterable, of values or messages, not one {type(values).__name__}; "
                "publish takes a single value"
            )
        if tracing.is_enabled():
            messages = list(values)
            with tracing.publish_span(topic, count=len(messages), client_id=self._client_id) as span:
                receipts = await self._send_many(topic, await self._records(messages, schema), partition)
                span.record_receipts(receipts)
                return receipts
        return await self._send_many(topic, await self._records(values, schema), partition)

    async def _encoded(self, schema: str, value: Any) -> bytes | None:
        check_text("schema", schema)
        if value is None:
            return None
        from millstream.client.schemas import codecs_of

        return await codecs_of(self.client).encode(schema, value)

    async def _records(self, values: Iterable[Any], schema: str | None) -> list[NewRecord]:
        records = []
        for value in values:
            subject = (value.schema or schema) if isinstance(value, NewMessage) else schema
            if subject is None:
                records.append(_record(value))
            else:
                plain = value if isinstance(value, NewMessage) else NewMessage(value)
                records.append(_record(replace(plain, value=await self._encoded(subject, plain.value))))
        return records

    async def flush(self) -> None:
        """Wait until everything that was published is acknowledged."""
        await self.publisher.flush()

    async def delivery(self, receipt: Receipt, *, subscription: str, wait: float = 0.0) -> MessageDelivery:
        """Return the delivery state of a message in a subscription; wait up to this many seconds for it to be final."""
        if not isinstance(receipt, Receipt):
            raise InvalidRequest(f"receipt must be a receipt that publish returned, not {receipt!r}")
        check_text("subscription", subscription)
        check_number("wait", wait)
        return await _delivery(self.client, receipt, subscription, wait)

    async def leases(self, subscription: str, *, limit: int = 1000) -> HeldLeases:
        """Return the holders of leased messages with their deadlines and attempts, in at most `limit` ranges."""
        check_text("subscription", subscription)
        check_integer("limit", limit, 1)
        return await self._subscriptions.leases(subscription, limit=limit)

    async def _send(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        partition: int | None,
        deduplicate: bool,
    ) -> Receipt:
        check_bool("deduplicate", deduplicate)
        if deduplicate:
            receipt = await _publish_deduplicated(self.client, topic, NewRecord(key, value, headers), partition)
        else:
            receipt = await self.publisher.send(topic, key, value, headers, -1, partition)
        if self._book is not None:
            self._book.keep([receipt], [value])
        return receipt

    async def _send_many(self, topic: str, records: list[NewRecord], partition: int | None) -> list[Receipt]:
        try:
            receipts = await self.publisher.publish_many(topic, records, partition=partition)
        except PublishFailed as error:
            self._keep(records, error.outcomes)
            raise
        self._keep(records, receipts)
        return receipts

    def _keep(self, records: Sequence[NewRecord], outcomes: Sequence[object]) -> None:
        """Record the acknowledged messages; others of the same call may have failed."""
        if self._book is None:
            return
        stored = [
            (outcome, record.value)
            for outcome, record in zip(outcomes, records, strict=True)
            if isinstance(outcome, Receipt)
        ]
        self._book.keep([receipt for receipt, _ in stored], [value for _, value in stored])

    # -- subscribing ----------------------------------------------------------------------------------------

    async def subscribe(
        self,
        topics: str | Sequence[str],
        handler: Handler,
        *,
        name: str | None = None,
        live: bool = False,
        concurrency: int = 10,
        in_flight: int = 1000,
        update: bool = False,
        **options: Unpack[SubscriptionOptions],
    ) -> Subscriber:
        """Handle the messages of a subscription, which is declared if it does not exist.

        A handler that returns accepts its message. One that raises releases it for redelivery after the backoff;
        `Reject` sends it to the dead letter topic at once, and `RetryLater` sets the delay. Plain functions run in
        threads. At most `concurrency` messages are handled at once and `in_flight` are held. Leases are renewed while
        messages are held. Settings (`filter`, `delivery`, `ordered`, `lease`, `attempts`, `backoff`, `dead_letter`,
        `start`, `expires`, `ledger`) must match the declared ones, or are changed with `update`. With `live`, nothing
        is declared: the handler gets what is published from now on.
        """
        _check_handler(handler)
        check_integer("concurrency", concurrency, 1, InvalidSubscription)
        check_integer("in_flight", in_flight, 1, InvalidSubscription)
        check_bool("live", live, InvalidSubscription)
        settings = requested_settings(options)
        source: Source
        if live:
            _refuse_declared({**options, "name": name, "update": update or None})
            source = LiveReceiver(self.client, _listed(topics))
        else:
            declared = await self._declare(topics, name, settings, update=update)
            source = self._receiver(declared, credit=in_flight, ahead=concurrency)

        async def forget(delete: bool) -> None:
            if subscriber in self._subscribers:
                self._subscribers.remove(subscriber)
            if delete and not live:
                await self._subscriptions.delete(source.subscription)

        subscriber = Subscriber(source, handler, concurrency=min(concurrency, in_flight), forget=forget)
        await subscriber.start()
        self._subscribers.append(subscriber)
        return subscriber

    def subscription(
        self,
        topics: str | Sequence[str],
        *,
        name: str,
        in_flight: int = 1000,
        update: bool = False,
        **options: Unpack[SubscriptionOptions],
    ) -> MessageStream:
        """Iterate over the messages of a subscription; settle each with `ack`, `nack` or `reject`.

        Settings are given as for `subscribe`.
        """
        check_integer("in_flight", in_flight, 1, InvalidSubscription)
        settings = requested_settings(options)

        async def begin() -> Source:
            declared = await self._declare(topics, name, settings, update=update)
            receiver = self._receiver(declared, credit=in_flight, ahead=1)
            await receiver.start()
            return receiver

        return self._stream(begin)

    def listen(self, topics: str | Sequence[str]) -> MessageStream:
        """Iterate over what is published from now on: nothing is declared, stored or settled."""

        async def begin() -> Source:
            receiver = LiveReceiver(self.client, _listed(topics))
            await receiver.start()
            return receiver

        return self._stream(begin)

    async def _declare(
        self, topics: str | Sequence[str], name: str | None, settings: dict[str, str], *, update: bool
    ) -> DeclaredSubscription:
        if not name:
            raise InvalidSubscription("a subscription needs a name; live=True listens without one")
        check_text("name", name, InvalidSubscription)
        check_bool("update", update, InvalidSubscription)
        return await declare(self._subscriptions, name, _listed(topics), settings, update=update)

    def _receiver(self, declared: DeclaredSubscription, *, credit: int, ahead: int) -> Receiver:
        worker = f"{self._client_id}/{uuid.uuid4().hex}"
        return Receiver(
            self.client,
            declared.name,
            worker,
            credit=credit,
            ahead=ahead,
            lease_s=declared.lease_s,
            delivery=declared.delivery,
        )

    def _stream(self, begin: Callable[[], Any]) -> MessageStream:
        stream = MessageStream(begin, self._on_abandoned)
        self._streams.add(stream)
        return stream

    def _on_abandoned(self, source: Source) -> None:
        """Close a stream that is no longer iterated over; the garbage collector may call this in any thread."""
        try:
            here = asyncio.get_running_loop()
        except RuntimeError:
            here = None
        if self._loop is None:
            return
        if self._loop is here:
            self._leave(source)
        else:
            with suppress(RuntimeError):  # The loop has ended, and everything on it.
                self._loop.call_soon_threadsafe(self._leave, source)

    def _leave(self, source: Source) -> None:
        task = asyncio.get_running_loop().create_task(source.leave())
        self._leaving[task] = source
        task.add_done_callback(self._on_stream_closed)

    def _on_stream_closed(self, task: asyncio.Task[None]) -> None:
        source = self._leaving.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _logger.warning("messages of %r could not be released: %s", source.subscription, error)


async def _return_unsettled(leaving: asyncio.Task[None], source: Source) -> None:
    """Also return messages that are not settled."""
    await cancel_and_wait(leaving)
    await source.stop_and_return()
    await source.close()


def _listed(topics: str | Sequence[str]) -> list[str]:
    if not isinstance(topics, str | Iterable):
        raise InvalidTopicName(f"topics must be the name of a topic, or a list of names, not {topics!r}")
    listed = [topics] if isinstance(topics, str) else list(topics)
    if not listed:
        raise UnknownTopic("name at least one topic")
    for topic in listed:
        _check_topic(topic)
    return listed


def _check_topic(topic: object) -> None:
    if not isinstance(topic, str):
        raise InvalidTopicName(f"topic must be the name of a topic, a string, not {topic!r}")
    _check_name(topic)


_check_name = lru_cache(maxsize=1024)(check_topic_name)


def _check_handler(handler: object) -> None:
    if not callable(handler):
        raise InvalidSubscription(
            f"handler must be a function that takes a message, not {handler!r}; pass it without calling it"
        )
    try:
        signature = inspect.signature(handler)
    except ValueError:
        return  # The signature of a function in another language is unknown.
    try:
        signature.bind(None)
    except TypeError:
        name = getattr(handler, "__qualname__", repr(handler))
        raise InvalidSubscription(
            f"handler must take a message and no other argument without a default, but {name} takes {signature}"
        ) from None


def _refuse_declared(settings: Mapping[str, object]) -> None:
    """Reject settings that only a declared subscription has."""
    names = [name for name, value in settings.items() if value is not None]
    if names:
        raise InvalidSubscription(
            f"with live=True nothing is declared, so {', '.join(names)} has no effect; omit it, or omit live=True"
        )


def _record(value: Any) -> NewRecord:
    if not isinstance(value, NewMessage):
        content, kind = encoded(value)
        return NewRecord(None, content, tracing.outgoing(kind))
    if value.correlation_id is not None:
        check_text("correlation_id", value.correlation_id)
    content, kind = encoded(value.value)
    headers = headers_of(value.headers, kind, value.id, value.delay)
    return NewRecord(key_bytes(value.key), content, tracing.outgoing(headers, value.correlation_id))


async def _publish_deduplicated(client: Client, topic: str, record: NewRecord, partition: int | None) -> Receipt:
    """Publish a message unless its id was published recently; the receipt is that of the first."""
    header_id = next((value for name, value in record.headers if name == MESSAGE_ID and value), None)
    if header_id is None:
        raise InvalidRequest("deduplicate=True needs id=…: messages are identified by their id")
    if partition is not None:
        check_integer("partition", partition)
    topic_metadata = (await client.metadata([topic], create=True)).topics.get(topic)
    if topic_metadata is None:
        raise UnknownTopic(f"topic {topic!r} does not exist; create it with: millstream topic create {topic}")
    at = partition_of(record.key, header_id, len(topic_metadata.partitions)) if partition is None else partition
    if record.timestamp_ms < 0:
        record = record._replace(timestamp_ms=int(time.time() * 1000))
    (placed,) = await publish_once(client, topic, at, [record])
    return Receipt(
        topic, at, placed.offset, placed.timestamp_ms, str(topic_metadata.topic_id), header_id.decode(errors="replace")
    )


async def _delivery(client: Client, receipt: Receipt, subscription: str, wait_s: float) -> MessageDelivery:
    """Return the delivery state of a message; wait at most this long for it to be final."""
    if receipt.offset < 0:
        raise InvalidRequest("the position of this message is unknown: it was published without acknowledgement")
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while True:
        wait_ms = max(0, int((deadline - loop.time()) * 1000))
        state = await delivery_state(
            client,
            subscription,
            receipt.topic,
            receipt.partition,
            receipt.offset,
            wait_ms=min(wait_ms, WAIT_MS_MAX),
        )
        if state.is_final or wait_ms <= WAIT_MS_MAX:
            return state
