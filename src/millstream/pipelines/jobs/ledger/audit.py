"""The audit: account for every message of every subscription with a ledger, over log, lake and ledger.

The nodes record a mark in each queue, everything up to it is landed, and one task per queue folds its events
(`account.py`) and compares the result with what the log holds, with the lake where the log was cut, and with the dead
letter topics. The table itself is compared with its seals. Tasks read files one at a time, so their memory depends on
the size of a file and on `BLOCK` offsets, not on the number of messages.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from millstream.broker.subscriptions.frame import LEDGER_REQUESTED
from millstream.client.admin.cluster_status import find_lost
from millstream.core.errors import BatchRejected, CorruptBatch, MillstreamError, OffsetOutOfRange
from millstream.core.ids import OffsetRange
from millstream.core.pipeline import LandSettings
from millstream.core.subscription import READ_UNCOMMITTED
from millstream.pipelines.jobs.ledger.account import COLUMNS, DEAD_LETTERED, Account, Unreadable
from millstream.pipelines.jobs.ledger.events import OVERFLOWED, UNREADABLE
from millstream.pipelines.jobs.ledger.table import FAULTS, Damage, LedgerTable
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import open_table
from millstream.pipelines.runtime.fault import MarkedTask
from millstream.pipelines.source.access import NO_ACCESS, Access
from millstream.pipelines.source.landed_history import landings
from millstream.pipelines.source.link import Link, link_to
from millstream.pipelines.source.options import OFFSET_EARLIEST
from millstream.protocol.private.subscriptions import MarkedQueue, mark_ledger
from millstream.protocol.records.batch import BatchHeader, iterate_whole_headers
from millstream.protocol.records.record import AbortedBatches, decode_batch
from millstream.protocol.wire import fetch
from millstream.protocol.wire.client import Client

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BLOCK: Final = 64 * 1024 * 1024
"""How many offsets a task accounts for at a time: two bytes of memory each."""
CLASSES: Final = ("accepted", "dead_lettered", "filtered", "skipped", "waiting", "expired", "lost")
"""The possible outcomes of a published message; their counts add up to `published`."""
COUNTS: Final = ("published", *CLASSES, "duplicated", "dropped")
HARMLESS: Final = frozenset({"expired"})
"""Findings about messages that are accounted for."""
_CLIENT_ID: Final = "millstream-audit"
_TIMEOUT_S: Final = 60.0
_FETCH_BYTES: Final = 4 * 1024 * 1024
_RESULT: Final = pa.schema([pa.field("result", pa.string())])


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerLocation:
    """The locations of log, lake and ledger, for tasks."""

    brokers: str
    access: Access = NO_ACCESS
    storage: Storage
    left_out: frozenset[str] = frozenset()
    """The damaged files of the ledger."""

    def table(self) -> LedgerTable:
        """Open the ledger without its damaged files."""
        return LedgerTable(self.storage, self.left_out)

    def link(self) -> Link:
        return link_to(
            self.brokers, client_id=_CLIENT_ID, timeout_s=_TIMEOUT_S, patience_s=_TIMEOUT_S, access=self.access
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueAudit:
    subscription: str
    subscription_id: str
    topic: str
    topic_id: str
    partition: int
    base: int
    end: int
    first: int = 0
    """The first offset that counts."""
    mark: str = ""
    """The reason of the last event that counts; all count if it is empty."""
    cut: int | None = None
    """The offset up to which messages could be delivered at the mark; None if the queue is gone."""
    lake: tuple[str, str] | None = None
    """The location and the format of the table in which the topic is landed."""


@dataclass(slots=True, kw_only=True)
class AuditReport:
    rows: list[dict[str, Any]] = field(default_factory=list)
    """The counts for each subscription and topic."""
    findings: list[dict[str, Any]] = field(default_factory=list)
    """Every message that is lost, duplicated or expired, as ranges, and every missing event."""
    damage: list[Damage] = field(default_factory=list)
    """The damage to the ledger's table since it was landed; damaged files do not count."""
    is_counted: bool = True
    """Whether there are counts: a table whose log is damaged cannot be read."""
    seal: str = ""
    """The last seal of the ledger's table."""
    seconds: float = 0.0

    @property
    def adds_up(self) -> bool:
        """Whether every message is accounted for, and the ledger is as it was landed."""
        return (
            not self.damage and all(finding["kind"] in HARMLESS for finding in self.findings) and not self._wrong_sums()
        )

    def _wrong_sums(self) -> bool:
        return any(row["published"] != sum(row[name] for name in CLASSES) for row in self.rows)

    def levels(self) -> dict[str, int]:
        """Return the metrics of the last audit, including zeros, so that alerts see changes."""
        counts = {f"audit_{name}": sum(row[name] for row in self.rows) for name in ("lost", "duplicated", "expired")}
        faults = sum(finding["kind"] not in HARMLESS for finding in self.findings) + len(self.damage)
        return {**counts, FAULTS: faults}

    def as_document(self) -> dict[str, Any]:
        return {
            "adds_up": self.adds_up,
            "subscriptions": self.rows,
            "findings": self.findings,
            "damage": [damaged_range._asdict() for damaged_range in self.damage],
            "counted": self.is_counted,
            "seal": self.seal,
            "seconds": round(self.seconds, 1),
        }


