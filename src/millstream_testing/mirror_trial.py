"""A trial of two sites, one of which mirrors the other: load, faults, and a checker for every record and queue.

One round: producers and workers use the first site while nodes are killed or frozen and the link between the sites is
cut. The first site is killed, and the second takes over. Producers and workers continue there. The first site starts
again and follows (`reverse`). Then a planned `switch` exchanges the roles. The load consists of transactions over two
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
LEFT, RIGHT, PLAIN, COPIED, DISCARDED = "left", "right", "plain", "copied", "saved"
TOPICS = (LEFT, RIGHT, PLAIN, COPIED)
PARTITIONS = 3
COMPACTED, KEYS = "compacted", 50
COMPACTION = {"cleanup.policy": "compact", "segment.ms": 3000, "max.compaction.lag.ms": 5000}
SUBSCRIPTION, GROUP = "workers", "copiers"
MIRROR = "site"
CARRIED_OVER_S = 10.0
"""An acceptance that is older than this when the first site is killed must have reached the second site."""

LEASE_MS = 5000

Position = tuple[str, int, int]
"""Topic, partition and offset."""


Cuts = Mapping[tuple[str, int], int]
"""The offset at which each copy was cut, by topic and partition."""


class TrialInconclusive(Exception):
    """The trial could not continue, so its result is inconclusive."""


@dataclass(frozen=True, slots=True)
class Link:
    """The number of nodes of each site, and the properties of the link between the sites."""

    nodes: int = 1
    delay_s: float = 0.025
    """The delay in each direction."""
    stalls: float = 0.0
    """The share of data that waits for a retransmission, as after a loss."""


class Site:
    """A node or a cluster, with its own link for the other site."""

    def __init__(self, folder: Path, name: str, thread: RelayThread, link: Link, shared: Mapping[str, object]) -> None:
        self.name = name
        self.links: list[LinkRelay] = []
        self.nodes: list[Server] = []
        self._held: list[ReservedPort] = []
        self.is_cluster = bool(shared)
        for number in range(1, link.nodes + 1):
            home = folder / name / str(number)
            home.mkdir(parents=True)
            outside = ReservedPort()
            relay = LinkRelay(thread, outside.address, delay_s=link.delay_s, stalls=link.stalls)
            config = home / "millstream.toml"
            config.write_text(
                f'[[listeners]]\nname = "outside"\naddress = "{outside.address}"\nadvertise = "{relay.address}"\n'
            )
            settings: dict[str, object] = {"config": config}
            if shared:
                settings |= {"node-id": number, "cluster": f"{name}-{folder.name}", **shared}
            self.nodes.append(Server(home / "data", settings=settings))
            self.links.append(relay)
            self._held.append(outside)
        self.start()

    @property
    def brokers(self) -> str:
        """The addresses for its own clients."""
        return ",".join(node.kafka for node in self.nodes)

    @property
    def outside(self) -> str:
        """The addresses for the other site, through the link."""
        return ",".join(link.address for link in self.links)

    def start(self) -> None:
        """Start every node that does not run."""
        down = [node for node in self.nodes if not node.is_running()]
        with ThreadPoolExecutor(len(self.nodes)) as pool:
            list(pool.map(Server.start, down))

    def kill(self) -> None:
        for node in self.nodes:
            node.kill()

    def cut(self, directions: Iterable[Direction] = Direction) -> None:
        for link in self.links:
            link.cut(directions=directions)

    def heal(self) -> None:
        for link in self.links:
            link.heal()

    def close(self) -> None:
        """End everything."""
        self.heal()
        self.kill()
        for link in self.links:
            link.close()

    def command(self, *arguments: str) -> Outcome:
        """Run a command in this process, which only its main thread can do."""
        return CommandLine(self.brokers)(*arguments)


def _values(pulled: Outcome) -> set[str]:
    return {json.loads(line)["value"] for line in pulled.lines if line.startswith("{")}


def _newest(found: Mapping[Position, str]) -> dict[str, tuple[int, str]]:
    """Return the last update of each key, with its offset; an update is `key:number`."""
    return {value.partition(":")[0]: (position[2], value) for position, value in sorted(found.items())}


class SiteLoad:
    """Producers and workers of one site, until they are stopped."""

    def __init__(self, site: Site, numbers: itertools.count[int]) -> None:
        self.site = site
        self.stored: dict[Position, str] = {}
        """The records that were acknowledged to a producer."""
        self.accepted: dict[str, float] = {}
        """The messages whose settlement was acknowledged to a worker, and the time."""
        self.uncertain: set[str] = set()
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
                # Without joining the group: a member that leaves waits for its coordinator, which may be down.
                consumer.assign([TopicPartition(PLAIN, index) for index in range(PARTITIONS)])
                while not self._stop.is_set():
                    messages = [message for message in consumer.consume(200, 0.3) if message.error() is None]
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
            # In its own process: commands in this process run only in its main thread.
            pull = ("subscription", "pull", SUBSCRIPTION, "-n", "1000", "--accept", "--json", "--timeout", "5")
            done = CommandLine(self.site.brokers).process(*pull)
            if done.code == 0:
                now = time.monotonic()
                for value in _values(done):
                    self.accepted[value] = now
            else:
                # A worker that got no response may have accepted what it has printed.
                self.uncertain |= _values(done)
            time.sleep(0.1)


class MirrorTrial:
    """A round on two sites."""

    def __init__(self, folder: Path, *, seed: int, faults: int, link: Link, print_line: Callable[[str], None]) -> None:
        self._random = random.Random(seed)
        self._faults = faults
        self._print_line = print_line
        self._numbers = itertools.count()
        self.violations: list[str] = []
        self.faults = Counter[str]()
        """The number of faults of each kind."""
        self._stack = ExitStack()
        try:
            thread = self._stack.enter_context(RelayThread())
            shared: list[dict[str, object]] = [{}, {}]
            if link.nodes > 1:
                etcd = self._stack.enter_context(EtcdServer())
                postgres = self._stack.enter_context(PostgresServer())
                shared = [{"etcd": etcd.url, "catalog": postgres.new_database()} for _ in shared]
            self.first = Site(folder, "first", thread, link, shared[0])
            self._stack.callback(self.first.close)
            self.second = Site(folder, "second", thread, link, shared[1])
            self._stack.callback(self.second.close)
        except BaseException:
            self._stack.close()
            raise

    def close(self) -> None:
        """Stop both sites."""
        self._stack.close()

    def run(self) -> None:
        """Run the round; `violations` lists the violated rules."""
        first, second = self.first, self.second
        for topic in TOPICS:
            self._run_command(first, "topic", "create", topic, "--partitions", str(PARTITIONS))
        compaction = [part for name, value in COMPACTION.items() for part in ("--set", f"{name}={value}")]
        self._run_command(first, "topic", "create", COMPACTED, "--partitions", str(PARTITIONS), *compaction)
        # Leases of workers that died with the first site end before the checker stops waiting for their messages.
        lease = ("--set", f"share.record.lock.duration.ms={LEASE_MS}")
        self._run_command(first, "subscription", "create", SUBSCRIPTION, "--topic", PLAIN, *lease)
        self._run_command(second, "mirror", "create", MIRROR, "--from", first.outside, "--exclude", DISCARDED)
        load = SiteLoad(first, self._numbers)
        load.start()
        for _ in range(self._faults):
            self._fault()
        time.sleep(3)
        self._wait_for_lag(second, 5_000)
        first.kill()
        self.faults["kill a site"] += 1
        killed_at = time.monotonic()
        load.stop()
        cuts = self._fail_over(second)
        self._print_line(f"{len(load.stored)} stored, {len(load.accepted)} accepted")
        self._check_failover(second, load, cuts, killed_at)
        second_contents = self._read(second, "read_uncommitted")

        later_load = SiteLoad(second, self._numbers)
        later_load.start()
        time.sleep(3)
        first.start()
        only_first = self._check_common(first, second_contents, cuts)
        reverse = ("mirror", "reverse", MIRROR, "--address", second.outside, "--save-to", DISCARDED, "--yes", "--json")
        reversed_ = self._run_with_retries(second, *reverse)
        self._check_removed(first, only_first, reversed_["removed"])
        self._print_line(f"reversed in {reversed_['waited_ms']} ms; {len(reversed_['removed'])} ranges dropped")
        self._fault()
        time.sleep(2)
        switch = ("mirror", "switch", MIRROR, "--address", first.outside, "--yes", "--json", "--timeout", "60")
        switched = self._run_with_retries(first, *switch)
        later_load.stop()
        self._print_line(f"switched in {switched['waited_ms']} ms")
        if switched["removed"]:
            self.violations.append(f"a planned switch dropped {switched['removed']}")
        self._wait_until_equal(first, second)
        first_contents = self._read(first, "read_uncommitted")
        for position, value in later_load.stored.items():
            if position[0] in TOPICS and first_contents.get(position) != value:
                self.violations.append(
                    f"the switch lost {value} at {position}; there is {first_contents.get(position)}"
                )
                break
        self._check_pairs(first)
        self._check_pairs(second)

    def _fail_over(self, site: Site) -> Cuts:
        """Fail over to a site; in a cluster a node may be killed meanwhile, so that the command has to be repeated."""
        node = self._random.choice(site.nodes) if site.is_cluster and self._random.random() < 0.5 else None
        killing = threading.Timer(self._random.uniform(0, 1), Server.kill, [node])
        if node is not None:
            self._print_line("kill a node of the second site during the failover")
            self.faults["kill during failover"] += 1
            killing.start()
        report = self._run_command(site, "mirror", "failover", MIRROR, "--yes", "--json").document
        self._print_line(f"failed over in {report['waited_ms']} ms")
        if node is not None:
            killing.join()
            node.start()
        described = self._run_command(site, "mirror", "describe", MIRROR, "--json").document
        return {(topic, int(index)): cut for topic, cuts in described["cuts"].items() for index, cut in cuts.items()}

    def _run_with_retries(self, site: Site, *arguments: str) -> dict[str, Any]:
        """Run a command until it succeeds; after a fault the mirror may be disconnected for a moment."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            done = site.command(*arguments)
            if done.code == 0:
                found: dict[str, Any] = done.document
                return found
            if time.monotonic() > deadline:
                raise TrialInconclusive(f"`{' '.join(arguments)}` failed: {done.err}")
            self._print_line(f"retrying: {done.err.strip()[:200]}")
            time.sleep(1)

    # -- faults ---------------------------------------------------------------------------------------------

    def _fault(self) -> None:
        site = self._random.choice([self.first, self.second])
        kind = self._random.choice(["kill", "freeze", "cut", "cut one way", "pause"])
        node = self._random.choice(site.nodes)
        self._print_line(f"{kind} {site.name}")
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
        # Only the site that follows has the mirror: the first one after `reverse`.
        for follower in (self.first, self.second):
            follower.command("mirror", "resume", MIRROR)
        time.sleep(self._random.uniform(0.5, 2))

    # -- the checker ----------------------------------------------------------------------------------------

    def _check_failover(self, site: Site, load: SiteLoad, cuts: Cuts, killed_at: float) -> None:
        everything = self._read(site, "read_uncommitted")
        self._check_compacted(site, load, cuts)
        for position, value in load.stored.items():
            if (
                position[0] in TOPICS
                and position[2] < cuts[position[0], position[1]]
                and everything.get(position) != value
            ):
                self.violations.append(
                    f"{value} was stored at {position}, below the cut; there is {everything.get(position)}"
                )
                break
        self._check_pairs(site)
        self._check_group(site)
        plain = {value for position, value in everything.items() if position[0] == PLAIN}
        delivered: set[str] = set()
        idle_until = time.monotonic() + 3 * LEASE_MS / 1000
        while time.monotonic() < idle_until:
            done = site.command("subscription", "pull", SUBSCRIPTION, "-n", "500", "--accept", "--wait", "1", "--json")
            if values := _values(done):
                delivered |= values
                idle_until = time.monotonic() + 3 * LEASE_MS / 1000
            if delivered | load.accepted.keys() >= plain:
                break
        lost = plain - delivered - load.accepted.keys() - load.uncertain
        if lost:
            self.violations.append(f"{len(lost)} messages were wrongly considered accepted, for example {min(lost)}")
        carried = {value for value, at in load.accepted.items() if at < killed_at - CARRIED_OVER_S}
        again = delivered & carried
        if again:
            self.violations.append(f"{len(again)} accepted messages were delivered again, for example {min(again)}")
        self._print_line(
            f"{len(plain)} messages on the second site, {len(delivered)} delivered, {len(carried)} certainly accepted"
        )

    def _check_common(self, first: Site, second_contents: dict[Position, str], cuts: Cuts) -> dict[Position, str]:
        """Compare what both sites have below the cuts; return what only the first has."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            first_contents = self._read(first, "read_uncommitted")
            ends = {position[:2]: position[2] for position in sorted(first_contents)}
            # Leaders that have just started do not know their high watermark yet.
            missing = [
                position
                for position in second_contents
                if ends.get(position[:2], -1) < position[2] < cuts[position[0], position[1]]
            ]
            if not missing or time.monotonic() > deadline:
                break
            time.sleep(1)
        for position in first_contents.keys() | second_contents.keys():
            if position[2] < cuts[position[0], position[1]] and first_contents.get(position) != second_contents.get(
                position
            ):
                self.violations.append(
                    f"below the cut, {position} is {first_contents.get(position)} on the first site "
                    f"and {second_contents.get(position)} on the second"
                )
                break
        return {
            position: value
            for position, value in first_contents.items()
            if position[2] >= cuts[position[0], position[1]]
        }

    def _check_removed(self, first: Site, only_first: dict[Position, str], removed: list[dict[str, Any]]) -> None:
        """Check that every record that only the first site had was reported and saved."""
        ranges = [
            (removed_range["topic"], removed_range["partition"], removed_range["start"], removed_range["end"])
            for removed_range in removed
        ]
        unreported = [
            position
            for position in only_first
            if not any(
                position[:2] == (topic, index) and start <= position[2] < end for topic, index, start, end in ranges
            )
        ]
        if unreported:
            self.violations.append(
                f"{len(unreported)} dropped records were not reported, for example {min(unreported)}"
            )
        if ranges:
            saved = set(self._read(first, "read_uncommitted", {DISCARDED: 1}).values())
            unsaved = {value for position, value in only_first.items() if position[0] == PLAIN} - saved
            if unsaved:
                self.violations.append(f"{len(unsaved)} dropped records were not saved, for example {min(unsaved)}")

    def _check_group(self, site: Site) -> None:
        """Check that the output of a group's transactions matches its committed offsets."""
        described = site.command("group", "describe", GROUP, "--json")
        if described.code != 0:
            return
        committed = {offset["partition"]: offset["committed"] for offset in described.document["offsets"]}
        found = self._read(site, "read_committed")
        read = {
            value
            for position, value in found.items()
            if position[0] == PLAIN and position[2] < committed.get(position[1], 0)
        }
        written = {value for position, value in found.items() if position[0] == COPIED}
        if missing := read - written:
            self.violations.append(f"offsets are ahead of {len(missing)} records, for example {min(missing)}")
        self._print_line(f"the group has read {len(read)} messages, and written {len(written)}")

    def _check_compacted(self, site: Site, load: SiteLoad, cuts: Cuts) -> None:
        """Check that no key of the compacted topic has only an older update than the newest one below the cut."""
        below = {
            position: value
            for position, value in load.stored.items()
            if position[0] == COMPACTED and position[2] < cuts[position[0], position[1]]
        }
        found = self._read(site, "read_uncommitted", {COMPACTED: PARTITIONS})
        newest = _newest(found)
        for key, (offset, value) in _newest(below).items():
            if newest.get(key, (-1, ""))[0] < offset or (newest[key][0] == offset and newest[key][1] != value):
                self.violations.append(f"{value} was stored at {COMPACTED} {offset}; there is {newest.get(key)}")
                break
        self._print_line(f"{len(below)} updates of {len(newest)} keys, {len(found)} left after compaction")

    def _check_pairs(self, site: Site) -> None:
        found = self._read(site, "read_committed")
        left = {value for position, value in found.items() if position[0] == LEFT}
        right = {value for position, value in found.items() if position[0] == RIGHT}
        if left != right:
            self.violations.append(f"on {site.name}, transactions are torn: {sorted(left ^ right)[:5]}")

    def _wait_until_equal(self, one: Site, other: Site) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while (first_contents := self._contents(one)) != (second_contents := self._contents(other)):
            if time.monotonic() > deadline:
                differ = [
                    position
                    for position in first_contents.keys() | second_contents.keys()
                    if first_contents.get(position) != second_contents.get(position)
                ]
                self.violations.append(f"{len(differ)} positions differ, for example {min(differ)}")
                return
            time.sleep(1)

    def _contents(self, site: Site) -> dict[Position, str]:
        """Read every record, and of the compacted topic only the newest of each key: each site compacts on its own."""
        updates = self._read(site, "read_uncommitted", {COMPACTED: PARTITIONS})
        newest = set(_newest(updates).values())
        kept = {position: value for position, value in updates.items() if (position[2], value) in newest}
        return {**self._read(site, "read_uncommitted"), **kept}

    def _wait_for_lag(self, site: Site, lag_max: int) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            described = site.command("mirror", "describe", MIRROR, "--json")
            found = described.document if described.code == 0 else {}
            if found.get("lag") is not None and not found["lag_unknown"] and found["lag"] <= lag_max:
                return
            if time.monotonic() > deadline:
                raise TrialInconclusive(f"the mirror does not catch up: {described.out[:1000]} {described.err}")
            time.sleep(0.5)

    def _read(self, site: Site, isolation: str, topics: Mapping[str, int] | None = None) -> dict[Position, str]:
        """Read all records of topics, by default those of the load."""
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
        found: dict[Position, str] = {}
        ended: set[tuple[str, int]] = set()
        consumer.assign([TopicPartition(topic, index, 0) for topic in partitions for index in range(partitions[topic])])
        deadline = time.monotonic() + PATIENCE_S
        try:
            while len(ended) < sum(partitions.values()):
                if time.monotonic() > deadline:
                    raise TrialInconclusive(f"{site.name} cannot be read to its end")
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

    def _run_command(self, site: Site, *arguments: str) -> Any:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            done = site.command(*arguments)
            if done.code == 0:
                return done
            if time.monotonic() > deadline:
                raise TrialInconclusive(f"{' '.join(arguments)} failed on {site.name}: {done.err}")
            time.sleep(1)
