from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from millstream.client import tracing
from millstream.client.message import Lease, Message, Receipt
from millstream.core.headers import CORRELATION_ID, MESSAGE_ID, TRACEPARENT, TRACESTATE

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def taken(headers: dict[str, str] | None = None) -> Message:
    """A message as a handler receives it."""
    lease = Lease("orders", b"\x7f" * 16, 0, subscription="billing")
    message = Message(lease, 12, 0, None, b"{}", b"", 2)
    message._headers = tuple((name, text.encode()) for name, text in (headers or {}).items())
    return message


def receipt() -> Receipt:
    return Receipt("orders", 0, 12, 0, "7f")


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[InMemorySpanExporter]:
    """A tracer provider for one test; the API itself takes only one for a whole process."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    yield exporter
    provider.shutdown()


def attributes_of(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def test_without_a_context_nothing_is_added() -> None:
    headers = (("region", b"eu"),)
    assert tracing.outgoing(headers) is headers
    assert tracing.correlation_id() is None


def test_a_given_correlation_id_is_sent() -> None:
    assert tracing.outgoing((), "c-1") == ((CORRELATION_ID, b"c-1"),)


def test_a_block_has_a_correlation_id() -> None:
    with tracing.correlated("request-7"):
        assert tracing.correlation_id() == "request-7"
        assert tracing.outgoing(()) == ((CORRELATION_ID, b"request-7"),)
        assert tracing.outgoing((), "other") == ((CORRELATION_ID, b"other"),)
    assert tracing.correlation_id() is None


def test_a_handler_propagates_the_context_of_its_message() -> None:
    came = {CORRELATION_ID: "c-1", TRACEPARENT: PARENT, TRACESTATE: "a=b"}
    with tracing.handling(taken(came)):
        assert dict(tracing.outgoing(())) == {name: text.encode() for name, text in came.items()}
    assert tracing.outgoing(()) == ()


def test_the_first_message_of_a_chain_provides_the_correlation_id() -> None:
    with tracing.correlated("of a request that subscribed"), tracing.handling(taken({MESSAGE_ID: "first"})):
        assert tracing.correlation_id() == "first"


def test_an_explicit_value_precedes_the_context() -> None:
    headers = ((TRACEPARENT, b"mine"), (CORRELATION_ID, b"mine too"))
    with tracing.handling(taken({TRACEPARENT: PARENT, TRACESTATE: "a=b"})):
        assert tracing.outgoing(headers) == headers


def test_a_publish_has_a_span_that_its_message_carries(spans: InMemorySpanExporter) -> None:
    with tracing.publish_span("orders", client_id="me", correlation="c-1") as span:
        headers = dict(tracing.outgoing((), "c-1"))
        span.record_receipts([receipt()])
    (found_span,) = spans.get_finished_spans()
    assert (found_span.name, found_span.kind) == ("publish orders", trace.SpanKind.PRODUCER)
    assert attributes_of(found_span) == {
        "messaging.system": "millstream",
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.destination.name": "orders",
        "messaging.destination.partition.id": "0",
        "messaging.client.id": "me",
        "messaging.message.id": "7f/0/12",
        "messaging.message.conversation_id": "c-1",
        "millstream.offset": 12,
    }
    context = found_span.get_span_context()
    assert context is not None
    assert f"00-{context.trace_id:032x}-{context.span_id:016x}-".encode() in (headers[TRACEPARENT] or b"")


def test_many_messages_are_one_span(spans: InMemorySpanExporter) -> None:
    with tracing.publish_span("orders", count=3) as span:
        span.record_receipts([receipt()] * 3)
    (found_span,) = spans.get_finished_spans()
    assert attributes_of(found_span)["messaging.batch.message_count"] == 3
    assert "messaging.message.id" not in attributes_of(found_span)


def test_handling_is_a_child_of_the_publish(spans: InMemorySpanExporter) -> None:
    with tracing.handling(taken({TRACEPARENT: PARENT})), tracing.publish_span("bills"):
        passed_on = dict(tracing.outgoing(()))
    publish, process = spans.get_finished_spans()
    assert (process.name, process.kind) == ("process orders", trace.SpanKind.CONSUMER)
    assert process.parent is not None
    assert publish.parent is not None
    assert f"{process.parent.trace_id:032x}-{process.parent.span_id:016x}" in PARENT
    assert publish.parent.span_id == process.get_span_context().span_id  # type: ignore[union-attr]
    assert PARENT[:35].encode() in (passed_on[TRACEPARENT] or b"")
    assert attributes_of(process)["messaging.destination.subscription.name"] == "billing"
    assert attributes_of(process)["millstream.attempt"] == 2


def fail() -> None:
    raise ValueError("no such customer")


def test_a_failure_is_recorded_on_the_span(spans: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match="no such customer"), tracing.handling(taken()):
        fail()
    (span,) = spans.get_finished_spans()
    assert attributes_of(span)["error.type"] == "ValueError"
    assert span.status.status_code is trace.StatusCode.ERROR
    assert tracing.correlation_id() is None


def test_opentelemetry_is_not_imported_for_tracing() -> None:
    program = (
        "import sys; from millstream.client import tracing\n"
        "assert tracing.outgoing(()) == () and not tracing.is_enabled()\n"
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]\n"
        "import opentelemetry.trace\n"
        "assert not tracing.is_enabled()\n"
        "from opentelemetry.sdk.trace import TracerProvider\n"
        "opentelemetry.trace.set_tracer_provider(TracerProvider())\n"
        "assert tracing.is_enabled()\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
