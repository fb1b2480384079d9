"""The script of `millstream demo`: three subscriptions process orders, through a crash and a poison message."""

from __future__ import annotations

import asyncio
import base64
import hmac
import importlib
import importlib.util
import json
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from pathlib import Path
from typing import Any, Final, Self
from uuid import uuid4

from sqlalchemy import Connection as DatabaseConnection
from sqlalchemy import Engine, create_engine, text

from millstream.cli.demo import Commentary, DemoBroker
from millstream.cli.exit_code import CommandFailed
from millstream.client.admin.dead_letter import (
    DeadLetterClient,
    LetterPass,
    headers_of,
    process_letters,
    redrive_letters,
)
from millstream.client.admin.groups import describe_group, progress_of
from millstream.client.admin.message_trace import Position, trace_at
from millstream.client.admin.pipelines import PipelineClient
from millstream.client.admin.tailer import Message as Stored
from millstream.client.admin.tailer import Tailer
from millstream.client.admin.topics import create_topic, find_topic
from millstream.client.connection import Connection, connect
from millstream.client.idempotent_handler import TransactionalHandler
from millstream.client.message import Message, Receipt
from millstream.client.payload import NewMessage
from millstream.core.ids import NodeId, Offset
from millstream.core.pipeline import PipelineKind
from millstream.core.push import SECRET as PUSH_SECRET
from millstream.core.push import URL as PUSH_URL
from millstream.core.topic import TopicPartition
from millstream.protocol.messages.codec import build_request
from millstream.protocol.private.subscriptions import LeasedMessage, SubscriptionClient
from millstream.protocol.records.record import Record, decode_records
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.cluster_metadata import TopicMetadata
from millstream.protocol.wire.error_codes import error_from_code
from millstream.protocol.wire.fetch import FetchLimits
from millstream.protocol.wire.group_offsets import GroupMember, commit_offsets, committed_offsets

SECRET = "whsec_" + base64.b64encode(b"a secret of the demo alone").decode()


class Progress:
    """Lets the script wait for conditions; changes are signalled from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def notify(self) -> None:
        self._changed.set()

    def notify_from_thread(self) -> None:
        self._loop.call_soon_threadsafe(self._changed.set)

    async def until(self, condition: Callable[[], bool], *, within_s: float) -> None:
        """Wait until a condition holds; raises `TimeoutError` if that takes too long."""
        async with asyncio.timeout(within_s):
            while not condition():
                await self._changed.wait()
                self._changed.clear()


class Billing:
    """Writes a bill for each order into a database, in one transaction with the mark that the message is handled."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._engine: Engine = create_engine(f"sqlite:///{folder}/billing.db")
        with self._engine.begin() as connection:
            connection.execute(text("CREATE TABLE bills (order_id INTEGER)"))
        self._handler = TransactionalHandler(_write_bill, name="billing", store=self._engine, threads=1)
        self._progress = progress
        self.orders: set[int] = set()

    async def __call__(self, message: Message) -> None:
        await self._handler(message)
        self.orders.add(message.json()["order_id"])
        self._progress.notify()

    def bills(self) -> Counter[int]:
        with self._engine.connect() as connection:
            return Counter(connection.execute(text("SELECT order_id FROM bills")).scalars())

    async def close(self) -> None:
        await self._handler.close()
        self._engine.dispose()


def _write_bill(message: Message, connection: DatabaseConnection) -> None:
    connection.execute(text("INSERT INTO bills VALUES (:order_id)"), {"order_id": message.json()["order_id"]})


