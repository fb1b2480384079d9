"""A file of receipts: the messages acknowledged to this program, to be compared with the log later.

Every line is JSON: the id of a message, its position, and a digest of its value. A publisher that keeps such a book
can show, without trusting the broker, that everything that was acknowledged is stored, once and unchanged:

    async with millstream.connect("localhost:9092", receipts="receipts.jsonl") as ms:
        await ms.publish("orders", {"order_id": 1})
    ...
    findings = await millstream.check_receipts("localhost:9092", "receipts.jsonl")

A line is written when the acknowledgement has arrived and before the publisher is notified. A crash of the program may
leave a line torn: the publisher was not notified of that message, and it is skipped when the book is read. Lines that
were not on disk at a power failure may be missing. The book grows until it is moved away: it is the publisher's own,
and opened again each time. It is checked a part at a time, so that its size does not matter.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import BinaryIO, Final, Literal, NamedTuple, Self

import msgspec

from millstream.client.message import Receipt
from millstream.core.errors import CorruptBatch, InvalidRequest, OffsetOutOfRange, UnknownTopic
from millstream.core.ids import OffsetRange, message_id
from millstream.protocol.records.record import Record, decode_records
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import error_from_code

_logger = logging.getLogger(__name__)

_DIGEST_BYTES: Final = 16
_FETCH_BYTES: Final = 1024 * 1024
_PART: Final = 100_000
"""Receipts that are checked at a time."""
_LATEST, _EARLIEST = -1, -2

Kind = Literal["missing", "changed", "expired", "recreated"]
MISSING: Final = "missing"
"""The log has no message there, although it was acknowledged."""
CHANGED: Final = "changed"
"""The log has another message there, or another value."""
EXPIRED: Final = "expired"
"""Retention has deleted it."""
RECREATED: Final = "recreated"
"""The topic was deleted since, and perhaps created again."""


class StoredReceipt(msgspec.Struct, frozen=True, array_like=False):
    """A line of the book."""

    id: str
    topic: str
    topic_id: str
    partition: int
    offset: int
    timestamp_ms: int
    digest: str


class Finding(msgspec.Struct, frozen=True):
    """A message that the log does not hold as recorded in the book."""

    receipt: StoredReceipt
    problem: str
    kind: Kind = MISSING

    @property
    def is_fault(self) -> bool:
        """Whether it is a fault: neither retention nor a deletion explains it."""
        return self.kind in (MISSING, CHANGED)

    def __str__(self) -> str:
        return (
            f"{self.receipt.id} at {self.receipt.topic}-{self.receipt.partition}@{self.receipt.offset}: {self.problem}"
        )


def digest_of(value: bytes | None) -> str:
    return "" if value is None else hashlib.blake2b(value, digest_size=_DIGEST_BYTES).hexdigest()


class ReceiptBook:
    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._file: BinaryIO | None = None
        self._encoder = msgspec.json.Encoder()

    def __enter__(self) -> Self:
        # Unbuffered: a line that was written survives the program.
        self._file = self._path.open("a+b", buffering=0)
        if self._file.seek(0, os.SEEK_END):
            self._file.seek(-1, os.SEEK_END)
            if self._file.read(1) != b"\n":
                # The last run ended within a line, which must not corrupt the next one.
                self._file.write(b"\n")
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def keep(self, receipts: Sequence[Receipt], values: Sequence[bytes | None]) -> None:
        if self._file is None:
            raise InvalidRequest("the receipt file is closed")
        # Without acknowledgements there is nothing to check later: where a message is stored is not known.
        lines = [
            self._encoder.encode(
                StoredReceipt(
                    receipt.id,
                    receipt.topic,
                    receipt.topic_id,
                    receipt.partition,
                    receipt.offset,
                    receipt.timestamp_ms,
                    digest_of(value),
                )
            )
            for receipt, value in zip(receipts, values, strict=True)
            if receipt.offset >= 0
        ]
        self._file.write(b"".join(line + b"\n" for line in lines))


def read_book(path: str | Path) -> Iterator[StoredReceipt]:
    """Yield the receipts of a book; lines torn by a crash are skipped with a warning."""
    decoder = msgspec.json.Decoder(StoredReceipt)
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield decoder.decode(line)
            except msgspec.MsgspecError as error:
                _logger.warning("line %d of %s is not a receipt and is skipped: %s", number, path, error)


class ReceiptCheck(NamedTuple):
    receipts: int
    findings: list[Finding]


async def check_receipts(brokers: str, path: str | Path) -> list[Finding]:
    """Check a book against the log: return every message that is missing or differs."""
    async with Client.connect(brokers) as client:
        return (await check_book(client, path)).findings


async def check_book(client: Client, path: str | Path) -> ReceiptCheck:
    checked, findings = 0, list[Finding]()
    book = read_book(path)
    while part := list(islice(book, _PART)):
        checked += len(part)
        findings += await _check_part(client, part)
    return ReceiptCheck(checked, findings)


async def _check_part(client: Client, part: Iterable[StoredReceipt]) -> list[Finding]:
    by_partition: dict[tuple[str, str, int], dict[int, StoredReceipt]] = {}
    findings: list[Finding] = []
    for receipt in part:
        known = by_partition.setdefault((receipt.topic, receipt.topic_id, receipt.partition), {})
        if receipt.offset in known and known[receipt.offset] != receipt:
            text = f"the receipt file has {known[receipt.offset].id} at the same position"
            findings.append(Finding(receipt, text, CHANGED))
        known[receipt.offset] = receipt
    described = await client.metadata(sorted({topic for topic, _, _ in by_partition}))
    for topic, code in described.errors.items():
        error = error_from_code(code, None, about=f"topic {topic!r}")
        if not isinstance(error, UnknownTopic):
            raise error
    for (topic, topic_id, partition), expected in sorted(by_partition.items()):
        metadata = described.topics.get(topic)
        if metadata is None or str(metadata.topic_id) != topic_id:
            text = "its topic was deleted" + (" and created again" if metadata is not None else "")
            findings += [Finding(receipt, text, RECREATED) for receipt in expected.values()]
        else:
            findings += await _check_partition(client, topic, partition, expected)
    return findings


async def _check_partition(
    client: Client, topic: str, partition: int, expected: dict[int, StoredReceipt]
) -> list[Finding]:
    bounds = await _bounds(client, topic, partition)
    unchecked, findings = _within(dict(sorted(expected.items())), bounds)
    while unchecked:
        next_offset = next(iter(unchecked))
        try:
            response = await client.fetch(topic, partition, next_offset, max_bytes=_FETCH_BYTES, max_wait_ms=0)
        except OffsetOutOfRange:
            # Retention has deleted more meanwhile.
            unchecked, expired = _within(unchecked, await _bounds(client, topic, partition))
            findings += expired
            continue
        except CorruptBatch:
            from millstream.client.admin.cluster_status import find_lost

            lost = await find_lost(client, topic, partition, next_offset)
            if lost is None:
                raise
            for offset in [offset for offset in unchecked if lost.start <= offset < lost.end]:
                findings.append(Finding(unchecked.pop(offset), "the disk of the broker lost it", MISSING))
            continue
        records: dict[int, Record] = {record.offset: record for record in decode_records(bytes(response.records))}
        reached = max(records, default=next_offset)
        for offset in [offset for offset in unchecked if offset <= reached]:
            finding = _compare(unchecked.pop(offset), records.get(offset))
            if finding is not None:
                findings.append(finding)
    return findings


def _within(expected: dict[int, StoredReceipt], bounds: OffsetRange) -> tuple[dict[int, StoredReceipt], list[Finding]]:
    """Divide receipts into those that the log may hold, and findings about the others."""
    findings = []
    for offset, receipt in expected.items():
        if offset < bounds.start:
            findings.append(Finding(receipt, "retention has deleted it", EXPIRED))
        elif offset >= bounds.end:
            findings.append(Finding(receipt, f"the log ends before it, at offset {bounds.end}", MISSING))
    return {offset: receipt for offset, receipt in expected.items() if bounds.start <= offset < bounds.end}, findings


async def _bounds(client: Client, topic: str, partition: int) -> OffsetRange:
    earliest = (await client.list_offsets(topic, {partition: _EARLIEST}))[partition].offset
    latest = (await client.list_offsets(topic, {partition: _LATEST}))[partition].offset
    return OffsetRange(earliest, latest)


def _compare(receipt: StoredReceipt, record: Record | None) -> Finding | None:
    if record is None:
        return Finding(receipt, "the log has no message there", MISSING)
    stored_id = message_id(receipt.topic_id, receipt.partition, receipt.offset, record.headers)
    if stored_id != receipt.id:
        return Finding(receipt, f"the log has message {stored_id!r} there", CHANGED)
    if digest_of(record.value) != receipt.digest:
        return Finding(receipt, "the log has another value there", CHANGED)
    return None
