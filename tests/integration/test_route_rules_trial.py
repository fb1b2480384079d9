"""Rules that are added, replaced and deleted while a route runs, under load and kills.

Every set of rules has a stamp: a rule that sends all messages to its own topic. So each message shows by which set
it was routed, and has to be in the targets of that set, in no other, and once.
"""

from __future__ import annotations

import asyncio
import json
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import pytest
from confluent_kafka.admin import AdminClient

from millstream.client.admin.pipelines import PipelineClient
from millstream.core.errors import MillstreamError
from millstream.core.pipeline import PipelineKind, Rule
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.wire.client import Client
from millstream_testing.committed_messages import Committed, committed_records
from millstream_testing.moved_messages import Place, Source
from millstream_testing.server import Server

pytestmark = [pytest.mark.trial, pytest.mark.timeout(7200)]

NAME = "director"
PARTITIONS = 3
LANES = 7
PHASES = 10
PORTION = 40
CHECK_INTERVAL_S = 0.2
WAIT_S = 1800.0
KILLS = ("driver", "java", "server")
DRIVER = "millstream.pipelines.runtime.driver"
Document = dict[str, Any]
T = TypeVar("T")

CONDITIONS: dict[str, Callable[[Document], bool]] = {
    "payload.region = 'eu'": lambda document: document["region"] == "eu",
    "payload.region IN ('us', 'asia') AND payload.lane > 2": lambda document: (
        document["region"] != "eu" and document["lane"] > 2
    ),
    "payload.id % 3 = 1": lambda document: document["id"] % 3 == 1,
    "headers['id'] LIKE '%7'": lambda document: document["id"] % 10 == 7,
    "": lambda _document: True,
}


def document_of(number: int) -> Document:
    return {"id": number, "region": ("eu", "us", "asia")[number % 3], "lane": number % LANES}


def key_of(number: int) -> bytes | None:
    return None if number % 31 == 0 else b"key-%d" % (number % 53)


class Load(threading.Thread):
    """Publishes as much as it is given, so that nothing piles up on a slow machine."""

    def __init__(self, source: Source) -> None:
        super().__init__(name="load")
        self._source = source
        self._given = threading.Semaphore(0)
        self._is_over = False
        self.number = 0
        self.failure: Exception | None = None

    def run(self) -> None:
        try:
            while self._given.acquire() and not self._is_over:
                first, self.number = self.number, self.number + PORTION
                self._source.publish(map(document_of, range(first, self.number)), key_of)
        except Exception as error:
            self.failure = error

    def give(self, portions: int = 1) -> None:
        self._given.release(portions)

    def end(self) -> None:
        self._is_over = True
        self._given.release()
        self.join()


@dataclass(frozen=True)
class Seen:
    """What was committed, by some set of rules or filter, before messages from a number on were published."""

    version: int
    number: int