def mark(place: LedgerLocation, names: Sequence[str] | None) -> tuple[str, list[MarkedQueue]]:
    """Make every queue record its window; return the reason of these events, and the queues."""
    name = uuid4().hex
    link = place.link()
    return f"{LEDGER_REQUESTED} {name}", link.call(
        mark_ledger(link.client, name, None if names is None else list(names))
    )


Work = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
"""Maps the numbers of tasks to the rows that they result in."""


class TaskRunner(Protocol):
    @property
    def parallelism(self) -> int:
        """Return how many tasks run at a time."""

    def run(self, work: Work, count: int, columns: str) -> list[dict[str, Any]]:
        """Run tasks 0 to `count` and return their rows, which have the given columns."""


class SparkTasks:
    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    @property
    def parallelism(self) -> int:
        return self._spark.sparkContext.defaultParallelism

    def run(self, work: Work, count: int, columns: str) -> list[dict[str, Any]]:
        rows = self._spark.range(0, count, 1, count).mapInArrow(MarkedTask(work), columns).collect()
        return [row.asDict() for row in rows]


class LocalTasks:
    """Tasks of this process, one after the other: for a ledger that is read in less time than Spark takes to start."""

    parallelism = 1

    def run(self, work: Work, count: int, columns: str) -> list[dict[str, Any]]:
        numbers = pa.RecordBatch.from_pydict({"id": pa.array(range(count), pa.int64())})
        return [row for batch in work([numbers]) for row in batch.to_pylist()]


def audit(
    runner: TaskRunner,
    place: LedgerLocation,
    *,
    marked: tuple[str, Sequence[MarkedQueue]] = ("", ()),
    names: Sequence[str] | None = None,
    since_ms: int | None = None,
) -> AuditReport:
    """Account for all messages up to the marks, which have landed."""
    sealed = LedgerTable(place.storage)
    report = AuditReport(damage=sealed.verify(), seal=sealed.last_seal())
    place = replace(place, left_out=frozenset(damaged_range.path for damaged_range in report.damage))
    queues, report.findings = _queues(place.table(), place, marked, names, since_ms)
    results = account_queues(runner, AuditTasks(place, queues), len(queues))
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for queue, result in sorted(results, key=lambda pair: (pair[0]["subscription"], pair[0]["topic"])):
        key = (queue["subscription_id"], queue["topic_id"])
        row = rows.setdefault(key, {**queue, "delivery": result["delivery"], **dict.fromkeys(COUNTS, 0)})
        for name in COUNTS:
            row[name] += result["totals"][name]
        row["deleted"] = row.get("deleted", False) or result["deleted"]
        report.findings += [{**queue, "partition": result["partition"], **finding} for finding in result["findings"]]
    report.rows = list(rows.values())
    return report


Result = tuple[dict[str, Any], dict[str, Any]]
"""The names of a queue, and its account."""


def account_queues(runner: TaskRunner, tasks: AuditTasks, count: int) -> list[Result]:
    return [json.loads(row["result"]) for row in runner.run(tasks, count, "result string")] if count else []