class Shipping:
    """Ships orders, those of each customer in order; until it is corrected, it cannot ship without a city."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.is_corrected = False
        self.parcels: list[tuple[str, int]] = []
        self.failures: Counter[int] = Counter()

    async def __call__(self, message: Message) -> None:
        order = message.json()
        try:
            if "city" not in order and not self.is_corrected:
                raise ValueError("the order has no city")
            self.parcels.append((message.key_text or "", order["order_id"]))
        except ValueError:
            self.failures[order["order_id"]] += 1
            raise
        finally:
            self._progress.notify()


class Webhook:
    """An endpoint that orders are pushed to; it accepts only requests signed with its secret."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.orders: Counter[int] = Counter()
        self.refused = 0
        endpoint = self

        class Request(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                self.send_response(204 if endpoint.take(self.headers, body) else 401)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Request)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="webhook", daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}/orders"

    def take(self, headers: Any, body: bytes) -> bool:
        """Process one request; return whether it is genuine."""
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        key = base64.b64decode(SECRET.removeprefix("whsec_"))
        expected = "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
        genuine = hmac.compare_digest(expected, headers["webhook-signature"] or "")
        if genuine:
            self.orders[json.loads(body)["order_id"]] += 1
        else:
            self.refused += 1
        self._progress.notify_from_thread()
        return genuine

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


_JOINS, _LEAVES = 0, -1
"""The member epochs with which a member joins and leaves."""
_REBALANCE = timedelta(seconds=10)
_FETCH = FetchLimits(1024 * 1024, 100)


class DemoMember:
    """Reads one topic for a group. `run` works until `stop` is called."""

    def __init__(self, client: Client, group: str, topic: TopicMetadata, progress: Progress) -> None:
        self._client = client
        self._group = group
        self._topic = topic
        self._member_id = uuid4().hex
        self._epoch = _JOINS
        self._positions: dict[TopicPartition, Offset] = {}
        self._stopping = False
        self._progress = progress
        self.read: list[tuple[int, Record]] = []

    async def run(self) -> None:
        """Join, read until stopped, commit and leave."""
        coordinator = await self._client.coordinator(self._group)
        while not self._stopping:
            await self._send_heartbeat(coordinator)
            await self._fetch()
        await self._commit()
        self._epoch = _LEAVES
        await self._send_heartbeat(coordinator)

    def stop(self) -> None:
        self._stopping = True

    async def _send_heartbeat(self, coordinator: NodeId) -> None:
        """Report the partitions that the member reads; commit, and read others, if the group assigns others."""
        held = sorted(where.partition for where in self._positions)
        request = build_request(
            "consumer_group_heartbeat",
            1,
            group_id=self._group,
            member_id=self._member_id,
            member_epoch=self._epoch,
            rebalance_timeout=_REBALANCE,
            subscribed_topic_names=[self._topic.name],
            topic_partitions=[{"topic_id": self._topic.topic_id, "partitions": held}] if held else [],
        )
        response = await self._client.send(coordinator, request)
        if response.error_code:
            raise error_from_code(response.error_code, None, about=f"group {self._group!r}")
        self._epoch = response.member_epoch
        if response.assignment is None or self._epoch == _LEAVES:
            return
        environment = {
            TopicPartition(self._topic.name, index)
            for topic_partition in response.assignment.topic_partitions
            for index in topic_partition.partitions
        }
        if environment == self._positions.keys():
            return
        await self._commit()
        committed = await committed_offsets(self._client, self._group)
        self._positions = {where: Offset(committed.get(where, 0)) for where in environment}
        self._progress.notify()

    async def _fetch(self) -> None:
        if not self._positions:
            await asyncio.sleep(_FETCH.max_wait_ms / 1000)
            return
        for where, response in (await self._client.fetch_many(self._positions, _FETCH)).items():
            records = [record for record in decode_records(response.records) if record.offset >= self._positions[where]]
            if records:
                self._positions[where] = Offset(records[-1].offset + 1)
                self.read.extend((where.partition, record) for record in records)
        self._progress.notify()

    async def _commit(self) -> None:
        if self._positions:
            member = GroupMember(self._member_id, self._epoch)
            await commit_offsets(self._client, self._group, self._positions, member=member)


PIPELINE: Final = "orders-table"
EVERY_MS: Final = 1000
SETUP_VARIABLE: Final = "DEMO_SPARK_SETUP"
"""The command that installs Spark, set by `make demo`."""

