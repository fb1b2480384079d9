"""What was acknowledged to a publisher that keeps a book is held against the log, also through a kill."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

import millstream
from millstream.client.receipt_book import read_book
from millstream_testing.server import Server


async def test_a_book_reports_what_the_log_has_lost(start_server: Callable[..., Server], tmp_path: Path) -> None:
    server, book = start_server(), tmp_path / "receipts.jsonl"
    async with millstream.connect(server.kafka, receipts=book) as ms:
        await ms.publish("orders", {"order_id": 0})
        await ms.publish_many("orders", [{"order_id": number} for number in range(1, 20)])
        await ms.publish("orders", b"named", id="named")
        await ms.publish("orders", b"named", id="named", deduplicate=True)
    server.restart(clean=False)
    kept = list(read_book(book))
    assert [one.offset for one in kept] == [*range(21), 20]
    assert kept[-1] == kept[-2]
    assert await millstream.check_receipts(server.kafka, book) == []

    admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
    (deleted,) = admin.delete_records([TopicPartition("orders", 0, 3)]).values()
    deleted.result(60)
    book.write_bytes(book.read_bytes().replace(kept[7].digest.encode(), b"0" * 32))
    findings = await millstream.check_receipts(server.kafka, book)
    assert [(one.kept.offset, one.problem.partition(",")[0]) for one in findings] == [
        (0, "retention has deleted it"),
        (1, "retention has deleted it"),
        (2, "retention has deleted it"),
        (7, "the log has another value there"),
    ]
