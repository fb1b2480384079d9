from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millstream.client.message import Receipt
from millstream.client.receipt_book import RECREATED, ReceiptBook, check_book, digest_of, read_book
from millstream.core.errors import InvalidRequest, NotAuthorized
from millstream.protocol.wire.client import Client


def receipt(offset: int) -> Receipt:
    return Receipt("orders", 0, offset, 1000 + offset, "topic-id")


def test_stored_receipts_are_read_back_and_a_book_is_continued(tmp_path: Path) -> None:
    path = tmp_path / "receipts.jsonl"
    for offset in range(3):
        with ReceiptBook(path) as book:
            book.keep([receipt(offset)], [b"value %d" % offset])
    receipts = list(read_book(path))
    assert [receipt.offset for receipt in receipts] == [0, 1, 2]
    assert receipts[1].id == "topic-id/0/1"
    assert receipts[1].digest == digest_of(b"value 1") != digest_of(b"value 2")
    assert digest_of(None) == ""


def test_a_line_torn_by_a_crash_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "receipts.jsonl"
    with ReceiptBook(path) as book:
        book.keep([receipt(0), receipt(1)], [b"a", None])
    path.write_bytes(path.read_bytes()[:-5])
    assert [receipt.offset for receipt in read_book(path)] == [0]
    with ReceiptBook(path) as book:
        book.keep([receipt(2)], [b"c"])
    assert [receipt.offset for receipt in read_book(path)] == [0, 2]
    assert "line 2" in caplog.text


def test_a_closed_book_refuses_receipts(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="closed"):
        ReceiptBook(tmp_path / "receipts.jsonl").keep([receipt(0)], [b"a"])


async def test_a_topic_without_describe_permission_is_not_taken_for_deleted(tmp_path: Path) -> None:
    path = tmp_path / "receipts.jsonl"
    with ReceiptBook(path) as book:
        book.keep([receipt(0)], [b"a"])

    class Responses:
        def __init__(self, code: int) -> None:
            self._code = code

        async def metadata(self, _topics: list[str]) -> Any:
            return SimpleNamespace(topics={}, errors={"orders": self._code})

    unknown_topic, topic_authorization_failed = 3, 29
    denied, gone = (Responses(code) for code in (topic_authorization_failed, unknown_topic))
    with pytest.raises(NotAuthorized, match="orders"):
        await check_book(cast("Client", denied), path)
    (finding,) = (await check_book(cast("Client", gone), path)).findings
    assert finding.kind == RECREATED