def _queues(
    table: LedgerTable,
    place: LedgerLocation,
    marked: tuple[str, Sequence[MarkedQueue]],
    names: Sequence[str] | None,
    since_ms: int | None,
) -> tuple[list[QueueAudit], list[dict[str, Any]]]:
    """Return the queues that have events, in blocks, and findings that concern no single queue."""
    reason, marked_queues = marked
    ends = {(queue.subscription_id, queue.topic_id, queue.partition): queue for queue in marked_queues}
    found, findings = _extents(table)
    link = place.link()
    topics = {str(topic.topic_id): name for name, topic in link.call(link.client.metadata()).topics.items()}
    landed = landings(link)
    tables = {topic_id: _landed_in(landed, name) for topic_id, name in topics.items()}
    queues: list[QueueAudit] = []
    for (subscription_id, topic_id, partition), (subscription, topic, low, high) in sorted(found.items()):
        if names is not None and subscription not in names:
            continue
        now = ends.get((subscription_id, topic_id, partition))
        whole = QueueAudit(
            subscription=subscription,
            subscription_id=subscription_id,
            topic=topic,
            topic_id=topic_id,
            partition=partition,
            base=low,
            end=max(high, 0 if now is None else now.end),
            first=0 if since_ms is None else _first_since(link, topics.get(topic_id), partition, since_ms),
            mark="" if now is None else reason,
            cut=None if now is None else now.end,
            lake=tables.get(topic_id),
        )
        starts = range(whole.base, max(whole.end, whole.base + 1), BLOCK)
        queues += [replace(whole, base=start, end=min(whole.end, start + BLOCK)) for start in starts]
    return queues, findings


def _landed_in(landed: Sequence[tuple[LandSettings, str]], topic: str) -> tuple[str, str] | None:
    for settings, lake in landed:
        if settings.takes(topic):
            return f"{lake}/{topic}", settings.format
    return None


def _first_since(link: Link, topic: str | None, partition: int, since_ms: int) -> int:
    """Return the first offset published at a time or later; the end if no message is that new."""
    if topic is None:
        return 0
    offset = link.call(link.client.list_offsets(topic, {partition: since_ms}))[partition].offset
    return 2**62 if offset < 0 else int(offset)


Extent = tuple[str, str, int, int]


def _extents(table: LedgerTable) -> tuple[dict[tuple[str, str, int], Extent], list[dict[str, Any]]]:
    """Return the names and offset range of every queue in the table, and the events that the table reports missing."""
    keys = ["subscription_id", "topic_id", "partition"]
    columns = [*keys, "kind", "subscription", "topic", "offset", "end_offset", "reason", "state_partition"]
    extents: dict[tuple[str, str, int], Extent] = {}
    findings: list[dict[str, Any]] = []
    for batch in table.events(columns=columns):
        about_table = pc.is_in(batch.column("kind"), pa.array([OVERFLOWED, UNREADABLE]))
        for row in batch.filter(about_table).to_pylist():
            where = f"__subscriptions/{row['state_partition']}"
            findings.append(
                {
                    "kind": row["kind"],
                    "start": row["offset"],
                    "end": row["end_offset"],
                    "detail": f"{where}: {row['reason']}",
                }
            )
        named = pc.is_valid(batch.column("subscription"))
        grouped = pa.Table.from_batches([batch.filter(named)]).group_by(keys)
        extremes = [
            ("subscription", "max"),
            ("topic", "max"),
            ("offset", "min"),
            ("offset", "max"),
            ("end_offset", "max"),
        ]
        totals = grouped.aggregate(extremes)
        for row in totals.to_pylist():
            key = (row["subscription_id"], row["topic_id"], row["partition"])
            low, high = row["offset_min"], max(row["end_offset_max"], row["offset_max"])
            known = extents.get(key)
            if known is not None:
                low, high = min(low, known[2]), max(high, known[3])
            extents[key] = (row["subscription_max"], row["topic_max"], low, high)
    return extents, findings


class AuditTasks:
    """The function of `mapInArrow` that maps numbers of queues to their accounts, as JSON."""

    def __init__(self, place: LedgerLocation, queues: Sequence[QueueAudit]) -> None:
        self._place = place
        self._queues = queues

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                text = json.dumps(_account_for(self._queues[number], self._place))
                yield pa.RecordBatch.from_pydict({"result": [text]}, schema=_RESULT)


