from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Iterator

import pytest

from millstream.client.loop_thread import LoopThread
from millstream.client.sync_connection import Facade, blocking, iterating, wrapping


class Page:
    def __init__(self, number: int) -> None:
        self.number = number

    async def read(self) -> int:
        return self.number


class Book:
    async def length(self, *, doubled: bool = False) -> int:
        """How many pages."""
        return 6 if doubled else 3

    async def open(self, number: int) -> Page:
        return Page(number)

    def pages(self, first: int = 0) -> AsyncIterator[Page]:
        return self._pages(first)

    async def _pages(self, first: int) -> AsyncIterator[Page]:
        for number in range(first, 3):
            yield Page(number)


class SyncPage(Facade[Page]):
    read = blocking(Page.read)


class SyncBook(Facade[Book]):
    length = blocking(Book.length)
    open = wrapping(Book.open, SyncPage)
    pages = iterating(Book.pages, SyncPage)


@pytest.fixture
def book() -> Iterator[SyncBook]:
    thread = LoopThread()
    yield SyncBook(Book(), thread)
    thread.close()


def test_methods_block_until_their_result(book: SyncBook) -> None:
    assert book.length() == 3
    assert book.length(doubled=True) == 6
    assert book.open(2).read() == 2


def test_async_iterators_become_blocking_iterators(book: SyncBook) -> None:
    assert [page.read() for page in book.pages()] == [0, 1, 2]
    assert [page.read() for page in book.pages(first=2)] == [2]


def test_the_signature_is_that_of_the_original(book: SyncBook) -> None:
    assert str(inspect.signature(book.length)) == "(*, doubled: 'bool' = False) -> 'int'"
    assert book.length.__doc__ == SyncBook.length.__doc__ == Book.length.__doc__
