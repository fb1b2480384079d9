"""Context propagation: a message inherits a correlation id and the trace of the work that publishes it.

    with tracing.publish_span("orders") as span:        # only if tracing.is_enabled()
        headers = tracing.outgoing(headers)             # correlation-id, traceparent, tracestate
        span.record_receipts([await publish(…, headers)])

    with tracing.handling(message):                     # around a handler
        await handler(message)                          # what it publishes carries the ids of `message` on

OpenTelemetry is used only in a program that has imported it and has set up a tracer provider. Everywhere else a publish
costs one dictionary lookup, and the trace of a handled message is still passed on unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from millstream.core.headers import BAGGAGE, CORRELATION_ID, TRACEPARENT, TRACESTATE
from millstream.protocol.records.record import Headers

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from millstream.client.message import Message, Receipt

_TRACE_HEADERS = (TRACEPARENT, TRACESTATE, BAGGAGE)
_SCOPE = "millstream"
_SYSTEM = "millstream"
_API = "opentelemetry.trace"


_origin: ContextVar[str | Message | None] = ContextVar("millstream_origin", default=None)
"""The origin of messages published now: a correlation id, or a message being handled."""


# -- correlation --------------------------------------------------------------------------------------------


def correlation_id() -> str | None:
    """Return the correlation id of a message published now, if any.

    In a handler it is that of the handled message, or its message id if it has none.
    """
    origin = _origin.get()
    if origin is None or isinstance(origin, str):
        return origin
    return origin.correlation_id or origin.id


@contextmanager
def correlated(identifier: str) -> Iterator[None]:
    """Set the correlation id of every message published within this block, such as that of a web request."""
    token = _origin.set(identifier)
    try:
        yield
    finally:
        _origin.reset(token)


def outgoing(headers: Headers, correlation: str | None = None) -> Headers:
    """Return the headers of a message published now: the given ones, which take precedence, and the inherited ones."""
    if correlation is None and _origin.get() is None and not is_enabled():
        return headers
    taken = {name for name, _ in headers}
    added: dict[str, bytes] = {}
    correlation = correlation or correlation_id()
    if correlation is not None:
        added[CORRELATION_ID] = correlation.encode()
    if TRACEPARENT not in taken:
        added.update((name, value.encode()) for name, value in _trace().items())
    return (*headers, *((name, value) for name, value in added.items() if name not in taken))


def _trace() -> Mapping[str, str]:
    """Return the current trace: OpenTelemetry's span, otherwise that of the handled message."""
    carrier: dict[str, str] = {}
    if is_enabled():
        from opentelemetry import propagate

        propagate.inject(carrier)
    origin = _origin.get()
    if not carrier and origin is not None and not isinstance(origin, str):
        return _texts(origin, _TRACE_HEADERS)
    return carrier


def _texts(message: Message, names: Sequence[str]) -> dict[str, str]:
    texts = ((name, message.header_text(name)) for name in names)
    return {name: text for name, text in texts if text is not None}


# -- spans --------------------------------------------------------------------------------------------------


def is_enabled() -> bool:
    """Return whether to create spans: the program has imported OpenTelemetry and set a tracer provider."""
    module = sys.modules.get(_API)
    if module is None:
        return False
    return not isinstance(module.get_tracer_provider(), (module.ProxyTracerProvider, module.NoOpTracerProvider))


class PublishSpan:
    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    def record_receipts(self, receipts: Sequence[Receipt]) -> None:
        if len(receipts) == 1:
            (receipt,) = receipts
            self._span.set_attribute("messaging.message.id", receipt.id)
            self._span.set_attribute("messaging.destination.partition.id", str(receipt.partition))
            self._span.set_attribute("millstream.offset", receipt.offset)


@contextmanager
def publish_span(
    topic: str, *, count: int = 1, client_id: str | None = None, correlation: str | None = None
) -> Iterator[PublishSpan]:
    """Start a span of kind PRODUCER that is current within the block, so that `outgoing` passes it on."""
    from opentelemetry import trace

    attributes: dict[str, Any] = {
        "messaging.system": _SYSTEM,
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": topic,
    }
    if count != 1:
        attributes["messaging.batch.message_count"] = count
    if client_id is not None:
        attributes["messaging.client.id"] = client_id
    conversation = correlation or correlation_id()
    if conversation is not None:
        attributes["messaging.message.conversation_id"] = conversation
    tracer = trace.get_tracer(_SCOPE)
    with (
        tracer.start_as_current_span(f"publish {topic}", kind=trace.SpanKind.PRODUCER, attributes=attributes) as span,
        _failure_named(span),
    ):
        yield PublishSpan(span)


working_on: Final[Callable[[Message], object]] = _origin.set
"""`handling` without spans, for a task that handles one message after another."""


class handling:  # noqa: N801
    """Wraps the work on a message: what is published there inherits its correlation id and trace.

    A class, since a generator would cost more than all the rest when no spans are created.
    """

    __slots__ = ("_message", "_span", "_token")

    def __init__(self, message: Message) -> None:
        self._message = message
        self._span: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        self._token = _origin.set(self._message)
        if is_enabled():
            self._span = _process_span(self._message)
            self._span.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if self._span is not None:
                self._span.__exit__(kind, error, traceback)
        finally:
            _origin.reset(self._token)


@contextmanager
def _process_span(message: Message) -> Iterator[None]:
    """Start a span of kind CONSUMER, whose parent is the span that published the message."""
    from opentelemetry import propagate, trace

    came_from = propagate.extract(_texts(message, sorted(propagate.get_global_textmap().fields)))
    attributes: dict[str, Any] = {
        "messaging.system": _SYSTEM,
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": message.topic,
        "messaging.destination.partition.id": str(message.partition),
        "messaging.message.id": message.id,
        "messaging.message.conversation_id": message.correlation_id or message.id,
        "messaging.message.body.size": len(message.value or b""),
        "millstream.offset": message.offset,
        "millstream.attempt": message.attempt,
    }
    if message.subscription is not None:
        attributes["messaging.destination.subscription.name"] = message.subscription
    tracer = trace.get_tracer(_SCOPE)
    with (
        tracer.start_as_current_span(
            f"process {message.topic}", context=came_from, kind=trace.SpanKind.CONSUMER, attributes=attributes
        ) as span,
        _failure_named(span),
    ):
        yield


@contextmanager
def _failure_named(span: Span) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        span.set_attribute("error.type", type(error).__qualname__)
        raise
