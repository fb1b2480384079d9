"""The contract of coordination stores, checked for each back end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing

import pytest

from millstream.broker.cluster.store import CHANGES_MAX, Change, CoordinationStore, Delete, Event, Expect, Put
from millstream.core.errors import StoreRefused

OpenStore = Callable[[], CoordinationStore]

LONG_S = 60.0


async def take(batches: AsyncIterator[Sequence[Event]], count: int) -> list[Event]:
    events: list[Event] = []
    while len(events) < count:
        events.extend(await anext(batches))
    return events


async def test_a_new_store_is_empty(store: CoordinationStore) -> None:
    snapshot = await store.read("")
    assert snapshot.entries == {}
    assert snapshot.revision >= 1
    assert store.available
    assert store.unavailable_since_ms is None


async def test_a_put_value_is_read_with_its_revisions(store: CoordinationStore) -> None:
    first = await store.change([Put("a/1", "one"), Put("b/1", "other")])
    second = await store.change([Put("a/1", "zwei – deux")])
    assert first is not None
    assert second is not None
    snapshot = await store.read("a/")
    assert list(snapshot.entries) == ["a/1"]
    entry = snapshot.entries["a/1"]
    assert (entry.value, entry.revision, entry.created) == ("zwei – deux", second, first)
    assert snapshot.revision >= second > first


async def test_a_deleted_key_is_gone_and_can_be_recreated(store: CoordinationStore) -> None:
    await store.change([Put("a", "1")])
    await store.change([Delete("a")])
    assert (await store.read("a")).entries == {}
    again = await store.change([Put("a", "2")], [Expect("a", 0)])
    assert again is not None
    assert (await store.read("a")).entries["a"].created == again


async def test_a_conditional_change_is_applied_once(store: CoordinationStore) -> None:
    revision = await store.change([Put("a", "1")], [Expect("a", 0)])
    assert revision is not None
    assert await store.change([Put("a", "2")], [Expect("a", 0)]) is None
    assert await store.change([Put("a", "2")], [Expect("a", revision)]) is not None
    assert await store.change([Put("a", "3")], [Expect("a", revision)]) is None
    assert (await store.read("a")).entries["a"].value == "2"


async def test_one_failed_condition_prevents_every_change(store: CoordinationStore) -> None:
    revision = await store.change([Put("a", "1")])
    assert revision is not None
    changes: list[Change] = [Put("a", "2"), Put("b", "2"), Delete("c")]
    assert await store.change(changes, [Expect("a", revision), Expect("b", 7)]) is None
    assert {key: entry.value for key, entry in (await store.read("")).entries.items()} == {"a": "1"}


async def test_all_changes_of_a_transaction_share_a_revision(store: CoordinationStore) -> None:
    keys = [f"key/{number:03}" for number in range(CHANGES_MAX)]
    revision = await store.change([Put(key, "x") for key in keys], [Expect(key, 0) for key in keys])
    snapshot = await store.read("key/")
    assert list(snapshot.entries) == keys
    assert {entry.revision for entry in snapshot.entries.values()} == {revision}


async def test_invalid_calls_are_refused(store: CoordinationStore) -> None:
    with pytest.raises(ValueError, match="65 changes"):
        await store.change([Put(str(number), "x") for number in range(CHANGES_MAX + 1)])
    with pytest.raises(ValueError, match="at most once"):
        await store.change([Put("a", "x"), Delete("a")])


async def test_more_keys_than_a_page_are_read(store: CoordinationStore) -> None:
    keys = [f"key/{number:05}" for number in range(35 * CHANGES_MAX)]
    for start in range(0, len(keys), CHANGES_MAX):
        await store.change([Put(key, key) for key in keys[start : start + CHANGES_MAX]])
    snapshot = await store.read("key/")
    assert list(snapshot.entries) == keys
    assert all(entry.value == key for key, entry in snapshot.entries.items())


async def test_of_concurrent_conditional_changes_one_succeeds(open_store: OpenStore) -> None:
    stores = [open_store() for _ in range(4)]
    results = await asyncio.gather(
        *(
            store.change([Put("controller", str(number))], [Expect("controller", 0)])
            for number, store in enumerate(stores)
        )
    )
    won = [number for number, revision in enumerate(results) if revision is not None]
    assert len(won) == 1
    assert (await stores[0].read("controller")).entries["controller"].value == str(won[0])


async def test_a_watch_reports_changes_after_a_snapshot(open_store: OpenStore) -> None:
    watcher, writer = open_store(), open_store()
    await writer.change([Put("a/1", "before")])
    snapshot = await watcher.read("a/")
    missed = await writer.change([Put("a/1", "missed"), Put("a/2", "too")])
    async with aclosing(watcher.watch("a/", after=snapshot.revision)) as batches:
        first = list(await anext(batches))
        assert first == [Event("a/1", "missed", missed or 0), Event("a/2", "too", missed or 0)]
        await writer.change([Put("b/1", "elsewhere")])
        gone = await writer.change([Delete("a/1")])
        assert await take(batches, 1) == [Event("a/1", None, gone or 0)]


async def test_deleting_a_missing_key_notifies_no_watch(store: CoordinationStore) -> None:
    revision = (await store.read("")).revision
    async with aclosing(store.watch("", after=revision)) as batches:
        assert await store.change([Delete("nothing")]) is not None
        put = await store.change([Put("a", "1")])
        assert await take(batches, 1) == [Event("a", "1", put or 0)]


async def test_two_watches_see_the_same_changes_in_order(open_store: OpenStore) -> None:
    stores = [open_store() for _ in range(3)]
    revision = (await stores[0].read("")).revision
    async with (
        aclosing(stores[0].watch("k", after=revision)) as watch,
        aclosing(stores[1].watch("k", after=revision)) as two,
    ):
        written = [await stores[2].change([Put("k", str(number))]) for number in range(50)]
        expected = [Event("k", str(number), revision or 0) for number, revision in enumerate(written)]
        assert await take(watch, 50) == expected
        assert await take(two, 50) == expected


async def test_a_watch_may_be_closed_at_any_time(store: CoordinationStore) -> None:
    async def listen() -> None:
        async with aclosing(store.watch("", after=(await store.read("")).revision)) as batches:
            async for _ in batches:
                pass

    task = asyncio.create_task(listen())
    await store.change([Put("a", "1")])
    await store.read("")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_leased_keys_are_deleted_with_their_session(open_store: OpenStore) -> None:
    node, other = open_store(), open_store()
    session = await node.open_session(LONG_S, lambda: None)
    await node.change([Put("nodes/1", "here", leased=True), Put("kept", "x")])
    snapshot = await other.read("")
    assert set(snapshot.entries) == {"nodes/1", "kept"}
    async with aclosing(other.watch("nodes/", after=snapshot.revision)) as batches:
        await session.close()
        assert not session.live
        [gone] = await take(batches, 1)
        assert (gone.key, gone.value) == ("nodes/1", None)
    assert set((await other.read("")).entries) == {"kept"}


async def test_a_leased_key_needs_a_session(store: CoordinationStore) -> None:
    with pytest.raises(StoreRefused):
        await store.change([Put("nodes/1", "here", leased=True)])
    session = await store.open_session(LONG_S, lambda: None)
    with pytest.raises(StoreRefused):
        await store.open_session(LONG_S, lambda: None)
    await session.close()
    with pytest.raises(StoreRefused):
        await store.change([Put("nodes/1", "here", leased=True)])
    assert (await store.read("")).entries == {}


async def test_a_key_belongs_to_the_last_session_that_put_it(open_store: OpenStore) -> None:
    node = open_store()
    first = await node.open_session(LONG_S, lambda: None)
    await node.change([Put("nodes/1", "first", leased=True), Put("nodes/2", "free", leased=True)])
    await node.change([Put("nodes/2", "free now")])
    successor = open_store()
    await successor.open_session(LONG_S, lambda: None)
    await successor.change([Put("nodes/1", "second", leased=True)])
    await first.close()
    values = {key: entry.value for key, entry in (await node.read("")).entries.items()}
    assert values == {"nodes/1": "second", "nodes/2": "free now"}


async def test_closing_the_store_ends_its_session(open_store: OpenStore) -> None:
    node, other = open_store(), open_store()
    await node.open_session(LONG_S, lambda: None)
    await node.change([Put("nodes/1", "here", leased=True)])
    await node.close()
    assert (await other.read("")).entries == {}
