"""How a class without `await` stands on one with it: each method is named once, and its signature is the original's.

    class SyncConnection(Facade[Connection]):
        publish = blocking(Connection.publish)

A type checker sees `publish` with the parameters and the result of `Connection.publish`, and so does `help`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import AbstractAsyncContextManager
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast, overload

from millstream.client.loop_thread import LoopThread

A = TypeVar("A")
P = ParamSpec("P")
T = TypeVar("T")
W = TypeVar("W", bound="Facade[Any]")


class Facade(Generic[A]):
    """Something asynchronous, and the thread that its methods run in."""

    __slots__ = ("_thread", "_wrapped")

    def __init__(self, wrapped: A, thread: LoopThread) -> None:
        self._wrapped = wrapped
        self._thread = thread

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._wrapped!r}>"


class _Delegate(Generic[A, P, T]):
    """A method that is another class's, called in the thread."""

    def __init__(self, method: Callable[..., Any], call: Callable[..., T]) -> None:
        self.__doc__ = method.__doc__
        self.__wrapped__ = method
        self._call = call

    @overload
    def __get__(self, facade: None, owner: type) -> _Delegate[A, P, T]: ...

    @overload
    def __get__(self, facade: Facade[A], owner: type) -> Callable[P, T]: ...

    def __get__(self, facade: Facade[A] | None, owner: type) -> _Delegate[A, P, T] | Callable[P, T]:
        return self if facade is None else cast("Callable[P, T]", MethodType(self._call, facade))


def blocking(method: Callable[Concatenate[A, P], Coroutine[Any, Any, T]]) -> _Delegate[A, P, T]:
    """Call a coroutine method and wait for its result."""

    @functools.wraps(method)
    def call(facade: Facade[A], *args: P.args, **kwargs: P.kwargs) -> T:
        return facade._thread.call(method(facade._wrapped, *args, **kwargs))

    return _Delegate(method, call)


def wrapping(
    method: Callable[Concatenate[A, P], Coroutine[Any, Any, Any]], facade_class: type[W]
) -> _Delegate[A, P, W]:
    """Call a coroutine method, and wrap what it returns as well."""

    @functools.wraps(method)
    def call(facade: Facade[A], *args: P.args, **kwargs: P.kwargs) -> W:
        return facade_class(facade._thread.call(method(facade._wrapped, *args, **kwargs)), facade._thread)

    return _Delegate(method, call)


class Iteration(Generic[W]):
    """An asynchronous iterator gone through without `await`; as a context manager it begins and ends with the block."""

    def __init__(self, thread: LoopThread, items: AsyncIterator[Any], facade_class: type[W]) -> None:
        self._thread = thread
        self._items = items
        self._each = _each(thread, items, facade_class)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> W:
        return next(self._each)

    def __enter__(self) -> Self:
        if isinstance(self._items, AbstractAsyncContextManager):
            self._thread.call(_entered(self._items))
        return self

    def __exit__(self, *exception: object) -> None:
        self._each.close()
        if isinstance(self._items, AbstractAsyncContextManager):
            self._thread.call(_left(self._items))

    def close(self) -> None:
        """End the iteration; what was got of it may still be settled."""
        self._each.close()


def iterating(
    method: Callable[Concatenate[A, P], AsyncIterator[Any]], facade_class: type[W]
) -> _Delegate[A, P, Iteration[W]]:
    """Go through the asynchronous iterator that a method returns, and wrap each of its items."""

    @functools.wraps(method)
    def call(facade: Facade[A], *args: P.args, **kwargs: P.kwargs) -> Iteration[W]:
        thread = facade._thread
        return Iteration(thread, thread.call(_called(method, facade._wrapped, *args, **kwargs)), facade_class)

    return _Delegate(method, call)


def _each(thread: LoopThread, items: AsyncIterator[Any], facade_class: type[W]) -> Generator[W, None, None]:
    each = thread.each(items)
    try:
        for item in each:
            yield facade_class(item, thread)
    finally:
        each.close()


async def _entered(items: AbstractAsyncContextManager[Any]) -> None:
    await items.__aenter__()


async def _left(items: AbstractAsyncContextManager[Any]) -> None:
    await items.__aexit__(None, None, None)


async def _called(method: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call a plain method on the loop, where it may look for the loop that runs."""
    found = method(*args, **kwargs)
    return await found if inspect.isawaitable(found) else found
