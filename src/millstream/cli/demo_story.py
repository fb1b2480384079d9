"""The story of `millstream demo`: orders fan out to three who work on them, through a crash and a poison message."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from itertools import count
from typing import Any

from millstream.cli.demo_account import Account
from millstream.cli.demo_broker import DemoBroker
from millstream.cli.demo_member import DemoMember
from millstream.cli.demo_shop import SECRET, Billing, Progress, Shipping, Webhook
from millstream.cli.demo_table import OrdersTable
from millstream.client.admin.dead_letter import DeadLetterDesk, headers_of
from millstream.client.admin.groups import describe_group, progress_of
from millstream.client.admin.letter_pass import Outcome, revive_through, work_through
from millstream.client.admin.tailer import Message as Stored
from millstream.client.admin.tailer import Tailer
from millstream.client.admin.topics import create_topic, find_topic
from millstream.client.connection import Connection, connect
from millstream.client.payload import NewMessage
from millstream.client.receipt import Receipt
from millstream.core.push import SECRET as PUSH_SECRET
from millstream.core.push import URL as PUSH_URL
from millstream.protocol.private.subscriptions import LeasedMessage, SubscriptionClient
from millstream.protocol.wire.client import Client

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
    """Orders are numbered, so that each can be looked for; the orders of each customer must stay in order."""

    def __init__(self, broker: DemoBroker, account: Account) -> None:
        self._broker = broker
        self._account = account
        self._placed: dict[int, Receipt] = {}
        self._progress = Progress()
        self._shipping = Shipping(self._progress)
        self._billing = Billing(broker.folder, self._progress)
        self._webhook = Webhook(self._progress)
        self._table = OrdersTable(TOPIC, broker.data, account)
        self._ms: Connection

    async def run(self) -> None:
        """All steps but the stop."""
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

    # -- the steps ------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        self._account.step("A broker of its own")
        await self._broker.start()
        self._account.tell(f"process {self._broker.pid}, Kafka at {self._broker.kafka}, data in {self._broker.data}")
        self._account.tell(f"ready after {self._broker.start_s:.2f} s")

    async def _declare(self) -> None:
        """A topic, and three subscriptions to it: two with a handler here, one that pushes to a URL."""
        client = self._ms.client
        self._account.step(f"A topic with {PARTITIONS} partitions, and three who work on its orders")
        await create_topic(client, TOPIC, partitions=PARTITIONS, replication=-1, settings={"flush": "always"})
        found = len((await find_topic(client, TOPIC)).partitions)
        self._account.check(found == PARTITIONS, f"topic {TOPIC!r} is there", f"it has {found} partitions")
        await self._ms.subscribe(TOPIC, self._billing, name="billing", filter=FILTER, start="earliest")
        self._account.tell(f"billing gets the large orders ({FILTER}), and bills each once")
        await self._ms.subscribe(
            TOPIC,
            self._shipping,
            name="shipping",
            ordered=True,
            attempts=ATTEMPTS,
            backoff=(0.1, 1.0),
            dead_letter=DEAD,
            start="earliest",
        )
        self._account.tell("shipping gets all orders, those of each customer one after the other")
        pushed = {PUSH_URL: self._webhook.url, PUSH_SECRET: SECRET, "share.auto.offset.reset": "earliest"}
        await SubscriptionClient(client).create("webhook", [TOPIC], pushed)
        self._account.tell(f"a webhook gets all orders, pushed to {self._webhook.url} and signed")
        await self._table.declare(client)

    async def _fan_out(self) -> None:
        """Each message is stored once, and each subscription gets it."""
        self._account.step("Orders fan out")
        began = time.monotonic()
        await self._publish(range(FIRST))
        took_ms = (time.monotonic() - began) * 1000
        by_partition = Counter(receipt.partition for receipt in self._placed.values())
        self._account.tell(f"{FIRST:,} orders acknowledged after fsync, {took_ms:.0f} ms: {_counts(by_partition)}")
        await self._handled(range(FIRST))
        self._check_handled(range(FIRST))

    async def _stream(self) -> None:
        """The same log, as Kafka clients read it."""
        self._account.step("The log is there for everyone: a consumer group of two members reads it, too")
        await self._catch_up(range(FIRST), members=2)

    async def _crash(self) -> None:
        """Kill the broker while orders come and are worked on; what it has acknowledged must be there."""
        self._account.step("kill -9 in the middle of it all")
        new = range(FIRST, FIRST + THROUGH_CRASH)
        publishing = asyncio.create_task(self._publish(new))
        try:
            await self._until(lambda: len(self._placed) >= FIRST + KILL_AFTER)
            await self._broker.kill()
            acknowledged = len(self._placed) - FIRST
            shipped = len({number for _, number in self._shipping.parcels}) - FIRST
            self._account.tell(
                f"killed with {acknowledged:,} of {THROUGH_CRASH:,} orders acknowledged, {shipped:,} shipped"
            )
            await self._broker.start()
            self._account.tell(f"started again on the same data, ready after {self._broker.start_s:.2f} s")
            async with asyncio.timeout(_STEP_S_MAX):
                await publishing
        finally:
            publishing.cancel()
        self._account.tell(
            f"the publisher and the workers went on by themselves: {THROUGH_CRASH:,} orders acknowledged"
        )
        found = await self._read_log()
        self._check_read(found, range(new.stop), "the log: ")
        self._check_places(found)
        await self._handled(range(new.stop))
        self._check_handled(range(new.stop))
        await self._catch_up(new)

    async def _poison(self) -> None:
        """An order that shipping cannot handle; it must hold up nobody else, and come back once it can be handled."""
        self._account.step("A poison message")
        poison = next(number for number in count(len(self._placed)) if _is_large(number))
        everything = range(poison + 1 + BEHIND_POISON)
        await self._publish(range(len(self._placed), poison))
        await self._publish(range(poison, poison + 1), city=None)
        await self._publish(range(poison + 1, everything.stop))
        self._account.tell(
            f"order {poison} has no city, and shipping fails at it; {BEHIND_POISON} orders come after it"
        )
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
        self._shipping.is_corrected = True
        redriven = await self._letters(redrive=True)
        self._account.check(
            len(redriven) == 1, "shipping is corrected, 1 letter is delivered to it again", str(redriven)
        )
        await self._until(lambda: self._shipped(range(poison, poison + 1)))
        self._account.check(
            self._webhook.orders[poison] == 1, f"order {poison} is shipped; nobody else got it again", "others got it"
        )
        await self._handled(everything)
        self._check_billed(everything)
        self._account.check(not await self._letters(), "no letter is left", "there are letters")

    # -- what the steps are made of ---------------------------------------------------------------------------

    async def _publish(self, numbers: range, **other: object) -> None:
        for start in range(numbers.start, numbers.stop, _BATCH):
            batch = range(start, min(start + _BATCH, numbers.stop))
            orders = [NewMessage(value=_order(number, **other), key=_customer(number)) for number in batch]
            self._placed.update(zip(batch, await self._ms.publish_many(TOPIC, orders), strict=True))
            self._progress.tell()

    async def _until(self, condition: Callable[[], bool]) -> None:
        await self._progress.until(condition, within_s=_STEP_S_MAX)

    async def _handled(self, expected: range) -> None:
        """Wait until all three are done with the orders."""
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
        twice = f" ({again:,} came again, since their acknowledgement was lost)" if again else ""
        self._account.check(
            not mixed,
            f"shipping: {len(first):,} orders, those of each customer in order{twice}",
            f"those of {mixed} came out of order",
        )
        again = sum(self._webhook.orders.values()) - len(self._webhook.orders)
        twice = f" ({again:,} came again)" if again else ""
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
            f"{len(set(large) - bills.keys())} are missing and {bills.total() - len(bills)} were billed again",
        )

    async def _catch_up(self, missed: range, members: int = 1) -> None:
        """Members of the group read what it has not read yet, and only that."""
        changed = asyncio.Condition()
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks, asyncio.timeout(_STEP_S_MAX):
            group = [await self._member(stack, changed) for _ in range(members)]
            for member in group:
                tasks.create_task(member.run())
            async with changed:
                await changed.wait_for(lambda: sum(len(member.read) for member in group) >= len(missed))
            for member in group:
                member.stop()
        self._check_read([message for member in group for message in member.read], missed, f"group {GROUP!r}: ")
        progress = await progress_of(self._ms.client, await describe_group(self._ms.client, GROUP))
        lag = sum(one.lag or 0 for one in progress)
        self._account.check(lag == 0, "it has committed all of them", f"it is {lag:,} messages behind")

    async def _member(self, stack: AsyncExitStack, changed: asyncio.Condition) -> DemoMember:
        client = await stack.enter_async_context(Client.connect(self._broker.kafka, client_id="demo-member"))
        return DemoMember(client, GROUP, TOPIC, partitions=PARTITIONS, changed=changed)

    async def _read_log(self) -> list[Stored]:
        client, starts = self._ms.client, dict.fromkeys(range(PARTITIONS), 0)
        ends = await client.list_offsets(TOPIC, dict.fromkeys(range(PARTITIONS), -1))
        tailer = Tailer(client, TOPIC, starts, patience_s=_STEP_S_MAX, note=self._account.tell)
        return [message async for message in tailer.until({index: found.offset for index, found in ends.items()})]

    def _check_read(self, messages: Sequence[tuple[int, Any]], expected: range, what: str) -> None:
        numbers = [_number(record.value) for _, record in messages]
        missing = set(expected) - set(numbers)
        self._account.check(
            sorted(numbers) == list(expected),
            f"{what}{len(expected):,} orders, each of them once",
            f"{len(missing)} are missing and {len(numbers) - len(set(numbers))} came twice",
        )

    def _check_places(self, messages: Sequence[tuple[int, Any]]) -> None:
        """Every message lies where its acknowledgement said."""
        found = {_number(record.value): (partition, record.offset) for partition, record in messages}
        moved = [one for one, receipt in self._placed.items() if found[one] != (receipt.partition, receipt.offset)]
        self._account.check(
            not moved, "each acknowledged order lies at the offset it was given", f"{len(moved)} do not"
        )

    async def _letters(self, *, redrive: bool = False) -> list[LeasedMessage]:
        """The open dead letters; delivered again by their subscription, if asked for."""
        seen: list[LeasedMessage] = []

        async def look(_desk: DeadLetterDesk, letter: LeasedMessage) -> None:
            seen.append(letter)

        desk = DeadLetterDesk(self._ms.client, DEAD, "demo", patience_s=_STEP_S_MAX)
        await work_through(desk, look, Outcome(), wanted=None, limit=None, keep=True)
        if redrive:
            await revive_through(desk, Outcome(), wanted=None, limit=None)
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


def _counts(by_partition: Counter[int]) -> str:
    return ", ".join(f"{count} in partition {index}" for index, count in sorted(by_partition.items()))