def _account_for(queue: QueueAudit, place: LedgerLocation) -> Result:
    account = Account(base=queue.base, size=max(0, queue.end - queue.base))
    for events in ordered_events(place.table(), queue):
        account.take(events)
    is_there = queue.cut is not None and not account.is_deleted
    cut = queue.cut if queue.cut is not None and is_there else queue.end
    log_start, present, unreadable = _present(place.link(), queue, account, cut) if is_there else (0, None, [])
    account.close(present, first=queue.first, cut=cut, log_start=log_start, unreadable=unreadable)
    if account.letters:
        account.count_lost_letters(missing_letters(place.link(), account))
    named = ("subscription", "subscription_id", "topic", "topic_id")
    result = {
        "partition": queue.partition,
        "delivery": account.delivery,
        "deleted": queue.cut is None or account.is_deleted,
        "totals": account.totals(),
        "findings": [finding._asdict() for finding in account.findings],
    }
    return {name: getattr(queue, name) for name in named}, result


def ordered_events(table: LedgerTable, queue: QueueAudit) -> Iterator[pa.Table]:
    """Yield the events of a queue in the order in which they were appended, file by file, up to its mark."""
    dataset = table.dataset()
    if dataset is None:
        return
    condition = (
        (ds.field("subscription_id") == queue.subscription_id)
        & (ds.field("topic_id") == queue.topic_id)
        & (ds.field("partition") == queue.partition)
    )
    files: list[tuple[int, ds.Fragment]] = []
    for fragment in dataset.get_fragments(filter=condition):
        low = pc.min(
            fragment.to_table(columns=["state_offset"], filter=condition, schema=dataset.schema).column(0)
        ).as_py()
        if low is not None:
            files.append((low, fragment))
    for _low, fragment in sorted(files, key=lambda pair: pair[0]):
        events = fragment.to_table(columns=list(COLUMNS), filter=condition, schema=dataset.schema)
        events = events.sort_by([("state_offset", "ascending"), ("row", "ascending")]).combine_chunks()
        if queue.mark:
            at = pc.index(events.column("reason"), queue.mark).as_py()
            if at >= 0:
                yield events.slice(0, at + 1)
                return
        yield events


# -- log and lake -------------------------------------------------------------------------------------------------


def _present(
    link: Link, queue: QueueAudit, account: Account, cut: int
) -> tuple[int, list[OffsetRange], list[Unreadable]]:
    """Return from which offset on messages are known, the ranges of committed messages, and those in between that the
    log has no more.
    """
    listed = link.call(link.client.list_offsets(queue.topic, {queue.partition: OFFSET_EARLIEST}))
    log_start = max(queue.base, int(listed[queue.partition].offset))
    isolation = fetch.READ_UNCOMMITTED if account.isolation == READ_UNCOMMITTED else fetch.READ_COMMITTED
    end = min(cut, queue.end)
    known_from, present = log_start, list[OffsetRange]()
    if queue.lake is not None and queue.base < log_start:
        known_from, present = _landed(queue, log_start)
    found, unreadable = link.call(
        committed_ranges(link.client, queue.topic, queue.partition, log_start, end, isolation)
    )
    return known_from, [*present, *found], unreadable


def _landed(queue: QueueAudit, log_start: int) -> tuple[int, list[OffsetRange]]:
    """Return the offsets before the log start that the lake has; those that were landed late are unknown."""
    if queue.lake is None:
        return log_start, []
    url, format_name = queue.lake
    table = open_table(url, format=format_name)
    if table.reached([(queue.topic_id, queue.partition)]).get((queue.topic_id, queue.partition), 0) < log_start:
        return log_start, []
    offsets: list[int] = []
    for scan in (table.scan, table.scan_quarantined):
        for batch in scan(queue.topic_id, queue.partition, queue.base, log_start, ("offset",)):
            offsets += batch.column("offset").to_pylist()
    if not offsets:
        return log_start, []
    return min(offsets), _ranges(sorted(offsets))


def _ranges(offsets: Iterable[int]) -> list[OffsetRange]:
    ranges: list[list[int]] = []
    for offset in offsets:
        if ranges and ranges[-1][1] == offset:
            ranges[-1][1] = offset + 1
        else:
            ranges.append([offset, offset + 1])
    return [OffsetRange(start, end) for start, end in ranges]


