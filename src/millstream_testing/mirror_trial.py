"""Two sites, one of which mirrors the other, under load and faults; a checker judges every record and every queue.

One round: load on the first site while nodes are killed and the line between them is cut; the first site dies and the
second takes over; work goes on there; the first comes back and follows (`reverse`); both change sides as planned
(`switch`). The load is transactions over two topics, which must never be torn, and single messages, which workers of a
subscription accept.

Promises, each of which `violations` reports with what broke it:

- every record acknowledged to a producer below the cut of a failover is there, at its offset;
- no transaction is torn: both topics hold the same numbers for readers of committed records;
- every message is accepted by a worker or delivered after a failover, so none is taken for one that was accepted;
- a message whose acceptance was carried over is not delivered again;
- after `reverse` and after `switch` both sides have the same records at the same offsets;
- a planned switch loses nothing.
"""

from __future__ import annotations

import itertools
import json
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer

from millstream_testing.command import CommandLine, Outcome
from millstream_testing.link_relay import LinkRelay, RelayThread, Way
from millstream_testing.server import Server

PATIENCE_S = 120.0
LEFT, RIGHT, PLAIN = "left", "right", "plain"
TOPICS = (LEFT, RIGHT, PLAIN)
SUBSCRIPTION = "workers"
MIRROR = "site"
CARRIED_S = 10.0
"""Acceptances older than this, on a line that works, have been carried over."""

Place = tuple[str, int, int]
"""Topic, partition and offset."""


class TrialBroken(Exception):
    """The trial itself could not go on."""


class Site:
    """One broker behind its own line, which delays and can be cut."""

    def __init__(self, folder: Path, name: str, thread: RelayThread, delay_s: float) -> None:
        self.name = name
        self.server = Server(folder / name)
        self.line = LinkRelay(thread, self.server.kafka, delay_s=delay_s)
        self.server.settings["advertise"] = self.line.address
        self.server.start()

    @property
    def brokers(self) -> str:
        """Where everybody reaches it: through its line."""
        return self.line.address

    def command(self, *arguments: str) -> Outcome:
        """Run a command in this process; only its main thread can."""
        return CommandLine(self.brokers)(*arguments)


def _values(pulled: Outcome) -> set[str]:
    """Return the messages that a pull has printed."""
    return {json.loads(line)["value"] for line in pulled.lines if line.startswith("{")}


class Load:
    """Producers and workers of one site, until they are stopped."""

    def __init__(self, site: Site, numbers: itertools.count[int]) -> None:
        self.site = site
        self.stored: dict[Place, str] = {}
        """The records that were acknowledged to a producer."""
        self.accepted: dict[str, float] = {}
        """The messages whose settlement was acknowledged to a worker, and when."""
        self._numbers = numbers
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._publish, self._transact, self._work)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _delivered(self, error: Any, message: Any) -> None:
        if error is None:
            with self._lock:
                self.stored[message.topic(), message.partition(), message.offset()] = message.value().decode()

    def _publish(self) -> None:
        producer = Producer(
            {
                "bootstrap.servers": self.site.brokers,
                "enable.idempotence": True,
                "message.timeout.ms": 20_000,
                "log_level": 0,
            }
        )
        while not self._stop.is_set():
            for _ in range(20):
                number = str(next(self._numbers))
                producer.produce(PLAIN, number, key=number, on_delivery=self._delivered)
            producer.poll(0.02)
            time.sleep(0.03)
        producer.flush(10)

    def _transact(self) -> None:
        while not self._stop.is_set():
            producer = Producer(
                {
                    "bootstrap.servers": self.site.brokers,
                    "transactional.id": f"{self.site.name}-pairs",
                    "message.timeout.ms": 10_000,
                    "transaction.timeout.ms": 10_000,
                    "log_level": 0,
                }
            )
            try:
                producer.init_transactions(10)
                while not self._stop.is_set():
                    producer.begin_transaction()
                    for _ in range(random.randint(1, 5)):
                        number = str(next(self._numbers))
                        producer.produce(LEFT, number, key=number)
                        producer.produce(RIGHT, number, key=number)
                    if random.random() < 0.1:
                        producer.abort_transaction(10)
                    else:
                        producer.commit_transaction(10)
            except KafkaException:
                time.sleep(0.2)

    def _work(self) -> None:
        while not self._stop.is_set():
            # In its own process: commands in this one belong to its main thread.
            pull = ("subscription", "pull", SUBSCRIPTION, "-n", "1000", "--accept", "--json", "--timeout", "5")
            done = CommandLine(self.site.brokers).process(*pull)
            if done.code == 0:
                now = time.monotonic()
                for value in _values(done):
                    self.accepted[value] = now
            time.sleep(0.1)