_CHECK_INTERVAL_S: Final = 0.5
_LANDED_S_MAX: Final = 300.0
_SQL: Final = """
    SELECT city, count(*) AS orders, sum(total) AS total, max(total) AS largest
    FROM orders GROUP BY city ORDER BY orders DESC, city
"""
_PLACES_SQL: Final = (
    'SELECT count(*) AS rows, count(DISTINCT "partition" * 1000000000 + "offset") AS places FROM orders'
)


class OrdersTable:
    """Declares the orders table, waits until it is complete, and queries it."""

    def __init__(self, topic: str, data: Path, account: Commentary) -> None:
        self._topic = topic
        self._path = data / "lake" / topic
        self._account = account

    async def declare(self, client: Client) -> None:
        """Declare the landing pipeline; on a machine without Spark it waits for it."""
        settings = {"topics": self._topic, "every.ms": str(EVERY_MS), "decode": "json"}
        await PipelineClient(client).create(PIPELINE, PipelineKind.LAND, settings)
        state = "Spark starts in the background" if _has_spark() else "it waits until Spark is installed"
        self._account.say(f"a pipeline is declared that lands all orders in a table; {state}")

    async def show(self, client: Client, messages: int) -> None:
        """Check that every message of the log is one row, and query the table."""
        self._account.step("The orders are a table")
        if not await self._is_set_up():
            self._account.say("Spark is not installed, so this part is skipped; `make spark` installs it")
            return
        started = time.monotonic()
        await self._until_landed(client, messages)
        self._account.say(f"the pipeline has landed everything after {time.monotonic() - started:.1f} s")
        result = self._query(_PLACES_SQL)[0]
        self._account.check(
            result == {"rows": messages, "places": messages},
            f"table {self._topic!r}: {messages:,} rows, one for each message of the log",
            f"there are {result['rows']} rows of {result['places']} messages",
        )
        self._account.say("SELECT city, count(*), sum(total), max(total) FROM orders GROUP BY city:")
        for row in self._query(_SQL):
            self._account.say(
                f"   {row['city'] or '(no city)':<10} {row['orders']:>6,} orders   {row['total']:>12,} in all"
                f"   {row['largest']:>6,} the largest"
            )

    async def _is_set_up(self) -> bool:
        command = os.environ.get(SETUP_VARIABLE)
        if _has_spark() or not command:
            return _has_spark()
        self._account.say("Setting up Spark; this downloads about 500 MB, once ...")
        started = time.monotonic()
        setup = await asyncio.create_subprocess_shell(command, stdin=asyncio.subprocess.DEVNULL)
        try:
            code = await setup.wait()
        except asyncio.CancelledError:
            setup.terminate()
            await setup.wait()
            raise
        importlib.invalidate_caches()
        if code or not _has_spark():
            raise CommandFailed(f"setting up Spark failed: {command!r} ended with {code}")
        self._account.say(f"set up after {time.monotonic() - started:.0f} s")
        return True

    async def _until_landed(self, client: Client, messages: int) -> None:
        pipelines = PipelineClient(client)
        described: dict[str, Any] = {}
        try:
            async with asyncio.timeout(_LANDED_S_MAX):
                while self._landed() < messages:
                    await asyncio.sleep(_CHECK_INTERVAL_S)
                    (described,) = await pipelines.describe([PIPELINE])
                    if described["state"] == "parked":
                        raise CommandFailed(f"the demo failed: the pipeline was parked: {described['parked']}")
        except TimeoutError:
            raise CommandFailed(f"the demo failed: the orders were not landed in time: {described}") from None

    def _landed(self) -> int:
        from deltalake import DeltaTable

        if not DeltaTable.is_deltatable(str(self._path)):
            return 0
        return int(self._query("SELECT count(*) AS rows FROM orders")[0]["rows"])

    def _query(self, sql: str) -> list[dict[str, Any]]:
        """Run a query with the library that reads the tables, without Spark."""
        import pyarrow as pa
        from deltalake import DeltaTable, QueryBuilder

        query = QueryBuilder().register("orders", DeltaTable(str(self._path)))
        rows: list[dict[str, Any]] = pa.table(query.execute(sql)).to_pylist()
        return rows


