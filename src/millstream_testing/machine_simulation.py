"""Simulates a machine that resizes and crashes at any point: no log is lost, stale or duplicated.

Each seed alternates between runs, in which the leader of each partition appends what an idempotent producer sends, and
settlements, which move logs between the folders of processes (`broker/cluster/machine_folder.py`). Both can crash at
any operation on the disk: only the process, or the machine, which loses what was not synced. The real coordination
file, the real logs and the real settlement run on a disk in memory. After each settlement:

- every log is in the folder of the node that the agreed state names, and in no other;
- it has every acknowledged record, in order, followed only by records that were sent but not acknowledged;
- its leader epoch never decreases, and grows when another node gets it;
- a batch that is sent again is recognized, so producers' states have moved with their log.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import TypeVar
from uuid import UUID

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster import keys, machine_folder
from millstream.broker.cluster.embedded_store import FILE_NAME, EmbeddedService
from millstream.broker.cluster.keys import PartitionKey, parse_partition, partition_key
from millstream.broker.cluster.machine_folder import MARK_NAME, Layout, open_coordination
from millstream.broker.cluster.store import Change, Put
from millstream.broker.log.commit import Commit
from millstream.broker.log.files import Readable
from millstream.broker.log.folder import PARTITIONS_NAME
from millstream.broker.log.log import Log
from millstream.broker.log.store import LogStore
from millstream.core.errors import MillstreamError
from millstream.core.ids import Epoch, NodeId, PartitionIndex
from millstream.core.partition_state import PartitionState, encode_value
from millstream.core.topic import Topic, TopicPartition, TopicSettings
from millstream.protocol.records.record import NewRecord, decode_records, encode_batch
from millstream_testing.clock import ManualClock
from millstream_testing.files import MemoryDirectory, MemoryFiles
from millstream_testing.simulation.rules import Violation
from millstream_testing.simulation.world import Outcome
from millstream_testing.state_log import single_replica_state

DATA = "/data"
ROUNDS = (4, 9)
CORES = (1, 1, 2, 3, 4)
OPERATIONS_MAX = 400
ATTEMPTS_MAX = 12
JOURNAL_BYTES = 64 * 1024
READ_BYTES = 1 << 20

T = TypeVar("T")


class ProcessDied(BaseException):
    """The process died at this operation; every later operation fails too, until the next start."""


class CrashingFiles(MemoryFiles):
    """A disk whose process dies after a number of changes. Moves of directories are atomic.

    A journaling file system writes a move in one step, whichever of the two directories is synced.
    """

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.operations_left: int | None = None
        self.operations = 0
        self._moves: list[tuple[MemoryDirectory, int, MemoryDirectory, int]] = []

    def _step(self) -> None:
        self.operations += 1
        if self.operations_left is not None:
            self.operations_left -= 1
            if self.operations_left < 0:
                raise ProcessDied

    def write_at(self, descriptor: int, data: Readable, position: int, /) -> int:
        """Write, unless the process dies."""
        self._step()
        return super().write_at(descriptor, data, position)

    def sync(self, descriptor: int, /) -> None:
        """Sync, unless the process dies."""
        self._step()
        super().sync(descriptor)

    def truncate(self, descriptor: int, size: int, /) -> None:
        """Truncate, unless the process dies."""
        self._step()
        super().truncate(descriptor, size)

    def make_directory(self, path: str, /) -> None:
        """Create a directory, unless the process dies."""
        self._step()
        super().make_directory(path)

    def remove(self, path: str, /) -> None:
        """Remove a file, unless the process dies."""
        self._step()
        super().remove(path)

    def remove_directory(self, path: str, /) -> None:
        """Remove a directory, unless the process dies."""
        self._step()
        super().remove_directory(path)

    def sync_directory(self, path: str, /) -> None:
        """Make names durable, unless the process dies; this includes moves into and out of the directory."""
        self._step()
        super().sync_directory(path)
        synced = [self._find(path)]
        while synced:
            found = synced.pop()
            for move in [move for move in self._moves if found in (move[0], move[2])]:
                self._moves.remove(move)
                other = move[2] if found is move[0] else move[0]
                other.sync()
                synced.append(other)

    def rename(self, old: str, new: str, /) -> None:
        """Rename, unless the process dies; also from one directory to another."""
        self._step()
        parent, name = self._parent(old)
        other, new_name = self._parent(new)
        if parent is other:
            super().rename(old, new)
            return
        entry = parent.entries[name]
        self._moves.append((parent, len(parent.pending), other, len(other.pending)))
        other.change({new_name: entry})
        parent.change({name: None})

    def crash(self) -> None:
        """Lose power."""
        kept = self._rng.random() < 0.5
        for old, old_at, new, new_at in self._moves:
            if kept:
                old.sync()
                new.sync()
            else:
                del old.pending[old_at:], new.pending[new_at:]
        self._moves.clear()
        for path in tuple(self.walk()):
            if not path.endswith(".log"):
                continue
            # Each write to a log survives as a whole or not at all: another trial covers torn writes.
            log = self._file(path)
            if self._rng.random() < 0.5:
                log.sync()
            else:
                log.pending.clear()
                log.data = bytearray(log.durable)
        super().crash()


class MachineSimulation:
    def __init__(self, seed: int) -> None:
        self._rng = Random(f"{seed} machine")
        self.files = CrashingFiles(seed)
        self.files.make_directory(DATA)
        self.files.sync_directory("/")
        self._clock = ManualClock()
        self._catalog = Catalog("sqlite://")
        self._catalog.prepare()
        self._topics = [
            Topic(
                name=f"topic-{number}",
                topic_id=UUID(int=self._rng.getrandbits(128)),
                partitions=self._rng.randint(1, 5),
                replication=1,
                overrides={},
                created_ms=0,
            )
            for number in range(self._rng.randint(1, 3))
        ]
        for topic in self._topics:
            self._catalog.add_topics([topic])
        self._acknowledged: dict[PartitionKey, list[bytes]] = {key: [] for key in self._keys()}
        self._unacknowledged: dict[PartitionKey, list[bytes]] = {key: [] for key in self._keys()}
        self._last: dict[PartitionKey, tuple[NodeId, Epoch]] = {}
        self._coordination_lost = False
        self.trace: list[str] = []
        self.batches = 0

    def close(self) -> None:
        self._catalog.close()

    def run(self) -> None:
        """Alternate between runs and settlements."""
        layout = Layout.of(DATA, 1, self._rng.choice(CORES))
        self._run(layout)
        for _ in range(self._rng.randint(*ROUNDS)):
            layout = self._settle(layout)
            self._check(layout)
            self._run(layout)

    def _keys(self) -> Iterator[PartitionKey]:
        for topic in self._topics:
            for index in range(topic.partitions):
                yield topic.topic_id, PartitionIndex(index)

    # -- deaths -----------------------------------------------------------------------------------------------

    def _crash_later(self, probability: float) -> None:
        self.files.operations_left = self._rng.randint(0, OPERATIONS_MAX) if self._rng.random() < probability else None

    def _end_process(self) -> None:
        """End the process, or the machine with it."""
        self.files.operations_left = None
        if self._rng.random() < 0.5:
            self.trace.append("the machine loses power")
            self.files.crash()
        else:
            self.trace.append("the process is killed")
            self.files.kill()

    # -- settlements ------------------------------------------------------------------------------------------

    def _draw(self) -> Layout:
        return Layout.of(DATA, 1, self._rng.choice(CORES))

    def _settle(self, before: Layout) -> Layout:
        """Settle with another number of processes, or without one that stays down; repeat until it succeeds."""
        has_dead = len(before.nodes) > 1 and self._rng.random() < 0.3
        layout = before.without(self._rng.choice(before.nodes)) if has_dead else self._draw()
        if self._rng.random() < 0.1 and self.files.exists(f"{DATA}/{FILE_NAME}"):
            self.trace.append("the coordination file is lost")
            self.files.remove(f"{DATA}/{FILE_NAME}")
            self.files.sync_directory(DATA)
            self._coordination_lost = True
        for attempt in range(ATTEMPTS_MAX):
            self.trace.append(f"settle {list(layout.nodes)}")
            self._crash_later(0.7 if attempt < ATTEMPTS_MAX - 1 else 0.0)
            try:
                asyncio.run(self._attempt(layout))
            except ProcessDied:
                self._end_process()
                # Only a running machine can continue without a node; a start has all of them.
                layout = self._draw() if has_dead or self._rng.random() < 0.3 else layout
                has_dead = False
                continue
            self.files.operations_left = None
            return layout
        raise Violation("the last attempt died")

    async def _attempt(self, layout: Layout) -> None:
        """Run the settlement that precedes the start of nodes."""
        files = self.files
        if layout.is_settled(files):
            return
        machine_folder.mark(layout, files)
        with closing(open_coordination(files, DATA, self._clock)) as service:
            await machine_folder.move_logs(layout, files, self._clock, service, self._catalog)

    # -- runs -------------------------------------------------------------------------------------------------

    def _states(self, service: EmbeddedService) -> dict[PartitionKey, PartitionState]:
        return {
            parse_partition(key.removeprefix(keys.PARTITIONS)): PartitionState.from_json(entry.value)
            for key, entry in service.read(keys.PARTITIONS).entries.items()
        }

    def _run(self, layout: Layout) -> None:
        self.trace.append(f"run {list(layout.nodes)}")
        self._crash_later(0.6)
        try:
            self._serve(layout)
        except ProcessDied:
            self._end_process()
        self.files.operations_left = None

    def _serve(self, layout: Layout) -> None:
        service = open_coordination(self.files, DATA, self._clock)
        states = self._states(service)
        if not states and not service.read(keys.CLUSTER_ID).entries:
            states = {key: single_replica_state(self._rng.choice(layout.nodes)) for key in self._keys()}
            created: list[Change] = [Put(partition_key(key), encode_value(state)) for key, state in states.items()]
            service.change([Put(keys.CLUSTER_ID, self._catalog.cluster_id), *created], [], None)
        for key, state in states.items():
            if not state.has_leader:
                states[key] = state.elected(state.replicas[0])
                service.change([Put(partition_key(key), encode_value(states[key]))], [], None)
        for key, state in states.items():
            self._last[key] = state.leader, state.leader_epoch
        for node, folder in layout.folders.items():
            self._serve_node(folder, {key: state for key, state in states.items() if state.leader == node})
        service.close()

    def _serve_node(self, folder: str, led: dict[PartitionKey, PartitionState]) -> None:
        store = self._open(folder)
        logs: dict[PartitionKey, Log] = {}
        for key, state in led.items():
            log = logs[key] = store.open_log(key[0], TopicPartition(str(key[0]), key[1]), TopicSettings())
            self._check_log(key, log)
            self._check_repeated(key, log, state.leader_epoch)
            for _ in range(self._rng.randint(0, 3)):
                self._send(key, log, state.leader_epoch)
        if unsynced := [log for log in logs.values() if log.synced_offset < log.end_offset]:
            store._run_job(Commit(unsynced, self.files, store._journal))
        for key in logs:
            self._acknowledged[key] += self._unacknowledged[key]
            self._unacknowledged[key] = []
        if self._rng.random() < 0.6:
            store.close_now()
        elif store._folder._lock is not None:
            # Only this process dies: its files stay as they are, without the clean-stop marker.
            self.files.close(store._folder._lock)

    def _open(self, folder: str) -> LogStore:
        return LogStore.open(
            Path(folder),
            files=self.files,
            clock=self._clock,
            journal_bytes=JOURNAL_BYTES,
            producer_expiry_ms=1 << 40,
        )

    def _batch(self, key: PartitionKey, number: int) -> bytearray:
        producer_id = 1 + sorted(self._acknowledged).index(key)
        return encode_batch(
            [NewRecord(None, b"%d" % number)], producer_id=producer_id, producer_epoch=0, base_sequence=number
        )

    def _send(self, key: PartitionKey, log: Log, epoch: Epoch) -> None:
        number = len(self._acknowledged[key]) + len(self._unacknowledged[key])
        self._unacknowledged[key].append(b"%d" % number)
        log.append(self._batch(key, number), leader_epoch=epoch)
        self.batches += 1

    # -- rules ------------------------------------------------------------------------------------------------

    def _check_log(self, key: PartitionKey, log: Log) -> None:
        """Compare a log with what was sent; stored messages that were not acknowledged must remain."""
        found = [
            record.value or b"" for record in decode_records(log.read(0, max_bytes=READ_BYTES, up_to=log.end_offset))
        ]
        known = self._acknowledged[key]
        rest = found[len(known) :]
        if found[: len(known)] != known or rest != self._unacknowledged[key][: len(rest)]:
            raise Violation(f"{key[1]} of {key[0]} has {found}, not {known} and maybe {self._unacknowledged[key]}")
        self._acknowledged[key] = found
        self._unacknowledged[key] = []

    def _check_repeated(self, key: PartitionKey, log: Log, epoch: Epoch) -> None:
        if not self._acknowledged[key]:
            return
        end = log.end_offset
        try:
            log.append(self._batch(key, len(self._acknowledged[key]) - 1), leader_epoch=epoch)
        except MillstreamError as error:
            raise Violation(f"{key[1]} of {key[0]} does not know its producer: {error}") from error
        if log.end_offset != end:
            raise Violation(f"{key[1]} of {key[0]} has a batch twice")

    def _check(self, layout: Layout) -> None:
        """Check the folders and the agreed states, before any node runs."""
        files = self.files
        if files.exists(f"{DATA}/{MARK_NAME}"):
            raise Violation("a settlement that is over is still marked")
        with closing(open_coordination(files, DATA, self._clock)) as service:
            states = self._states(service)
        folders_by_key: dict[PartitionKey, list[str]] = {}
        for folder in (DATA, *(f"{DATA}/{name}" for name in files.names(DATA))):
            for topic in files.names(f"{folder}/{PARTITIONS_NAME}"):
                for index in files.names(f"{folder}/{PARTITIONS_NAME}/{topic}"):
                    folders_by_key.setdefault((UUID(topic), PartitionIndex(int(index))), []).append(folder)
        for key, records in self._acknowledged.items():
            state = states.get(key)
            if state is None:
                if records:
                    raise Violation(f"{key[1]} of {key[0]} has no state")
                continue
            (node,) = state.replicas
            expected = layout.folders.get(node)
            if records and folders_by_key.get(key) != [expected]:
                raise Violation(f"{key[1]} of {key[0]} belongs to {expected}, and is in {folders_by_key.get(key)}")
            self._check_epoch(key, node, state.leader_epoch)
        if self._coordination_lost:
            self._last.clear()
            self._coordination_lost = False

    def _check_epoch(self, key: PartitionKey, node: NodeId, epoch: Epoch) -> None:
        last_node, last_epoch = self._last.get(key, (node, epoch))
        if self._coordination_lost:
            # Epochs without records are lost with the file.
            return
        if epoch < last_epoch or (node != last_node and epoch == last_epoch):
            raise Violation(
                f"{key[1]} of {key[0]} went from {last_node} to {node}, and from epoch {last_epoch} to {epoch}"
            )


def simulate_machine(seed: int, *, tracing: bool = False) -> Outcome:
    outcome = Outcome(seed)
    world = MachineSimulation(seed)
    try:
        world.run()
    except Exception as error:
        outcome.failure = f"{type(error).__name__}: {error}"
        world.trace.append(outcome.failure)
    finally:
        world.close()
    outcome.steps, outcome.batches = world.files.operations, world.batches
    outcome.digest = zlib.crc32("\n".join(world.trace).encode())
    outcome.trace = world.trace if tracing or outcome.failure else []
    return outcome
