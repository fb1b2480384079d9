"""`millstream demo`: the main job end to end on a broker of its own, with an account of what happened.

It ends with 0 only if everything held, and leaves neither process nor folder behind.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from millstream.cli.exit_code import CommandFailed, ExitCode
from millstream.cli.output import print_note

if TYPE_CHECKING:
    from rich.console import Console

    from millstream.admin.tailer import Message
    from millstream.cli.demo_broker import DemoBroker
    from millstream.cli.demo_member import DemoMember
    from millstream.cli.publisher import Placed, Publisher
    from millstream.wire.client import Client

TOPIC = "orders"
GROUP = "billing"
PARTITIONS = 4
CUSTOMERS = 25
FIRST, WHILE_AWAY, THROUGH_CRASH = 1000, 200, 3000
KILL_AFTER = 800
_BATCH = 20
_PATIENCE_S = 60.0
_STEP_S_MAX = 60.0


def demo(
    keep: Annotated[
        bool,
        typer.Option("--keep", envvar="DEMO_KEEP", help="Leave the broker running at the end, until Ctrl-C."),
    ] = False,
) -> None:
    """Show the main job end to end on a broker of its own: publish, share, replay, crash, recover."""
    asyncio.run(_run(keep=keep))


async def _run(*, keep: bool) -> None:
    from rich.console import Console

    from millstream.cli.demo_broker import DemoBroker

    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    account = Account(Console(highlight=False))
    began = time.monotonic()
    try:
        async with DemoBroker() as broker:
            await Demo(broker, account).run()
            if keep:
                await _keep(broker, account)
            await _stop(broker, account)
    except asyncio.CancelledError:
        raise CommandFailed("interrupted; nothing was left behind", ExitCode.INTERRUPTED) from None
    account.end(f"Everything held. It took {time.monotonic() - began:.1f} s, and nothing was left behind.")


async def _keep(broker: DemoBroker, account: Account) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    account.step("The broker keeps running")
    account.tell(f"Kafka clients: {broker.kafka}    health and metrics: http://{broker.http}")
    account.tell(f"Try: millstream tail {TOPIC} --brokers {broker.kafka}")
    account.tell("Ctrl-C stops it and removes its folder.")
    await stopped.wait()


async def _stop(broker: DemoBroker, account: Account) -> None:
    account.step("Stop")
    code = await broker.stop()
    account.check(code == 0, "SIGTERM: the broker finished its work and stopped cleanly", f"it ended with {code}")


class Account:
    """Tells a person what happens, and stops the demo when something does not hold."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._number = 0

    def step(self, title: str) -> None:
        """Begin the next part."""
        self._number += 1
        self._console.print(f"\n[bold]{self._number}. {title}[/bold]")

    def tell(self, text: str) -> None:
        """Say something that cannot fail."""
        self._console.print(f"   {text}", soft_wrap=True)

    def check(self, held: bool, text: str, otherwise: str) -> None:
        """Say that something holds, or end the demo with the reason."""
        if not held:
            raise CommandFailed(f"the demo failed: expected that {text}, but {otherwise}")
        self._console.print(f"   [green]✓[/green] {text}", soft_wrap=True)

    def table(self, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
        """Show numbers."""
        from rich.padding import Padding
        from rich.table import Table

        table = Table(*header)
        for row in rows:
            table.add_row(*map(str, row))
        self._console.print(Padding(table, (0, 0, 0, 3)))

    def end(self, text: str) -> None:
        """Say how it ended."""
        self._console.print(f"\n[bold green]{text}[/bold green]")


class Demo:
    """The story. Orders are numbered, so that each can be looked for; each customer's orders must stay in order."""

    def __init__(self, broker: DemoBroker, account: Account) -> None:
        self._broker = broker
        self._account = account
        self._client: Client
        self._publisher: Publisher
        self._placed: dict[int, Placed] = {}
        self._away_from_ms = 0
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """All steps but the stop."""
        from millstream.cli.publisher import Publisher
        from millstream.wire.client import Client

        await self._start()
        async with Client.connect(self._broker.kafka, client_id="demo", timeout_s=_PATIENCE_S) as client:
            self._client = client
            await self._create_topic()
            self._publisher = Publisher(client, TOPIC)
            await self._publisher.start()
            await self._share()
            await self._lag()
            await self._replay()
            await self._crash()

    async def _start(self) -> None:
        self._account.step("A broker of its own")
        await self._broker.start()
        self._account.tell(f"process {self._broker.pid}, Kafka at {self._broker.kafka}, data in {self._broker.data}")
        self._account.tell(f"ready after {self._broker.start_s:.2f} s")

    async def _create_topic(self) -> None:
        from millstream.admin.topics import create_topic, find_topic

        self._account.step(f"A topic with {PARTITIONS} partitions")
        await create_topic(self._client, TOPIC, partitions=PARTITIONS, replication=-1, settings={"flush": "always"})
        found = len((await find_topic(self._client, TOPIC)).partitions)
        self._account.check(found == PARTITIONS, f"topic {TOPIC!r} is there", f"it has {found} partitions")

    async def _share(self) -> None:
        """Two members share the partitions and read what is published."""
        self._account.step("Messages with keys, read by a group of two members")
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            members = [await self._member(stack) for _ in range(2)]
            for member in members:
                tasks.create_task(member.run())
            await self._until(lambda: _is_shared([member.held for member in members]))
            held = " and ".join(str(member.held) for member in members)
            self._account.check(_is_shared([m.held for m in members]), f"they share the partitions: {held}", held)
            began = time.monotonic()
            await self._publish(range(FIRST))
            took_ms = (time.monotonic() - began) * 1000
            by_partition = Counter(placed.partition for placed in self._placed.values())
            self._account.tell(f"{FIRST:,} orders acknowledged after fsync, {took_ms:.0f} ms: {_counts(by_partition)}")
            await self._until(lambda: sum(len(member.read) for member in members) >= FIRST)
            for member in members:
                member.stop()
        self._check_read([message for member in members for message in member.read], range(FIRST))
        await self._check_lag(0)

    async def _lag(self) -> None:
        """What is published while nobody reads is lag, and is read by whoever comes back."""
        self._account.step("Nobody reads for a while")
        await asyncio.sleep(0.01)
        self._away_from_ms = int(time.time() * 1000)
        await asyncio.sleep(0.01)
        away = range(FIRST, FIRST + WHILE_AWAY)
        await self._publish(away)
        await self._check_lag(WHILE_AWAY)
        await self._catch_up(away)

    async def _catch_up(self, missed: range) -> None:
        """A member comes back and reads what the group has not read yet, and only that."""
        async with AsyncExitStack() as stack, asyncio.TaskGroup() as tasks:
            member = await self._member(stack)
            tasks.create_task(member.run())
            await self._until(lambda: len(member.read) >= len(missed))
            member.stop()
        self._check_read(member.read, missed, "a member came back: ")
        await self._check_lag(0)

    async def _replay(self) -> None:
        self._account.step("Replay: the log is still there for everyone")
        starts = await self._client.list_offsets(TOPIC, dict.fromkeys(range(PARTITIONS), -2))
        everything = await self._read({index: found.offset for index, found in starts.items()})
        self._check_read(everything, range(FIRST + WHILE_AWAY), "from the start: ")
        found = await self._client.list_offsets(TOPIC, dict.fromkeys(range(PARTITIONS), self._away_from_ms))
        ends = await self._ends()
        from_time = {index: one.offset if one.offset >= 0 else ends[index] for index, one in found.items()}
        self._check_read(await self._read(from_time), range(FIRST, FIRST + WHILE_AWAY), "by time: ")

    async def _crash(self) -> None:
        """Kill the broker while messages are on their way; what it has acknowledged must be there."""
        self._account.step("kill -9 in the middle of publishing")
        first = FIRST + WHILE_AWAY
        everything = range(first + THROUGH_CRASH)
        publishing = asyncio.create_task(self._publish(range(first, first + THROUGH_CRASH)))
        try:
            await self._until(lambda: len(self._placed) >= first + KILL_AFTER)
            await self._broker.kill()
            acknowledged = len(self._placed) - first
            self._account.tell(f"killed with {acknowledged:,} of {THROUGH_CRASH:,} orders acknowledged")
            await self._broker.start()
            self._account.tell(f"started again on the same data, ready after {self._broker.start_s:.2f} s")
            async with asyncio.timeout(_STEP_S_MAX):
                await publishing
        finally:
            publishing.cancel()
        self._account.tell(f"the publisher went on by itself: {len(self._placed) - first:,} orders acknowledged")
        found = await self._read(dict.fromkeys(range(PARTITIONS), 0))
        self._check_read(found, everything, "after the crash: ")
        self._check_places(found)
        await self._check_lag(THROUGH_CRASH)
        await self._catch_up(range(first, everything.stop))

    async def _member(self, stack: AsyncExitStack) -> DemoMember:
        from millstream.cli.demo_member import DemoMember
        from millstream.wire.client import Client

        connect = Client.connect(self._broker.kafka, client_id="demo-member", timeout_s=_PATIENCE_S)
        client = await stack.enter_async_context(connect)
        return DemoMember(client, GROUP, TOPIC, partitions=PARTITIONS, changed=self._changed)

    async def _publish(self, numbers: range) -> None:
        from millstream.records.record import NewRecord

        for start in range(numbers.start, numbers.stop, _BATCH):
            batch = range(start, min(start + _BATCH, numbers.stop))
            now_ms = int(time.time() * 1000)
            records = [NewRecord(_key(number), _order(number), timestamp_ms=now_ms) for number in batch]
            self._placed.update(zip(batch, await self._publisher.publish(records), strict=True))
            async with self._changed:
                self._changed.notify_all()

    async def _until(self, condition: Callable[[], bool]) -> None:
        """Wait for what the publisher or the members do."""
        async with asyncio.timeout(_STEP_S_MAX), self._changed:
            await self._changed.wait_for(condition)

    async def _ends(self) -> dict[int, int]:
        ends = await self._client.list_offsets(TOPIC, dict.fromkeys(range(PARTITIONS), -1))
        return {index: found.offset for index, found in ends.items()}

    async def _read(self, starts: dict[int, int]) -> list[Message]:
        from millstream.admin.tailer import Tailer

        tailer = Tailer(self._client, TOPIC, starts, patience_s=_PATIENCE_S, note=print_note)
        return [message async for message in tailer.until(await self._ends())]

    def _check_read(self, messages: Sequence[tuple[int, Any]], expected: range, what: str = "") -> None:
        """Every order once, and each customer's in the order in which they were placed."""
        numbers = [_number(record.value) for _, record in messages]
        missing = set(expected) - set(numbers)
        self._account.check(
            sorted(numbers) == list(expected),
            f"{what}{len(expected):,} orders were read, each of them once",
            f"{len(missing)} are missing and {len(numbers) - len(set(numbers))} came twice",
        )
        by_customer: dict[bytes, list[int]] = {}
        for _, record in messages:
            by_customer.setdefault(record.key, []).append(_number(record.value))
        mixed = [key.decode() for key, each in by_customer.items() if each != sorted(each)]
        self._account.check(not mixed, "the orders of each customer came in order", f"those of {mixed} did not")

    def _check_places(self, messages: Sequence[tuple[int, Any]]) -> None:
        """Every message lies where its acknowledgement said."""
        found = {_number(record.value): (partition, record.offset) for partition, record in messages}
        moved = [number for number, placed in self._placed.items() if found[number] != tuple(placed)]
        self._account.check(
            not moved, "each acknowledged order lies at the offset it was given", f"{len(moved)} do not"
        )

    async def _check_lag(self, expected: int) -> None:
        """How far the group is, as everyone can ask."""
        from millstream.admin.groups import describe_group, progress_of

        progress = await progress_of(self._client, await describe_group(self._client, GROUP))
        lag = sum(one.lag or 0 for one in progress)
        if lag:
            rows = [(one.where.partition, one.committed, one.end, one.lag) for one in progress]
            self._account.table(("partition", "committed", "end", "lag"), rows)
        self._account.check(lag == expected, f"the lag of group {GROUP!r} is {expected:,}", f"it is {lag:,}")


def _is_shared(held: list[list[int]]) -> bool:
    """Whether everyone has something, and all partitions are somebody's."""
    return all(held) and sorted(index for each in held for index in each) == list(range(PARTITIONS))


def _key(number: int) -> bytes:
    return b"customer-%d" % (number * 7 % CUSTOMERS)


def _order(number: int) -> bytes:
    return json.dumps({"order_id": number, "total": number * 37 % 5000}).encode()


def _number(value: bytes | None) -> int:
    return int(json.loads(value or b"{}").get("order_id", -1))


def _counts(by_partition: Counter[int]) -> str:
    return ", ".join(f"{count} in partition {index}" for index, count in sorted(by_partition.items()))
