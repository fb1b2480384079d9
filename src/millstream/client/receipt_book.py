"""A file of receipts: what was acknowledged to this program, kept to be held against the log later.

Every line is JSON: the id of a message, where it lies, and a digest of its value. A publisher that keeps such a book
can show, without trusting the broker, that everything that was acknowledged is stored, once and unchanged:

    async with millstream.connect("localhost:9092", receipts="receipts.jsonl") as ms:
        await ms.publish("orders", {"order_id": 1})
    ...
    findings = await millstream.check_receipts("localhost:9092", "receipts.jsonl")

A line is written when the acknowledgement has come and before the publisher hears of it. A crash of the program may
leave a line torn: of that message the publisher has not heard, and it is left out when the book is read. What the
machine had not written when its power failed may be missing. The book grows until it is moved away: it is the
publisher's own, and opened again each time.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, Final, Self

import msgspec

from millstream.client.receipt import Receipt
from millstream.core.errors import InvalidRequest, OffsetOutOfRange
from millstream.core.ids import OffsetRange
from millstream.protocol.records.record import Record, decode_records
from millstream.protocol.wire.client import Client

_logger = logging.getLogger(__name__)

_DIGEST_BYTES: Final = 16
_FETCH_BYTES: Final = 1024 * 1024
_LATEST, _EARLIEST = -1, -2


class Kept(msgspec.Struct, frozen=True, array_like=False):
    """One line of the book."""

    id: str
    topic: str
    topic_id: str
    partition: int
    offset: int
    timestamp_ms: int
    digest: str


class Finding(msgspec.Struct, frozen=True):
    """A message that the log does not hold as the book says."""

    kept: Kept
    problem: str

    def __str__(self) -> str:
        return f"{self.kept.id} at {self.kept.topic}-{self.kept.partition}@{self.kept.offset}: {self.problem}"


def digest_of(value: bytes | None) -> str:
    """Return the digest of a value; None for a message without one."""
    return "" if value is None else hashlib.blake2b(value, digest_size=_DIGEST_BYTES).hexdigest()


class ReceiptBook:
    """Appends receipts to a book."""

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
                # The last run was cut off within a line, which must not spoil the next one.
                self._file.write(b"\n")
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def keep(self, receipts: Sequence[Receipt], values: Sequence[bytes | None]) -> None:
        """Record acknowledged messages."""
        if self._file is None:
            raise InvalidRequest("the book of receipts is closed")
        lines = [
            self._encoder.encode(
                Kept(
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
        ]
        self._file.write(b"".join(line + b"\n" for line in lines))


def read_book(path: str | Path) -> Iterator[Kept]:
    """Yield the receipts of a book; lines torn by a crash are skipped with a warning."""
    decoder = msgspec.json.Decoder(Kept)
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield decoder.decode(line)
            except msgspec.MsgspecError as error:
                _logger.warning("line %d of %s is not a receipt and is skipped: %s", number, path, error)


async def check_receipts(brokers: str, path: str | Path) -> list[Finding]:
    """Check a book against the log: return every message that is missing or differs."""
    async with Client.connect(brokers) as client:
        return await check_book(client, path)


async def check_book(client: Client, path: str | Path) -> list[Finding]:
    """Check a book against the log through a client."""
    by_partition: dict[tuple[str, int], dict[int, Kept]] = {}
    findings: list[Finding] = []
    for kept in read_book(path):
        known = by_partition.setdefault((kept.topic, kept.partition), {})
        if kept.offset in known and known[kept.offset] != kept:
            findings.append(Finding(kept, f"the book has {known[kept.offset].id} at the same place"))
        known[kept.offset] = kept
    for (topic, partition), expected in sorted(by_partition.items()):
        findings += await _check_partition(client, topic, partition, expected)
    return findings


async def _check_partition(client: Client, topic: str, partition: int, expected: dict[int, Kept]) -> list[Finding]:
    findings: list[Finding] = []
    left = dict(sorted(expected.items()))
    while left:
        wanted = next(iter(left))
        try:
            answer = await client.fetch(topic, partition, wanted, max_bytes=_FETCH_BYTES, max_wait_ms=0)
        except OffsetOutOfRange:
            start, end = await _bounds(client, topic, partition)
            gone = [offset for offset in left if not start <= offset < end]
            reason = "retention has deleted it, or the topic was recreated"
            findings += [Finding(left.pop(offset), reason) for offset in gone]
            continue
        found: dict[int, Record] = {record.offset: record for record in decode_records(bytes(answer.records))}
        reached = max(found, default=wanted)
        for offset in [offset for offset in left if offset <= reached]:
            problem = _difference(left[offset], found.get(offset))
            if problem is not None:
                findings.append(Finding(left[offset], problem))
            del left[offset]
    return findings


async def _bounds(client: Client, topic: str, partition: int) -> OffsetRange:
    """Return the readable offsets of a partition, which a rejected fetch may not report."""
    earliest = (await client.list_offsets(topic, {partition: _EARLIEST}))[partition].offset
    latest = (await client.list_offsets(topic, {partition: _LATEST}))[partition].offset
    return OffsetRange(earliest, latest)


def _difference(kept: Kept, record: Record | None) -> str | None:
    if record is None:
        return "the log has no message there"
    if digest_of(record.value) != kept.digest:
        return "the log has another value there"
    return None
