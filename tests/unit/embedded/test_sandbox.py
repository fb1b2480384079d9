from __future__ import annotations

import inspect
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import get_type_hints

import pytest
from confluent_kafka import Producer
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from millstream.client.connection import AccessOptions, connect
from millstream.client.idempotent_handler import IdempotentHandler
from millstream.client.message import Message
from millstream.client.sync_connection import SyncConnection, SyncMessage
from millstream.embedded import ConnectOptions, open, open_sync
from millstream.sandbox import SETTINGS, Sandbox
from millstream_testing.child_process import child_process

WAIT_S = 60.0


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    with Sandbox() as started:
        yield started


@pytest.fixture
def ms(sandbox: Sandbox) -> Iterator[SyncConnection]:
    with sandbox.connect_sync() as connection:
        yield connection


async def test_open_returns_the_same_client_and_keeps_its_data(tmp_path: Path) -> None:
    async with open(tmp_path / "data", settings=SETTINGS) as ms:
        receipt = await ms.publish("orders", {"order_id": 1})
    async with open(tmp_path / "data", settings=SETTINGS) as ms:
        stream = ms.subscription("orders", name="billing", start="earliest")
        message = await anext(stream)
        assert (message.id, message.json()) == (receipt.id, {"order_id": 1})
        await message.ack()


def test_open_without_a_loop_serves_kafka_clients(tmp_path: Path) -> None:
    with open_sync(tmp_path / "data", kafka="127.0.0.1:0", settings=SETTINGS) as ms:
        (node,) = ms._thread.call(ms._wrapped.client.metadata([])).nodes.values()
        producer = Producer({"bootstrap.servers": f"{node.host}:{node.port}", "log_level": 0})
        producer.produce("orders", b"from outside")
        assert producer.flush(WAIT_S) == 0
        for message in ms.subscription("orders", name="a", start="earliest"):
            assert message.value == b"from outside"
            message.ack()
            break


def test_nothing_is_left_after_closing() -> None:
    with Sandbox() as sandbox:
        folder = Path(sandbox._folder)
        assert folder.exists()
    assert not folder.exists()


async def test_a_sandbox_can_be_entered_in_a_loop() -> None:
    async with Sandbox(default_partitions=3) as sandbox, sandbox.connect() as ms:
        receipts = await ms.publish_many(sandbox.unique("orders"), range(10))
    assert len(receipts) == 10


def test_the_blocking_client_publishes_handles_and_settles(sandbox: Sandbox, ms: SyncConnection) -> None:
    topic, handled = sandbox.unique("orders"), threading.Event()
    threads: set[str] = set()

    def handle(message: Message) -> None:
        threads.add(threading.current_thread().name)
        ms.publish(topic + "-bills", message.json(), key=message.key)
        handled.set()

    receipt = ms.publish(topic, {"order_id": 1}, key="c7")
    subscriber = ms.subscribe(topic, handle, name=sandbox.unique("billing"), start="earliest")
    assert handled.wait(WAIT_S)
    assert ms.delivery(receipt, subscription=subscriber.name, wait=WAIT_S).is_final
    subscriber.drain()
    assert threads != {threading.main_thread().name}
    for bill in ms.subscription(topic + "-bills", name=sandbox.unique("a"), start="earliest"):
        assert (bill.json(), bill.key_text, bill.correlation_id) == ({"order_id": 1}, "c7", receipt.id)
        bill.extend(60)
        bill.ack()
        break


def test_an_idempotent_handler_works_in_the_blocking_client(
    sandbox: Sandbox, ms: SyncConnection, tmp_path: Path
) -> None:
    topic, seen = sandbox.unique("orders"), threading.Semaphore(0)

    def handle(message: Message) -> None:
        seen.release()

    handler = IdempotentHandler(handle, name="a", store=str(tmp_path / "db"))
    receipts = ms.publish_many(topic, [1, 2])
    subscriber = ms.subscribe(topic, handler, name=sandbox.unique("a"), start="earliest")
    for receipt in receipts:
        assert ms.delivery(receipt, subscription=subscriber.name, wait=WAIT_S).is_final
    assert seen.acquire(timeout=WAIT_S)
    assert seen.acquire(timeout=WAIT_S)
    subscriber.unsubscribe(delete=True)
    ms._thread.call(handler.close())