def _has_spark() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("pyspark", "pyarrow", "deltalake"))


TOPIC, DEAD = "orders", "orders-dead"
GROUP = "analysis"
FILTER = "payload.total > 4000"
PARTITIONS, CUSTOMERS = 4, 25
CITIES = ("Ghent", "Lyon", "Porto", "Turin")
FIRST, THROUGH_CRASH, BEHIND_POISON = 500, 1000, 20
KILL_AFTER = 300
ATTEMPTS = 3
_BATCH = 20
_STEP_S_MAX = 120.0


class Story:
    """Orders are numbered, so that each can be found; the orders of each customer must stay in order."""

    def __init__(self, broker: DemoBroker, account: Commentary) -> None:
        self._broker = broker
        self._account = account
        self._placed: dict[int, Receipt] = {}
        self._progress = Progress()
        self._shipping = Shipping(self._progress)
        self._billing = Billing(broker.folder, self._progress)
        self._webhook = Webhook(self._progress)
        self._table = OrdersTable(TOPIC, broker.data, account)
        self._poison_order = 0
        self._ms: Connection

    async def run(self) -> None:
        """Run all steps but the stop."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._billing.close)
            stack.enter_context(self._webhook)
            await self._start()
            self._ms = await stack.enter_async_context(connect(self._broker.kafka, client_id="demo"))
            await self._declare()
            await self._fan_out()
            await self._stream()
            await self._crash()
            await self._poison()
            await self._table.show(self._ms.client, len(await self._read_log()))
            await self._trace()
            if _has_spark():
                await self._audit()

    # -- the steps ------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._account.step("A temporary broker")
        await self._broker.start()
        self._account.say(f"process {self._broker.pid}, Kafka at {self._broker.kafka}, data in {self._broker.data}")
        self._account.say(f"ready after {self._broker.start_s:.2f} s")

    async def _declare(self) -> None:
        """Declare a topic and three subscriptions: two with a handler here, one that pushes to a URL."""
        client = self._ms.client
        self._account.step(f"A topic with {PARTITIONS} partitions, and three subscriptions that process its orders")
        await create_topic(client, TOPIC, partitions=PARTITIONS, replication=-1, settings={"flush": "always"})
        topic_metadata = len((await find_topic(client, TOPIC)).partitions)
        self._account.check(
            topic_metadata == PARTITIONS, f"topic {TOPIC!r} exists", f"it has {topic_metadata} partitions"
        )
        await self._ms.subscribe(TOPIC, self._billing, name="billing", filter=FILTER, start="earliest", ledger=True)
        self._account.say(f"billing gets the large orders ({FILTER}), and bills each once")
        await self._ms.subscribe(
            TOPIC,
            self._shipping,
            name="shipping",
            ordered=True,
            attempts=ATTEMPTS,
            backoff=(0.1, 1.0),
            dead_letter=DEAD,
            start="earliest",
            ledger=True,
        )
        self._account.say("shipping gets all orders, one at a time for each customer")
        pushed = {PUSH_URL: self._webhook.url, PUSH_SECRET: SECRET, "share.auto.offset.reset": "earliest"}
        await SubscriptionClient(client).create("webhook", [TOPIC], pushed)
        self._account.say(f"a webhook gets all orders, pushed to {self._webhook.url} and signed")

    async def _fan_out(self) -> None:
        """Check that each message is stored once and delivered to each subscription."""
        self._account.step("Orders fan out")
        started = time.monotonic()
        await self._publish(range(FIRST))
        took_ms = (time.monotonic() - started) * 1000
        by_partition = Counter(receipt.partition for receipt in self._placed.values())
        counts = ", ".join(f"{count} in partition {index}" for index, count in sorted(by_partition.items()))
        self._account.say(f"{FIRST:,} orders acknowledged after fsync, {took_ms:.0f} ms: {counts}")
        await self._await_processed(range(FIRST))
        self._check_handled(range(FIRST))

    async def _stream(self) -> None:
        """Read the same log with a Kafka consumer group."""
        self._account.step("Any Kafka client can read the log: a consumer group of two members")
        await self._catch_up(range(FIRST), members=2)

    async def _crash(self) -> None:
        """Kill the broker while orders are published and processed; everything acknowledged must survive."""
        self._account.step("kill -9 in the middle of the work")
        new = range(FIRST, FIRST + THROUGH_CRASH)
        publishing = asyncio.create_task(self._publish(new))
        try:
            await self._until(lambda: len(self._placed) >= FIRST + KILL_AFTER)
            await self._broker.kill()
            acknowledged = len(self._placed) - FIRST
            shipped = len({number for _, number in self._shipping.parcels}) - FIRST
            self._account.say(
                f"killed with {acknowledged:,} of {THROUGH_CRASH:,} orders acknowledged, {shipped:,} shipped"
            )
            await self._broker.start()
            self._account.say(f"restarted on the same data, ready after {self._broker.start_s:.2f} s")
            async with asyncio.timeout(_STEP_S_MAX):
                await publishing
        finally:
            publishing.cancel()
        self._account.say(f"the publisher and the workers resumed automatically: {THROUGH_CRASH:,} orders acknowledged")
        records = await self._read_log()
        self._check_read(records, range(new.stop), "the log: ")
        self._check_places(records)
        await self._await_processed(range(new.stop))
        self._check_handled(range(new.stop))
        await self._catch_up(new)
        # Not before the crash, which would kill Spark while it starts.
        await self._table.declare(self._ms.client)

    async def _poison(self) -> None:
        """Publish an order that shipping cannot handle; it must not delay others, and is redelivered once it can be
        handled.
        """
        self._account.step("A poison message")
        poison = self._poison_order = next(number for number in count(len(self._placed)) if _is_large(number))
        everything = range(poison + 1 + BEHIND_POISON)
        await self._publish(range(len(self._placed), poison))
        await self._publish(range(poison, poison + 1), city=None)
        await self._publish(range(poison + 1, everything.stop))
        self._account.say(f"order {poison} has no city, so shipping fails on it; {BEHIND_POISON} orders follow it")
        await self._until(lambda: self._shipping.failures[poison] >= ATTEMPTS)
        others = range(poison + 1, everything.stop)
        await self._until(lambda: self._shipped(others))
        self._account.check(self._shipped(others), "the orders after it were shipped", "they were not")
        end = await self._ms.delivery(self._placed[poison], subscription="shipping", wait=_STEP_S_MAX)
        letters = [headers_of(letter) for letter in await self._letters()]
        reason = "".join(letter["dlq-reason"] for letter in letters)
        self._account.check(
            [letter["dlq-attempts"] for letter in letters] == [str(ATTEMPTS)],
            f"after {ATTEMPTS} attempts it became a dead letter in {DEAD!r}: {reason}",
            f"it is {end.state}, and the letters are {letters}",
        )
        self._account.step("Fixed, and redriven")
        # Push may deliver a message more than once, and on a busy machine later than shipping has given it up.
        await self._until(lambda: poison in self._webhook.orders)
        pushed = self._webhook.orders[poison]
        self._shipping.is_corrected = True
        redriven = await self._letters(redrive=True)
        self._account.check(len(redriven) == 1, "shipping is fixed, and 1 letter is redriven to it", str(redriven))
        await self._until(lambda: self._shipped(range(poison, poison + 1)))
        await self._await_processed(everything)
        self._account.check(
            self._webhook.orders[poison] == pushed,
            f"order {poison} is shipped; no other subscription got it again",
            f"the webhook got it {self._webhook.orders[poison] - pushed} times more",
        )
        self._check_billed(everything)
        self._account.check(not await self._letters(), "no letter is left", "there are letters")

    async def _trace(self) -> None:
        """Show the history of the poison message in every subscription."""
        receipt = self._placed[self._poison_order]
        place = Position(TOPIC, receipt.partition, receipt.offset)
        self._account.step(f"What happened to order {self._poison_order}?")
        self._account.say(f"millstream message trace {'/'.join(map(str, place))}:")
        lives = {
            subscription["subscription"]: subscription
            for subscription in (await trace_at(self._ms.client, place))["subscriptions"]
        }
        for event in lives["shipping"]["events"]:
            reason = f": {event['reason']}" if event["reason"] else ""
            attempt = f", attempt {event['attempt']}" if event["attempt"] else ""
            self._account.say(f"   {event['kind'].replace('_', '-')}{attempt}{reason}")
        states = {name: life["state"] for name, life in lives.items()}
        self._account.check(
            states == dict.fromkeys(("billing", "shipping", "webhook"), "accepted"),
            f"it is accepted in all subscriptions, in shipping after {ATTEMPTS} failures, a dead letter and a redrive",
            f"its states are {states}",
        )

    async def _audit(self) -> None:
        """Account for every message of the subscriptions with a ledger, in its own process."""
        self._account.step("Nothing is missing (millstream audit)")
        command = [sys.executable, "-m", "millstream.cli.main", "audit", "--json", "--brokers", self._broker.kafka]
        pipe = asyncio.subprocess.PIPE
        auditing = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe, process_group=0
        )
        try:
            out, errors = await auditing.communicate()
        except asyncio.CancelledError:
            auditing.terminate()
            await auditing.wait()
            raise
        if not out:
            raise CommandFailed(f"the demo failed: the audit ended with {auditing.returncode}: {errors.decode()}")
        report = json.loads(out)
        for row in report["subscriptions"]:
            names = ("published", "accepted", "filtered", "dead_lettered", "waiting", "lost")
            self._account.say(f"   {row['subscription']}: " + ", ".join(f"{row[name]:,} {name}" for name in names))
        self._account.check(
            report["adds_up"] and all(not row["lost"] for row in report["subscriptions"]),
            "every message is accounted for, and none is lost",
            f"it does not add up: {report['findings'] or report['damage']}",
        )

    # -- helpers ----------------------------------------------------------------------------------------------

    async def _publish(self, numbers: range, **other: object) -> None:
        for start in range(numbers.start, numbers.stop, _BATCH):
            batch = range(start, min(start + _BATCH, numbers.stop))
            orders = [NewMessage(value=_order(number, **other), key=_customer(number)) for number in batch]
            self._placed.update(zip(batch, await self._ms.publish_many(TOPIC, orders), strict=True))
            self._progress.notify()

    async def _until(self, condition: Callable[[], bool]) -> None:
        await self._progress.until(condition, within_s=_STEP_S_MAX)

    async def _await_processed(self, expected: range) -> None:
        """Wait until all three have processed the orders."""
        large, everything = {number for number in expected if _is_large(number)}, set(expected)
        await self._until(
            lambda: (
                self._shipped(expected) and everything <= self._webhook.orders.keys() and large <= self._billing.orders
            )
        )

    def _shipped(self, expected: range) -> bool:
        return set(expected) <= {number for _, number in self._shipping.parcels}

    def _check_handled(self, expected: range) -> None:
        self._check_billed(expected)
        first = dict.fromkeys(self._shipping.parcels)
        by_customer: dict[str, list[int]] = {}
        for customer, number in first:
            by_customer.setdefault(customer, []).append(number)
        mixed = [customer for customer, numbers in by_customer.items() if numbers != sorted(numbers)]
        again = len(self._shipping.parcels) - len(first)
        twice = f" ({again:,} redelivered after a lost acknowledgement)" if again else ""
        self._account.check(
            not mixed,
            f"shipping: {len(first):,} orders, those of each customer in order{twice}",
            f"those of {mixed} came out of order",
        )
        again = sum(self._webhook.orders.values()) - len(self._webhook.orders)
        twice = f" ({again:,} redelivered)" if again else ""
        self._account.check(
            self._webhook.refused == 0,
            f"webhook: {len(self._webhook.orders):,} orders, each signed{twice}",
            f"{self._webhook.refused} were not signed with its secret",
        )

    def _check_billed(self, expected: range) -> None:
        large = [number for number in expected if _is_large(number)]
        bills = self._billing.bills()
        self._account.check(
            bills == Counter(large),
            f"billing: {len(large):,} large orders, each billed once",
            f"{len(set(large) - bills.keys())} are missing and {bills.total() - len(bills)} were billed twice",
        )

    async def _catch_up(self, missed: range, members: int = 1) -> None:
        """Run members of the group until they have read the messages that it has not read yet."""
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks, asyncio.timeout(_STEP_S_MAX):
            topic = await find_topic(self._ms.client, TOPIC)
            connecting = [Client.connect(self._broker.kafka, client_id="demo-member") for _ in range(members)]
            clients = [await stack.enter_async_context(connection) for connection in connecting]
            group = [DemoMember(client, GROUP, topic, self._progress) for client in clients]
            for member in group:
                tasks.create_task(member.run())
            await self._until(lambda: sum(len(member.read) for member in group) >= len(missed))
            for member in group:
                member.stop()
        self._check_read([message for member in group for message in member.read], missed, f"group {GROUP!r}: ")
        progress = await progress_of(self._ms.client, await describe_group(self._ms.client, GROUP))
        lag = sum(status.lag or 0 for status in progress)
        self._account.check(lag == 0, "it has committed all of them", f"it is {lag:,} messages behind")

    async def _read_log(self) -> list[Stored]:
        client, starts = self._ms.client, dict.fromkeys(range(PARTITIONS), 0)
        ends = await client.list_offsets(TOPIC, dict.fromkeys(range(PARTITIONS), -1))
        tailer = Tailer(client, TOPIC, starts, patience_s=_STEP_S_MAX, note=self._account.say)
        return [message async for message in tailer.until({index: listed.offset for index, listed in ends.items()})]

    def _check_read(self, messages: Sequence[tuple[int, Any]], expected: range, prefix: str) -> None:
        numbers = [_number(record.value) for _, record in messages]
        missing = set(expected) - set(numbers)
        self._account.check(
            sorted(numbers) == list(expected),
            f"{prefix}{len(expected):,} orders, each once",
            f"{len(missing)} are missing and {len(numbers) - len(set(numbers))} came twice",
        )

    def _check_places(self, messages: Sequence[tuple[int, Any]]) -> None:
        """Check that every message is stored where its receipt says."""
        places = {_number(record.value): (partition, record.offset) for partition, record in messages}
        moved = [
            message_id
            for message_id, receipt in self._placed.items()
            if places[message_id] != (receipt.partition, receipt.offset)
        ]
        self._account.check(
            not moved, "each acknowledged order is stored at its acknowledged offset", f"{len(moved)} do not"
        )

    async def _letters(self, *, redrive: bool = False) -> list[LeasedMessage]:
        """Return the open dead letters, after redriving them if requested."""
        seen: list[LeasedMessage] = []

        async def look(_dlq: DeadLetterClient, letter: LeasedMessage) -> None:
            seen.append(letter)

        dlq = DeadLetterClient(self._ms.client, DEAD, "demo", patience_s=_STEP_S_MAX)
        await process_letters(dlq, look, LetterPass(), keep=True)
        if redrive:
            await redrive_letters(dlq, LetterPass())
        return seen


def _order(number: int, **other: object) -> dict[str, object]:
    order = {"order_id": number, "total": number * 37 % 5000, "city": CITIES[number % len(CITIES)], **other}
    return {name: value for name, value in order.items() if value is not None}


def _is_large(number: int) -> bool:
    return number * 37 % 5000 > 4000


def _customer(number: int) -> str:
    return f"customer-{number * 7 % CUSTOMERS}"


def _number(value: bytes | None) -> int:
    return int(json.loads(value or b"{}").get("order_id", -1))
