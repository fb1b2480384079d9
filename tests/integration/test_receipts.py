"""The receipts of a publisher are checked against the log, also after a kill and a loss."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

import millstream
from millstream.client.receipt_book import Finding, read_book
from millstream_testing.command import CommandLine
from millstream_testing.server import Server


def _found(findings: list[Finding]) -> list[tuple[int, str]]:
    return [(finding.receipt.offset, finding.kind) for finding in findings]


async def test_a_book_reports_messages_that_the_log_has_lost(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    server, book = start_server(), tmp_path / "receipts.jsonl"
    async with millstream.connect(server.kafka, receipts=book) as ms:
        await ms.publish("orders", {"order_id": 0})
        await ms.publish_many("orders", [{"order_id": number} for number in range(1, 20)])
        await ms.publish("orders", b"named", id="named")
        await ms.publish("orders", b"named", id="named", deduplicate=True)
    server.restart(clean=False)
    receipts = list(read_book(book))
    assert [receipt.offset for receipt in receipts] == [*range(21), 20]
    assert receipts[-1] == receipts[-2]
    assert await millstream.check_receipts(server.kafka, book) == []

    admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
    (deleted,) = admin.delete_records([TopicPartition("orders", 0, 3)]).values()
    deleted.result(60)
    text = book.read_text().replace(receipts[7].digest, "0" * 32).replace('"id":"named"', '"id":"other"')
    book.write_text(text)
    findings = await millstream.check_receipts(server.kafka, book)
    assert _found(findings) == [(0, "expired"), (1, "expired"), (2, "expired"), (7, "changed"), (20, "changed")]
    assert "another value" in findings[3].problem
    assert "'named'" in findings[4].problem
    assert [finding.is_fault for finding in findings] == [False, False, False, True, True]

    # A recreated topic has other messages at these offsets.
    async with millstream.connect(server.kafka) as ms:
        (gone,) = admin.delete_topics(["orders"]).values()
        gone.result(60)
        await ms.publish("orders", {"order_id": 0})
    assert {receipt.kind for receipt in await millstream.check_receipts(server.kafka, book)} == {"recreated"}


async def _publish(server: Server, book: Path, numbers: range) -> None:
    async with millstream.connect(server.kafka, receipts=book) as ms:
        for number in numbers:
            await ms.publish("orders", {"order_id": number})


def test_an_audit_names_acknowledged_messages_that_are_lost(
    start_server: Callable[..., Server], tmp_path: Path
) -> None:
    server, book, backup = start_server(), tmp_path / "receipts.jsonl", tmp_path / "backup"
    command = CommandLine(server.kafka)
    audit = ("audit", "--receipts", book, "--lake", tmp_path / "lake", "--json")
    asyncio.run(_publish(server, book, range(3)))
    assert command("subscription", "create", "billing", "--topic", "orders", "--ledger", "--start", "start").code == 0
    report = command.process(*audit[:-1])
    assert (report.code, report.lines[-2]) == (0, "3 receipts checked; 0 do not match the log."), report
    server.stop()
    shutil.copytree(server.data, backup)
    server.start()
    asyncio.run(_publish(server, book, range(3, 5)))
    # An old copy of the disk is restored.
    server.stop()
    shutil.rmtree(server.data)
    shutil.copytree(backup, server.data)
    server.start()
    report = command.process(*audit)
    assert (report.code, report.document["adds_up"], report.document["receipts_checked"]) == (1, False, 5)
    assert [(receipt["offset"], receipt["kind"]) for receipt in report.document["receipts"]] == [
        (3, "missing"),
        (4, "missing"),
    ]