class MirrorTrial:
    """One round on two sites."""

    def __init__(self, folder: Path, *, seed: int, faults: int, delay_s: float, say: Callable[[str], None]) -> None:
        self._random = random.Random(seed)
        self._faults = faults
        self._say = say
        self._thread = RelayThread().__enter__()
        self._numbers = itertools.count()
        self.first = Site(folder, "first", self._thread, delay_s)
        self.second = Site(folder, "second", self._thread, delay_s)
        self.violations: list[str] = []

    def close(self) -> None:
        """Stop both sites."""
        for site in (self.first, self.second):
            site.line.heal()
            site.server.kill()
            site.line.close()
        self._thread.__exit__(None, None, None)

    def run(self) -> None:
        """Run the round; `violations` says what was broken."""
        first, second = self.first, self.second
        for topic in TOPICS:
            self._done(first, "topic", "create", topic, "--partitions", "3")
        self._done(first, "subscription", "create", SUBSCRIPTION, "--topic", PLAIN)
        self._done(second, "mirror", "create", MIRROR, "--from", first.brokers)
        load = Load(first, self._numbers)
        load.start()
        for _ in range(self._faults):
            self._fault()
        time.sleep(3)
        self._await_lag(second, 5_000)
        first.server.kill()
        killed_at = time.monotonic()
        load.stop()
        report = self._done(second, "mirror", "failover", MIRROR, "--yes", "--json").document
        self._say(f"failed over in {report['waited_ms']} ms; {len(load.stored)} stored, {len(load.accepted)} accepted")
        self._check_failover(second, load, report, killed_at)

        more = Load(second, self._numbers)
        more.start()
        time.sleep(3)
        first.server.start()
        reversed_ = self._done(second, "mirror", "reverse", MIRROR, "--yes", "--json").document
        self._say(f"reversed in {reversed_['waited_ms']} ms; {len(reversed_['removed'])} ranges dropped")
        self._fault()
        time.sleep(2)
        switched = self._switch(first)
        more.stop()
        self._say(f"switched in {switched['waited_ms']} ms")
        if switched["removed"]:
            self.violations.append(f"a planned switch dropped {switched['removed']}")
        self._await_equal(first, second)
        here = self._read(first, "read_uncommitted")
        for place, value in more.stored.items():
            if here.get(place) != value:
                self.violations.append(f"the switch lost {value} at {place}; there is {here.get(place)}")
                break
        self._check_pairs(first)
        self._check_pairs(second)

    def _switch(self, site: Site) -> dict[str, Any]:
        """Switch; a fault may have left the mirror without a connection for a moment."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            done = site.command("mirror", "switch", MIRROR, "--yes", "--json", "--timeout", "60")
            if done.code == 0:
                found: dict[str, Any] = done.document
                return found
            if time.monotonic() > deadline:
                raise TrialBroken(f"the switch fails: {done.err}")
            time.sleep(1)

    # -- faults ---------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        site = self._random.choice([self.first, self.second])
        kind = self._random.choice(["kill", "cut", "cut one way", "pause"])
        self._say(f"{kind} {site.name}")
        if kind == "kill":
            site.server.kill()
            site.server.start()
        elif kind == "cut":
            site.line.cut()
            time.sleep(self._random.uniform(0.5, 5))
            site.line.heal()
        elif kind == "cut one way":
            site.line.cut(ways=[self._random.choice(list(Way))])
            time.sleep(self._random.uniform(0.5, 5))
            site.line.heal()
        else:
            site.command("mirror", "pause", MIRROR)
            time.sleep(0.5)
            self.second.command("mirror", "resume", MIRROR)
        self.second.command("mirror", "resume", MIRROR)
        time.sleep(self._random.uniform(0.5, 2))

    # -- the checker ----------------------------------------------------------------------------------------

    def _check_failover(self, site: Site, load: Load, report: dict[str, Any], killed_at: float) -> None:
        cuts = {(one["topic"], one["partition"]): one["offset"] for one in report["partitions"]}
        everything = self._read(site, "read_uncommitted")
        for place, value in load.stored.items():
            if place[2] < cuts[place[0], place[1]] and everything.get(place) != value:
                self.violations.append(
                    f"{value} was stored at {place}, below the cut; there is {everything.get(place)}"
                )
                break
        self._check_pairs(site)
        plain = {value for place, value in everything.items() if place[0] == PLAIN}
        delivered: set[str] = set()
        idle_until = time.monotonic() + 15
        while time.monotonic() < idle_until:
            done = site.command("subscription", "pull", SUBSCRIPTION, "-n", "500", "--accept", "--wait", "1", "--json")
            if values := _values(done):
                delivered |= values
                idle_until = time.monotonic() + 15
            if delivered | load.accepted.keys() >= plain:
                break
        lost = plain - delivered - load.accepted.keys()
        if lost:
            self.violations.append(f"{len(lost)} messages were taken for accepted ones, for example {min(lost)}")
        carried = {value for value, at in load.accepted.items() if at < killed_at - CARRIED_S}
        again = delivered & carried
        if again:
            self.violations.append(f"{len(again)} accepted messages were delivered again, for example {min(again)}")
        self._say(f"{len(plain)} messages here, {len(delivered)} delivered, {len(carried)} certainly accepted")

    def _check_pairs(self, site: Site) -> None:
        found = self._read(site, "read_committed")
        left = {value for place, value in found.items() if place[0] == LEFT}
        right = {value for place, value in found.items() if place[0] == RIGHT}
        if left != right:
            self.violations.append(f"on {site.name}, transactions are torn: {sorted(left ^ right)[:5]}")

    def _await_equal(self, one: Site, other: Site) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (here := self._read(one, "read_uncommitted")) != (there := self._read(other, "read_uncommitted")):
            if time.monotonic() > deadline:
                differ = [place for place in here.keys() | there.keys() if here.get(place) != there.get(place)]
                self.violations.append(f"{len(differ)} places differ, for example {min(differ)}")
                return
            time.sleep(1)

    def _await_lag(self, site: Site, lag_max: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            described = site.command("mirror", "describe", MIRROR, "--json")
            if described.code == 0 and described.document["lag"] is not None and described.document["lag"] <= lag_max:
                return
            if time.monotonic() > deadline:
                raise TrialBroken(f"the mirror does not catch up: {described.out[:1000]} {described.err}")
            time.sleep(0.5)

    def _read(self, site: Site, isolation: str) -> dict[Place, str]:
        """Read everything that the topics hold."""
        consumer = Consumer(
            {
                "bootstrap.servers": site.server.kafka,
                "group.id": f"checker-{time.monotonic_ns()}",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "isolation.level": isolation,
            }
        )
        found: dict[Place, str] = {}
        ended: set[tuple[str, int]] = set()
        consumer.subscribe(list(TOPICS))
        deadline = time.monotonic() + PATIENCE_S
        try:
            while len(ended) < 3 * len(TOPICS):
                if time.monotonic() > deadline:
                    raise TrialBroken(f"{site.name} cannot be read to its end")
                for message in consumer.consume(1000, 0.5):
                    error = message.error()
                    where = (str(message.topic()), int(message.partition() or 0))
                    if error is None:
                        found[(*where, int(message.offset() or 0))] = (message.value() or b"").decode()
                        ended.discard(where)
                    elif error.code() == KafkaError._PARTITION_EOF:
                        ended.add(where)
        finally:
            consumer.close()
        return found

    def _done(self, site: Site, *arguments: str) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            done = site.command(*arguments)
            if done.code == 0:
                return done
            if time.monotonic() > deadline:
                raise TrialBroken(f"{' '.join(arguments)} fails on {site.name}: {done.err}")
            time.sleep(1)
