"""A trial of two sites, one of which mirrors the other: load, faults, and a checker for every record and queue.

One round: producers and workers use the first site while nodes are killed or frozen and the line between the sites is
cut. The first site is killed, and the second takes over. Producers and workers continue there. The first site starts
again and follows (`reverse`). Then both change sides as planned (`switch`). The load consists of transactions over two
topics, single messages that workers of a subscription accept, an application that copies these messages in
transactions, which also commit its offsets, and updates of a compacted topic.

A site is one node or a cluster. The sites reach each other through relays that delay data, stall occasionally as TCP
does after a loss, and can be cut.

`violations` lists every broken rule, with an example. The rules:

- below the cut of a failover, the second site has every record of the first at its offset, among them all that were
  acknowledged to a producer;
- of each key of a compacted topic, the second site has the newest update below the cut;
- no transaction is torn: both topics hold the same numbers for readers of committed records;
- every message is accepted by a worker or delivered after a failover, so none is wrongly considered accepted;
- a message whose acceptance was carried over is not delivered again;
- offsets of groups are never ahead of the records that were written together with them;
- `reverse` names every record that only the first site has, and saves it;
- after `reverse` and after `switch` both sides have the same records at the same offsets;
- a planned switch loses nothing.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from millstream.cli.local_process import ReservedPort
from millstream_testing.command import CommandLine, Outcome
from millstream_testing.etcd_server import EtcdServer
from millstream_testing.link_relay import Direction, LinkRelay, RelayThread
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.server import Server

PATIENCE_S = 120.0
STOP_S = 60.0
LEFT, RIGHT, PLAIN, COPIED, SAVED = "left", "right", "plain", "copied", "saved"
TOPICS = (LEFT, RIGHT, PLAIN, COPIED)
PARTITIONS = 3
COMPACTED, KEYS = "compacted", 50
COMPACTION = {"cleanup.policy": "compact", "segment.ms": 3000, "max.compaction.lag.ms": 5000}
SUBSCRIPTION, GROUP = "workers", "copiers"
MIRROR = "site"
CARRIED_S = 10.0
"""An acceptance that is older than this when the first site is killed must have reached the second site."""

LEASE_MS = 5000

Place = tuple[str, int, int]
"""Topic, partition and offset."""


Cuts = Mapping[tuple[str, int], int]
"""The offset at which each copy was cut, by topic and partition."""


class TrialBroken(Exception):
    """The trial could not be continued and proves nothing."""


@dataclass(frozen=True, slots=True)
class Line:
    """The number of nodes of each site, and the properties of the line between the sites."""

    nodes: int = 1
    delay_s: float = 0.025
    """The delay in each direction."""
    stalls: float = 0.0
    """The share of data that waits for a retransmission, as after a loss."""


class Site:
    """One node or a cluster, behind a line of its own for the other site."""

    def __init__(self, folder: Path, name: str, thread: RelayThread, line: Line, shared: Mapping[str, object]) -> None:
        self.name = name
        self.lines: list[LinkRelay] = []
        self.nodes: list[Server] = []
        self._held: list[ReservedPort] = []
        self.is_cluster = bool(shared)
        for number in range(1, line.nodes + 1):
            home = folder / name / str(number)
            home.mkdir(parents=True)
            outside = ReservedPort()
            relay = LinkRelay(thread, outside.address, delay_s=line.delay_s, stalls=line.stalls)
            config = home / "millstream.toml"
            config.write_text(
                f'[[listeners]]\nname = "outside"\naddress = "{outside.address}"\nadvertise = "{relay.address}"\n'
            )
            settings: dict[str, object] = {"config": config}
            if shared:
                settings |= {"node-id": number, "cluster": f"{name}-{folder.name}", **shared}
            self.nodes.append(Server(home / "data", settings=settings))
            self.lines.append(relay)
            self._held.append(outside)
        self.start()

    @property
    def brokers(self) -> str:
        """Where its own clients reach it."""
        return ",".join(node.kafka for node in self.nodes)

    @property
    def outside(self) -> str:
        """Where the other site reaches it: through its line."""
        return ",".join(line.address for line in self.lines)

    def start(self) -> None:
        """Start every node that does not run."""
        down = [node for node in self.nodes if not node.is_running()]
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(Server.start, down))

    def kill(self) -> None:
        """Kill every node."""
        for node in self.nodes:
            node.kill()

    def cut(self, directions: Iterable[Direction] = Direction) -> None:
        """Cut the line."""
        for line in self.lines:
            line.cut(directions=directions)

    def heal(self) -> None:
        """Let everything pass again."""
        for line in self.lines:
            line.heal()

    def close(self) -> None:
        """End everything."""
        self.heal()
        self.kill()
        for line in self.lines:
            line.close()

    def command(self, *arguments: str) -> Outcome:
        """Run a command in this process; only its main thread can."""
        return CommandLine(self.brokers)(*arguments)


def _values(pulled: Outcome) -> set[str]:
    """Return the messages that a pull has printed."""
    return {json.loads(line)["value"] for line in pulled.lines if line.startswith("{")}


def _newest(found: Mapping[Place, str]) -> dict[str, tuple[int, str]]:
    """Return the last update of each key, with its offset; an update is `key:number`."""
    return {value.partition(":")[0]: (place[2], value) for place, value in sorted(found.items())}


class Load:
    """Producers and workers of one site, until they are stopped."""

    def __init__(self, site: Site, numbers: itertools.count[int]) -> None:
        self.site = site
        self.stored: dict[Place, str] = {}
        """The records that were acknowledged to a producer."""
        self.accepted: dict[str, float] = {}
        """The messages whose settlement was acknowledged to a worker, and when."""
        self.unsettled: set[str] = set()
        """Messages that a worker printed before it failed; whether it accepted them is unknown."""
        self._numbers = numbers
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(target=work, daemon=True)
            for work in (self._publish, self._transact, self._work, self._copy)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(STOP_S)

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
            key = f"k{int(number) // 20 % KEYS}"
            producer.produce(COMPACTED, f"{key}:{number}", key=key, on_delivery=self._delivered)
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

    def _copy(self) -> None:
        """Copy messages to another topic, in transactions that commit the offsets of what they have read."""
        while not self._stop.is_set():
            consumer = Consumer(
                {
                    "bootstrap.servers": self.site.brokers,
                    "group.id": GROUP,
                    "auto.offset.reset": "earliest",
                    "enable.auto.commit": False,
                    "isolation.level": "read_committed",
                    "log_level": 0,
                }
            )
            producer = Producer(
                {
                    "bootstrap.servers": self.site.brokers,
                    "transactional.id": f"{self.site.name}-copies",
                    "message.timeout.ms": 10_000,
                    "transaction.timeout.ms": 10_000,
                    "log_level": 0,
                }
            )
            try:
                producer.init_transactions(10)
                # Not as a member: one that leaves waits for its coordinator, which may be dead.
                consumer.assign([TopicPartition(PLAIN, index) for index in range(PARTITIONS)])
                while not self._stop.is_set():
                    messages = [one for one in consumer.consume(200, 0.3) if one.error() is None]
                    if not messages:
                        continue
                    producer.begin_transaction()
                    ends: dict[int, int] = {}
                    for message in messages:
                        producer.produce(COPIED, message.value(), key=message.key())
                        ends[int(message.partition() or 0)] = int(message.offset() or 0) + 1
                    offsets = [TopicPartition(PLAIN, partition, end) for partition, end in ends.items()]
                    producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata(), 10)
                    producer.commit_transaction(10)
            except KafkaException:
                time.sleep(0.2)
            finally:
                consumer.close()

    def _work(self) -> None:
        while not self._stop.is_set():
            # In its own process: commands in this one belong to its main thread.
            pull = ("subscription", "pull", SUBSCRIPTION, "-n", "1000", "--accept", "--json", "--timeout", "5")
            done = CommandLine(self.site.brokers).process(*pull)
            if done.code == 0:
                now = time.monotonic()
                for value in _values(done):
                    self.accepted[value] = now
            else:
                # A worker that got no response may have accepted what it has printed.
                self.unsettled |= _values(done)
            time.sleep(0.1)


class MirrorTrial:
    """One round on two sites."""

    def __init__(self, folder: Path, *, seed: int, faults: int, line: Line, say: Callable[[str], None]) -> None:
        self._random = random.Random(seed)
        self._faults = faults
        self._say = say
        self._numbers = itertools.count()
        self.violations: list[str] = []
        self.faults = Counter[str]()
        """How often there was each kind of fault."""
        self._stack = ExitStack()
        try:
            thread = self._stack.enter_context(RelayThread())
            shared: list[dict[str, object]] = [{}, {}]
            if line.nodes > 1:
                etcd = self._stack.enter_context(EtcdServer())
                postgres = self._stack.enter_context(PostgresServer())
                shared = [{"etcd": etcd.url, "catalog": postgres.new_database()} for _ in shared]
            self.first = Site(folder, "first", thread, line, shared[0])
            self._stack.callback(self.first.close)
            self.second = Site(folder, "second", thread, line, shared[1])
            self._stack.callback(self.second.close)
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """Stop both sites."""
        self._stack.close()

    def run(self) -> None:
        """Run the round; `violations` says what was broken."""
        first, second = self.first, self.second
        for topic in TOPICS:
            self._done(first, "topic", "create", topic, "--partitions", str(PARTITIONS))
        compaction = [part for name, value in COMPACTION.items() for part in ("--set", f"{name}={value}")]
        self._done(first, "topic", "create", COMPACTED, "--partitions", str(PARTITIONS), *compaction)
        # Leases of workers that died with the first site end before the checker stops waiting for their messages.
        lease = ("--set", f"share.record.lock.duration.ms={LEASE_MS}")
        self._done(first, "subscription", "create", SUBSCRIPTION, "--topic", PLAIN, *lease)
        self._done(second, "mirror", "create", MIRROR, "--from", first.outside, "--exclude", SAVED)
        load = Load(first, self._numbers)
        load.start()
        for _ in range(self._faults):
            self._fault()
        time.sleep(3)
        self._await_lag(second, 5_000)
        first.kill()
        self.faults["kill a site"] += 1
        killed_at = time.monotonic()
        load.stop()
        cuts = self._fail_over(second)
        self._say(f"{len(load.stored)} stored, {len(load.accepted)} accepted")
        self._check_failover(second, load, cuts, killed_at)
        upper = self._read(second, "read_uncommitted")

        more = Load(second, self._numbers)
        more.start()
        time.sleep(3)
        first.start()
        only_here = self._check_common(first, upper, cuts)
        reverse = ("mirror", "reverse", MIRROR, "--address", second.outside, "--save-to", SAVED, "--yes", "--json")
        reversed_ = self._retried(second, *reverse)
        self._check_removed(first, only_here, reversed_["removed"])
        self._say(f"reversed in {reversed_['waited_ms']} ms; {len(reversed_['removed'])} ranges dropped")
        self._fault()
        time.sleep(2)
        switch = ("mirror", "switch", MIRROR, "--address", first.outside, "--yes", "--json", "--timeout", "60")
        switched = self._retried(first, *switch)
        more.stop()
        self._say(f"switched in {switched['waited_ms']} ms")
        if switched["removed"]:
            self.violations.append(f"a planned switch dropped {switched['removed']}")
        self._await_equal(first, second)
        here = self._read(first, "read_uncommitted")
        for place, value in more.stored.items():
            if place[0] in TOPICS and here.get(place) != value:
                self.violations.append(f"the switch lost {value} at {place}; there is {here.get(place)}")
                break
        self._check_pairs(first)
        self._check_pairs(second)

    def _fail_over(self, site: Site) -> Cuts:
        """Let a site take over; a node of a cluster may be killed meanwhile, so that the command has to be repeated."""
        node = self._random.choice(site.nodes) if site.is_cluster and self._random.random() < 0.5 else None
        killing = threading.Timer(self._random.uniform(0, 1), Server.kill, [node])
        if node is not None:
            self._say("kill a node of the second site during the failover")
            self.faults["kill during failover"] += 1
            killing.start()
        report = self._done(site, "mirror", "failover", MIRROR, "--yes", "--json").document
        self._say(f"failed over in {report['waited_ms']} ms")
        if node is not None:
            killing.join()
            node.start()
        described = self._done(site, "mirror", "describe", MIRROR, "--json").document
        return {(topic, int(index)): cut for topic, cuts in described["cuts"].items() for index, cut in cuts.items()}

    def _retried(self, site: Site, *arguments: str) -> dict[str, Any]:
        """Run a command; a fault may have left the mirror without a connection for a moment."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            done = site.command(*arguments)
            if done.code == 0:
                found: dict[str, Any] = done.document
                return found
            if time.monotonic() > deadline:
                raise TrialBroken(f"`{' '.join(arguments)}` fails: {done.err}")
            self._say(f"retrying: {done.err.strip()[:200]}")
            time.sleep(1)

    # -- faults ---------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        site = self._random.choice([self.first, self.second])
        kind = self._random.choice(["kill", "freeze", "cut", "cut one way", "pause"])
        node = self._random.choice(site.nodes)
        self._say(f"{kind} {site.name}")
        self.faults[kind] += 1
        if kind == "kill":
            node.kill()
            if site.is_cluster:
                time.sleep(self._random.uniform(0, 8))
            node.start()
        elif kind == "freeze":
            os.kill(node.pid, signal.SIGSTOP)
            time.sleep(self._random.uniform(0.5, 8))
            os.kill(node.pid, signal.SIGCONT)
        elif kind == "cut":
            site.cut()
            time.sleep(self._random.uniform(0.5, 10))
            site.heal()
        elif kind == "cut one way":
            site.cut([self._random.choice(list(Direction))])
            time.sleep(self._random.uniform(0.5, 10))
            site.heal()
        else:
            site.command("mirror", "pause", MIRROR)
            time.sleep(0.5)
        # Only the side that follows has the mirror: the first after `reverse`.
        for follower in (self.first, self.second):
            follower.command("mirror", "resume", MIRROR)
        time.sleep(self._random.uniform(0.5, 2))

    # -- the checker ----------------------------------------------------------------------------------------

    def _check_failover(self, site: Site, load: Load, cuts: Cuts, killed_at: float) -> None:
        everything = self._read(site, "read_uncommitted")
        self._check_compacted(site, load, cuts)
        for place, value in load.stored.items():
            if place[0] in TOPICS and place[2] < cuts[place[0], place[1]] and everything.get(place) != value:
                self.violations.append(
                    f"{value} was stored at {place}, below the cut; there is {everything.get(place)}"
                )
                break
        self._check_pairs(site)
        self._check_group(site)
        plain = {value for place, value in everything.items() if place[0] == PLAIN}
        delivered: set[str] = set()
        idle_until = time.monotonic() + 3 * LEASE_MS / 1000
        while time.monotonic() < idle_until:
            done = site.command("subscription", "pull", SUBSCRIPTION, "-n", "500", "--accept", "--wait", "1", "--json")
            if values := _values(done):
                delivered |= values
                idle_until = time.monotonic() + 3 * LEASE_MS / 1000
            if delivered | load.accepted.keys() >= plain:
                break
        lost = plain - delivered - load.accepted.keys() - load.unsettled
        if lost:
            self.violations.append(f"{len(lost)} messages were taken for accepted ones, for example {min(lost)}")
        carried = {value for value, at in load.accepted.items() if at < killed_at - CARRIED_S}
        again = delivered & carried
        if again:
            self.violations.append(f"{len(again)} accepted messages were delivered again, for example {min(again)}")
        self._say(f"{len(plain)} messages here, {len(delivered)} delivered, {len(carried)} certainly accepted")

    def _check_common(self, first: Site, upper: dict[Place, str], cuts: Cuts) -> dict[Place, str]:
        """Compare what both sites have below the cuts; return what only the first has."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            lower = self._read(first, "read_uncommitted")
            ends = {place[:2]: place[2] for place in sorted(lower)}
            # Leaders that have just started do not know yet up to where their records are acknowledged.
            late = [place for place in upper if ends.get(place[:2], -1) < place[2] < cuts[place[0], place[1]]]
            if not late or time.monotonic() > deadline:
                break
            time.sleep(1)
        for place in lower.keys() | upper.keys():
            if place[2] < cuts[place[0], place[1]] and lower.get(place) != upper.get(place):
                self.violations.append(
                    f"below the cut, {place} is {lower.get(place)} on the first site and {upper.get(place)} there"
                )
                break
        return {place: value for place, value in lower.items() if place[2] >= cuts[place[0], place[1]]}

    def _check_removed(self, first: Site, only_here: dict[Place, str], removed: list[dict[str, Any]]) -> None:
        """Check that every record that only the first site had was named and saved."""
        ranges = [(one["topic"], one["partition"], one["start"], one["end"]) for one in removed]
        unnamed = [
            place
            for place in only_here
            if not any(place[:2] == (topic, index) and start <= place[2] < end for topic, index, start, end in ranges)
        ]
        if unnamed:
            self.violations.append(f"{len(unnamed)} dropped records were not named, for example {min(unnamed)}")
        if ranges:
            saved = set(self._read(first, "read_uncommitted", {SAVED: 1}).values())
            unsaved = {value for place, value in only_here.items() if place[0] == PLAIN} - saved
            if unsaved:
                self.violations.append(f"{len(unsaved)} dropped records were not saved, for example {min(unsaved)}")

    def _check_group(self, site: Site) -> None:
        """Check that what a group has read, according to its offsets, was written by the same transactions."""
        described = site.command("group", "describe", GROUP, "--json")
        if described.code != 0:
            return
        committed = {one["partition"]: one["committed"] for one in described.document["offsets"]}
        found = self._read(site, "read_committed")
        read = {value for place, value in found.items() if place[0] == PLAIN and place[2] < committed.get(place[1], 0)}
        written = {value for place, value in found.items() if place[0] == COPIED}
        if missing := read - written:
            self.violations.append(f"offsets are ahead of {len(missing)} records, for example {min(missing)}")
        self._say(f"the group has read {len(read)} messages, and written {len(written)}")

    def _check_compacted(self, site: Site, load: Load, cuts: Cuts) -> None:
        """Check that no key of the compacted topic has only an older update than the newest one below the cut."""
        below = {
            place: value
            for place, value in load.stored.items()
            if place[0] == COMPACTED and place[2] < cuts[place[0], place[1]]
        }
        found = self._read(site, "read_uncommitted", {COMPACTED: PARTITIONS})
        here = _newest(found)
        for key, (offset, value) in _newest(below).items():
            if here.get(key, (-1, ""))[0] < offset or (here[key][0] == offset and here[key][1] != value):
                self.violations.append(f"{value} was stored at {COMPACTED} {offset}; there is {here.get(key)}")
                break
        self._say(f"{len(below)} updates of {len(here)} keys, {len(found)} left after compaction")

    def _check_pairs(self, site: Site) -> None:
        found = self._read(site, "read_committed")
        left = {value for place, value in found.items() if place[0] == LEFT}
        right = {value for place, value in found.items() if place[0] == RIGHT}
        if left != right:
            self.violations.append(f"on {site.name}, transactions are torn: {sorted(left ^ right)[:5]}")

    def _await_equal(self, one: Site, other: Site) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (here := self._contents(one)) != (there := self._contents(other)):
            if time.monotonic() > deadline:
                differ = [place for place in here.keys() | there.keys() if here.get(place) != there.get(place)]
                self.violations.append(f"{len(differ)} places differ, for example {min(differ)}")
                return
            time.sleep(1)

    def _contents(self, site: Site) -> dict[Place, str]:
        """Read every record; of the compacted topic only the newest of each key: each site compacts on its own."""
        updates = self._read(site, "read_uncommitted", {COMPACTED: PARTITIONS})
        newest = set(_newest(updates).values())
        kept = {place: value for place, value in updates.items() if (place[2], value) in newest}
        return {**self._read(site, "read_uncommitted"), **kept}

    def _await_lag(self, site: Site, lag_max: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            described = site.command("mirror", "describe", MIRROR, "--json")
            found = described.document if described.code == 0 else {}
            if found.get("lag") is not None and not found["lag_unknown"] and found["lag"] <= lag_max:
                return
            if time.monotonic() > deadline:
                raise TrialBroken(f"the mirror does not catch up: {described.out[:1000]} {described.err}")
            time.sleep(0.5)

    def _read(self, site: Site, isolation: str, topics: Mapping[str, int] | None = None) -> dict[Place, str]:
        """Read everything that topics hold, by default those of the load."""
        partitions = topics or dict.fromkeys(TOPICS, PARTITIONS)
        consumer = Consumer(
            {
                "bootstrap.servers": site.brokers,
                "group.id": f"checker-{time.monotonic_ns()}",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "isolation.level": isolation,
            }
        )
        found: dict[Place, str] = {}
        ended: set[tuple[str, int]] = set()
        consumer.assign([TopicPartition(topic, index, 0) for topic in partitions for index in range(partitions[topic])])
        deadline = time.monotonic() + PATIENCE_S
        try:
            while len(ended) < sum(partitions.values()):
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