async def test_a_trace_propagates_from_message_to_message(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    orders, bills = sandbox.unique("orders"), sandbox.unique("bills")
    async with sandbox.connect() as ms:

        async def bill(message: Message) -> None:
            await ms.publish(bills, message.value)

        await ms.subscribe(orders, bill, name=orders, start="earliest")
        receipt = await ms.publish(orders, 1)
        billed = await anext(ms.subscription(bills, name=bills, start="earliest"))
        await billed.ack()
        await ms.delivery(receipt, subscription=orders, wait=WAIT_S)
    provider.shutdown()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    chain = [spans[name] for name in (f"publish {orders}", f"process {orders}", f"publish {bills}")]
    for before, after in pairwise(chain):
        context = before.get_span_context()
        assert after.parent is not None
        assert context is not None
        assert (after.parent.trace_id, after.parent.span_id) == (context.trace_id, context.span_id)
    assert f"{chain[-1].context.span_id:016x}" in (billed.traceparent or "")
    assert billed.correlation_id == receipt.id


PROGRAM = """
import signal, sys, threading, time
from millstream.client.sync_connection import connect_sync

def handle(message):
    while sys.argv[3] == "runs" and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        time.sleep(0.01)  # The main thread does not run until it is stopped yet.
    print("handling", flush=True)
    release.wait(60)
    print("handled", flush=True)

release = threading.Event()
ms = connect_sync(sys.argv[1])
ms.publish(sys.argv[2], 1)
subscriber = ms.subscribe(sys.argv[2], handle, name=sys.argv[2], start="earliest")
if sys.argv[3] == "runs":
    threading.Thread(target=lambda: (sys.stdin.read(), release.set()), daemon=True).start()
    subscriber.run_until_stopped()
    print("drained", flush=True)
else:
    sys.stdin.readline()
    release.set()
# Nothing is closed: the end of the program does it.
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, None])
def test_a_program_ends_cleanly_on_every_signal(sandbox: Sandbox, number: signal.Signals | None) -> None:
    how = "ends" if number is None else "runs"
    with child_process(
        [sys.executable, "-c", PROGRAM, sandbox.address, sandbox.unique("orders"), how],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "handling\n"
        if number is not None:
            os.kill(process.pid, number)
        output, wrong = process.communicate("\n", timeout=WAIT_S)
    assert wrong == ""
    assert output == ("handled\n" if number is None else "handled\ndrained\n")
    assert process.returncode == 0


def test_the_options_are_those_of_connect() -> None:
    taken = {
        name: parameter
        for name, parameter in inspect.signature(connect).parameters.items()
        # A profile names broker addresses, which a sandbox does not need.
        if parameter.kind is parameter.KEYWORD_ONLY and name != "profile"
    }
    options = get_type_hints(ConnectOptions)
    access = get_type_hints(AccessOptions)
    assert taken.keys() | access.keys() == options.keys()
    hints = get_type_hints(connect)
    assert {name: hints[name] for name in taken} | access == options


def test_a_blocking_message_has_every_attribute_of_a_message() -> None:
    public = {name for name in dir(Message) if not name.startswith("_")}
    assert public == SyncMessage.__annotations__.keys() | {"decode", "ack", "nack", "reject", "extend"}
    for name, hint in SyncMessage.__annotations__.items():
        declared = getattr(Message, name)
        if isinstance(declared, property):
            assert inspect.signature(declared.fget).return_annotation == hint  # type: ignore[arg-type]
