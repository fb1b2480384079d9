"""The list of aborted transactions: what readers get, and the cost of storing it and looking it up."""

from __future__ import annotations

import sys
from array import array
from itertools import combinations
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.log import transactions
from millstream.broker.log.transactions import AbortedTransaction, AbortedTransactions

MANY = 1_000_000
OFFSETS = 24
BYTES_MAX = 40
"""For each: four numbers of 8 bytes, an eighth more while the arrays grow, and the blocks."""


class Counted(AbortedTransactions):
    """Counts the entries that are visited."""

    looks = 0

    def _transaction_at(self, at: int) -> AbortedTransaction:
        self.looks += 1
        return super()._transaction_at(at)


def one_after_the_other(count: int) -> Counted:
    """Transactions of two offsets each: a record and its marker; the last ones are added one by one."""
    aborted = Counted()
    known = count - 10_000
    numbers = ([7] * known, range(0, 2 * known, 2), range(1, 2 * known, 2), range(2, 2 * known + 2, 2))
    aborted.unpack([array("q", column).tobytes() for column in numbers])
    for number in range(known, count):
        aborted.add(AbortedTransaction(7, 2 * number, 2 * number + 1, 2 * number + 2))
    return aborted


def test_a_million_transactions_need_little_memory_and_are_found_quickly() -> None:
    aborted = one_after_the_other(MANY)
    assert sum(map(sys.getsizeof, (*aborted._columns(), aborted._lowest))) < MANY * BYTES_MAX
    for first in (0, 2 * 777_777, 2 * MANY - 10):
        assert [transaction.first_offset for transaction in aborted.overlapping(first, first + 5)] == [
            first,
            first + 2,
            first + 4,
        ]
    assert aborted.looks == 9

    aborted.cut_before(2 * MANY - 20)
    assert len(aborted) == 10
    assert aborted.overlapping(0, 2 * MANY)[0].first_offset == 2 * MANY - 20


def test_a_reader_is_not_slowed_by_transactions_aborted_while_another_was_open() -> None:
    aborted = Counted()
    count = 100_000
    for number in range(count):
        aborted.add(AbortedTransaction(1, 10 + 2 * number, 11 + 2 * number, 5))
    aborted.add(AbortedTransaction(2, 5, 10 + 2 * count, 11 + 2 * count))
    assert [transaction.producer_id for transaction in aborted.overlapping(6, 13)] == [1, 1, 2]
    assert aborted.looks == 3


@st.composite
def histories(draw: st.DrawFn) -> list[AbortedTransaction]:
    """Transactions of a few producers as in a log; all of them are aborted."""
    open_since: dict[int, int] = {}
    transaction_list: list[AbortedTransaction] = []
    for offset in range(draw(st.integers(1, OFFSETS))):
        producer = draw(st.integers(1, 3))
        if producer not in open_since:
            open_since[producer] = offset
        elif draw(st.booleans()):
            first = open_since.pop(producer)
            stable = min(open_since.values(), default=offset + 1)
            transaction_list.append(AbortedTransaction(producer, first, offset, stable))
    return transaction_list


@given(histories(), st.integers(0, OFFSETS), st.data())
def test_it_agrees_with_a_plain_list(history: list[AbortedTransaction], cut: int, data: st.DataObject) -> None:
    with patch.object(transactions, "_BLOCK", 2):
        aborted = AbortedTransactions()
        for transaction in history:
            aborted.add(transaction)
        gone = (
            data.draw(st.sets(st.sampled_from([transaction.marker_offset for transaction in history])))
            if history
            else set()
        )
        aborted.discard(gone)
        aborted.cut_before(cut)
        copy = AbortedTransactions()
        copy.unpack(aborted.pack())
        remaining = [
            transaction
            for transaction in history
            if transaction.marker_offset not in gone and transaction.marker_offset >= cut
        ]
        assert list(aborted) == list(copy) == remaining
        for first, after in combinations(range(OFFSETS + 1), 2):
            expected = [
                transaction
                for transaction in remaining
                if transaction.first_offset < after and transaction.marker_offset >= first
            ]
            assert aborted.overlapping(first, after) == copy.overlapping(first, after) == expected


def test_a_lost_marker_does_not_hide_earlier_transactions() -> None:
    aborted = AbortedTransactions()
    aborted.add(AbortedTransaction(1, 10, 11, 12))
    aborted.add(AbortedTransaction(1, 12, 13, 14))
    # It was open all the time, which was unknown when the first ones were recorded.
    aborted.add(AbortedTransaction(2, 3, 20, 3))
    assert [transaction.producer_id for transaction in aborted.overlapping(4, 6)] == [2]
    assert [transaction.producer_id for transaction in aborted.overlapping(4, 11)] == [1, 2]
