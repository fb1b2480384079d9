from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator

import pytest

from millstream.client.connection import Connection
from millstream.client.loop_thread import LoopThread
from millstream.client.message import Message
from millstream.client.message_stream import MessageStream
from millstream.client.subscriber import Subscriber
from millstream.client.sync_connection import (
    SyncConnection,
    SyncFacade,
    SyncMessage,
    SyncMessageStream,
    SyncSubscriber,
    blocking,
    wrapping,
)


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

    def cover(self) -> Page:
        """Return a page, on the loop."""
        asyncio.get_running_loop()
        return Page(0)


class SyncPage(SyncFacade[Page]):
    read = blocking(Page.read)


class SyncBook(SyncFacade[Book]):
    length = blocking(Book.length)
    open = wrapping(Book.open, SyncPage)
    cover = wrapping(Book.cover, SyncPage)


@pytest.fixture
def book() -> Iterator[SyncBook]:
    thread = LoopThread()
    yield SyncBook(Book(), thread)
    thread.close()


def test_methods_block_until_their_result(book: SyncBook) -> None:
    assert book.length() == 3
    assert book.length(doubled=True) == 6
    assert book.open(2).read() == 2


def test_plain_methods_run_on_the_loop(book: SyncBook) -> None:
    assert book.cover().read() == 0


def test_the_signature_is_that_of_the_original(book: SyncBook) -> None:
    assert str(inspect.signature(book.length)) == "(*, doubled: 'bool' = False) -> 'int'"
    assert book.length.__doc__ == SyncBook.length.__doc__ == Book.length.__doc__


_NOT_OFFERED = {
    Connection: {"publisher"},  # asynchronous itself
    Message: set(),
    MessageStream: {"aclose"},  # `close` of the facade
    Subscriber: {"start"},  # `subscribe` starts it
}


@pytest.mark.parametrize(
    ("original", "facade"),
    [
        (Connection, SyncConnection),
        (Message, SyncMessage),
        (MessageStream, SyncMessageStream),
        (Subscriber, SyncSubscriber),
    ],
)
def test_the_synchronous_api_has_every_public_method(original: type, facade: type) -> None:
    offered = {name for name in {*dir(facade), *inspect.get_annotations(facade)} if not name.startswith("_")}
    public = {name for name in dir(original) if not name.startswith("_")}
    assert public - offered == _NOT_OFFERED[original]
    for name in public & set(dir(facade)):
        method = getattr(original, name)
        if inspect.isfunction(method):
            own = inspect.getattr_static(facade, name)
            mirrored = inspect.signature(getattr(own, "__wrapped__", own))
            assert [*mirrored.parameters] == [*inspect.signature(method).parameters], name