class Director:
    """A route, all versions of its rules, and the observed output."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.source = Source(server.kafka, "orders", PARTITIONS)
        self.load = Load(self.source)
        self.versions: list[dict[str, Rule]] = []
        self.seen: list[Seen] = []
        self.filters_seen: list[Seen] = []
        self.lane = 0
        self.more: dict[str, Rule] = {}
        """Rules that all sets have from now on."""
        self._random = random.Random(23)

    # -- actions --------------------------------------------------------------------------------------------------

    def create(self) -> None:
        self.versions.append(self._new_rules())

        async def declare(client: Client) -> None:
            await SubscriptionClient(client).create("theirs", [self.source.topic], self._filter())
            rules = self.versions[-1].values()
            await PipelineClient(client).create(NAME, PipelineKind.ROUTE, {}, rules=rules)

        self._ask(declare)

    def change(self) -> None:
        """Replace some rules, add and delete others, in one step."""
        before, after = self.versions[-1], self._new_rules()
        self.versions.append(after)
        put = [rule for name, rule in after.items() if before.get(name) != rule]
        gone = [name for name in before if name not in after]
        self._ask(lambda client: PipelineClient(client).change_rules(NAME, put, deleted=gone))

    def change_filter(self) -> None:
        """Change the filter of the subscription, and wait until it is used."""
        self.lane += 1
        self._ask(lambda client: SubscriptionClient(client).alter("theirs", self._filter()))
        until(lambda: self._has_seen("theirs", lambda found: found["lane"] == self.lane), self)
        self.filters_seen.append(Seen(self.lane, self.load.number))

    def settle(self) -> None:
        """Wait until the newest rules are used."""
        newest = len(self.versions) - 1
        until(lambda: self._has_seen(stamp(newest), lambda _: True), self)
        self.seen.append(Seen(newest, self.load.number))

    def kill(self, what: str) -> None:
        """Kill -9 the driver, its Java, or the broker with both."""
        if what == "server":
            self.server.restart(clean=False)
            return
        with suppress(psutil.NoSuchProcess):
            for victim in self._processes("java" if what == "java" else DRIVER):
                victim.kill()

    def delete_topic(self, topic: str) -> None:
        admin = AdminClient({"bootstrap.servers": self.server.kafka, "log_level": 0})
        admin.delete_topics([topic])[topic].result(WAIT_S)

    def report(self) -> Any:
        return self._ask(lambda client: PipelineClient(client).describe([NAME]))

    def finish(self) -> None:
        """Wait until the last published messages are routed as well."""
        self.wait_for("all", self.load.number)

    def wait_for(self, target: str, messages: int) -> list[int]:
        """Wait until so many messages are in a topic; return the numbers of all of them."""
        deadline = time.monotonic() + WAIT_S
        while len(found_records := self.records(target)) < messages:
            assert time.monotonic() < deadline, self.report()
            time.sleep(CHECK_INTERVAL_S)
        return sorted(json.loads(record.value or b"")["id"] for record in found_records)

    def records(self, target: str) -> list[Committed]:
        return committed_records(self.server.kafka, target)

    def _new_rules(self) -> dict[str, Rule]:
        """Some random rules, and those that every set has."""
        topic, version = self.source.topic, len(self.versions)
        chosen = {
            f"chosen-{number}": (
                self._random.choice(list(CONDITIONS)),
                tuple(self._random.sample(("north", "south", "west"), self._random.randint(1, 3))),
            )
            for number in self._random.sample(range(5), self._random.randint(1, 5))
        }
        always = {"stamp": ("", (stamp(version),)), "all": ("", ("all", "doomed"))}
        rules = {
            name: Rule(name=name, topic=topic, targets=targets, condition=condition)
            for name, (condition, targets) in (chosen | always).items()
        }
        theirs = Rule(name="theirs", topic=topic, targets=("theirs",), subscription="theirs")
        return {**rules, "theirs": theirs, **self.more}

    def _filter(self) -> dict[str, str]:
        return {"millstream.filter": f"payload.lane = {self.lane}"}

    def _has_seen(self, target: str, what: Callable[[Document], bool]) -> bool:
        return any(what(json.loads(record.value or b"")) for record in self.records(target))

    def _processes(self, part: str) -> list[psutil.Process]:
        children = psutil.Process(self.server.pid).children(recursive=True)
        return [process for process in children if part in " ".join(process.cmdline()[:3])]

    def _ask(self, what: Callable[[Client], Awaitable[T]]) -> T:
        async def ask() -> T:
            async with Client.connect(self.server.kafka) as client:
                return await what(client)

        return asyncio.run(ask())

    # -- checks ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        assert self.load.failure is None
        assert self.source.read() == []
        stamps = self._stamps()
        assert self._faults_of_versions(stamps) == []
        expected: dict[str, set[Place]] = {target: set() for target in ("all", "north", "south", "west")}
        for place, version in stamps.items():
            for target in self._targets(version, self.source.document(place)):
                expected[target].add(place)
        for target, places in expected.items():
            assert self.source.faults(self.records(target), places) == [], target
        self._check_filters()
        self._check_doomed()

    def _stamps(self) -> dict[Place, int]:
        """The set of rules by which every message was routed."""
        versions: dict[Place, int] = {}
        for version in range(len(self.versions)):
            records = self.records(stamp(version))
            mine = {self.source.place_of(record) for record in records}
            assert self.source.faults(records, mine) == []
            assert not mine & versions.keys()
            versions |= dict.fromkeys(mine, version)
        assert versions.keys() == self.source.messages.keys()
        return versions

    def _targets(self, version: int, document: Document) -> set[str]:
        rules = [rule for name, rule in self.versions[version].items() if name not in ("theirs", *self.more)]
        holding = [rule for rule in rules if CONDITIONS[rule.condition](document)]
        return {target for rule in holding for target in rule.targets} - {"doomed", stamp(version)}

    def _faults_of_versions(self, stamps: dict[Place, int]) -> list[str]:
        """Messages routed by older rules than an earlier message, or than those in use when they arrived."""
        reported = []
        for partition in range(PARTITIONS):
            before = 0
            for place in sorted(place for place in stamps if place.partition == partition):
                number = self.source.document(place)["id"]
                in_use = [revision.version for revision in self.seen if number >= revision.number]
                if stamps[place] < max([before, *in_use]):
                    reported.append(f"{place} was routed by rules {stamps[place]}, and newer ones were in use")
                before = stamps[place]
        return reported

    def _check_filters(self) -> None:
        """Check that the messages of the subscription match its filters, one after another."""
        records = self.records("theirs")
        places = {self.source.place_of(record) for record in records}
        assert self.source.faults(records, places) == []
        for partition in range(PARTITIONS):
            lane = 0
            for place in sorted(place for place in self.source.messages if place.partition == partition):
                document = self.source.document(place)
                in_use = [revision.version for revision in self.filters_seen if document["id"] >= revision.number]
                lane = max([lane, *in_use])
                while lane <= self.lane and (document["lane"] == lane) != (place in places):
                    lane += 1
                assert lane <= self.lane, f"{place} is in line with no filter"

    def _check_doomed(self) -> None:
        """Check that a topic deleted meanwhile has everything from some offset on."""
        records = self.records("doomed")
        places = {self.source.place_of(record) for record in records}
        assert self.source.faults(records, places) == []
        for partition in range(PARTITIONS):
            mine = sorted(place for place in self.source.messages if place.partition == partition)
            missing = [place for place in mine if place in places]
            assert missing
            assert missing == mine[-len(missing) :]


def stamp(version: int) -> str:
    return f"stamp-{version}"


def until(condition: Callable[[], bool], director: Director) -> None:
    """Wait for a condition while messages keep arriving."""
    deadline = time.monotonic() + WAIT_S
    while True:
        director.load.give()
        with suppress(MillstreamError):
            if condition():
                return
        if time.monotonic() > deadline:
            pytest.fail(f"not so within {WAIT_S:g} s: {director.report()}")
        time.sleep(CHECK_INTERVAL_S)


@pytest.fixture
def director(tmp_path: Path) -> Iterator[Director]:
    settings = {"group-initial-delay-ms": 100, "pipelines-master": "local[2]", "retention-check-ms": 3_600_000}
    with Server(tmp_path / "data", settings=settings) as server:
        made = Director(server)
        made.load.start()
        try:
            yield made
        finally:
            made.load.end()


def test_every_message_is_routed_by_exactly_one_set_of_rules(director: Director) -> None:
    rng = random.Random(5)
    director.create()
    director.settle()
    for phase in range(PHASES):
        what = KILLS[phase // 2 % len(KILLS)] if phase % 2 else ""
        director.load.give(rng.randint(1, 20))
        changes = rng.randint(1, 3)
        for number in range(changes):
            director.change()
            if what and number == changes // 2:
                director.kill(what)
        if phase in (PHASES // 2 - 1, PHASES // 2):
            # With a running job, and without one.
            director.delete_topic("doomed")
        if phase % 3 == 1:
            director.change_filter()
        director.settle()
    until(lambda: bool(director.records("doomed")), director)
    director.load.end()
    director.finish()
    director.check()


def test_rules_of_missing_or_deleted_topics_block_no_others(director: Director) -> None:
    director.create()
    director.settle()
    director.more["later"] = Rule(name="later", topic="later", targets=("late",))
    director.change()
    # It continues without that topic, and includes it once it exists.
    director.settle()
    publish_later(director, range(500))
    assert director.wait_for("late", 500) == list(range(500))
    director.delete_topic("later")
    director.change()
    director.settle()
    # A recreated topic starts with its first message.
    publish_later(director, range(500, 1000))
    assert director.wait_for("late", 1000) == list(range(1000))
    director.load.end()
    director.finish()
    director.check()


def publish_later(director: Director, numbers: Iterable[int]) -> None:
    Source(director.server.kafka, "later", 2).publish(map(document_of, numbers), key_of)