async def committed_ranges(
    client: Client, topic: str, partition: int, start: int, end: int, isolation: int
) -> tuple[list[OffsetRange], list[Unreadable]]:
    """Return the ranges of offsets that hold messages which a subscription may see, and those that cannot be read."""
    ranges: list[list[int]] = []
    unreadable: list[Unreadable] = []
    offset = start
    while offset < end:
        try:
            response = await client.fetch(
                topic, partition, offset, max_bytes=_FETCH_BYTES, max_wait_ms=0, isolation=isolation
            )
        except OffsetOutOfRange:
            # Retention continues while the audit runs; what it deletes now was there at the mark.
            break
        except CorruptBatch:
            lost = await find_lost(client, topic, partition, offset)
            if lost is None:
                raise
            unreadable.append(Unreadable(offset, min(lost.end, end), "the disk of the broker lost it"))
            offset = lost.end
            continue
        aborted = AbortedBatches(response.aborted)
        before = offset
        for header in iterate_whole_headers(response.records):
            is_aborted = aborted.holds(header.last_offset, header.attributes, header.producer_id)
            offset = max(offset, header.next_offset)
            if not (header.is_control or is_aborted):
                try:
                    _extend(ranges, response.records, header, start, end)
                except BatchRejected as error:
                    first, after = max(header.base_offset, start), min(header.next_offset, end)
                    unreadable.append(Unreadable(first, after, f"its batch cannot be read ({error})"))
        if offset == before:
            break
    return [OffsetRange(first, after) for first, after in ranges], unreadable


def _extend(ranges: list[list[int]], records: memoryview, header: BatchHeader, start: int, end: int) -> None:
    """Add the messages of a batch; one that was compacted has fewer than its offsets."""
    if header.record_count == header.next_offset - header.base_offset:
        spans = [(int(header.base_offset), int(header.next_offset))]
    else:
        spans = [(int(record.offset), int(record.offset) + 1) for record in decode_batch(records, header)]
    for first, after in spans:
        first, after = max(first, start), min(after, end)
        if first >= after:
            continue
        if ranges and ranges[-1][1] == first:
            ranges[-1][1] = after
        else:
            ranges.append([first, after])


# -- dead letters -------------------------------------------------------------------------------------------------


def missing_letters(link: Link, account: Account) -> list[int]:
    """Return the messages whose letters are not in the dead letter topic, although it has that part of its log."""
    by_place: dict[tuple[str, int], dict[int, int]] = {}
    for offset, (topic, partition, at) in account.letters.items():
        if account.outcomes[offset - account.base] == DEAD_LETTERED:
            by_place.setdefault((topic, partition), {})[at] = offset
    missing: list[int] = []
    for (topic, partition), letters in by_place.items():
        missing += link.call(_missing_in(link.client, topic, partition, letters))
    return missing


async def _missing_in(client: Client, topic: str, partition: int, letters: dict[int, int]) -> list[int]:
    if topic not in (await client.metadata([topic])).topics:
        # The dead letter topic was deleted with its letters, which is no fault of the queue.
        return []
    missing: list[int] = []
    for at in sorted(letters):
        try:
            response = await client.fetch(topic, partition, at, max_bytes=1, max_wait_ms=0)
        except CorruptBatch:
            if await find_lost(client, topic, partition, at) is not None:
                missing.append(letters[at])
            continue
        except OffsetOutOfRange:
            earliest = (await client.list_offsets(topic, {partition: OFFSET_EARLIEST}))[partition].offset
            if at >= earliest:
                missing.append(letters[at])
            continue
        except MillstreamError:
            continue
        if not await _holds_letter(response, at, letters[at]):
            missing.append(letters[at])
    return missing


async def _holds_letter(response: fetch.FetchedPartition, at: int, offset: int) -> bool:
    for header in iterate_whole_headers(response.records):
        if header.base_offset <= at <= header.last_offset:
            ranges = (OffsetRange(at, at + 1),)
            record = next(decode_batch(response.records, header, ranges=ranges), None)
            return record is not None and dict(record.headers).get("dlq-offset") == str(offset).encode()
    return False
