"""The shard with a small state machine: a dictionary of texts, and at most one parked request per key."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable

import pytest

from millstream.broker.coordination.shard import Shard
from millstream.broker.coordination.state_machine import Confirmation, Deferred, Outcome, StateRecord, Timers
from millstream.core.errors import (
    BatchTooLarge,
    CoordinatorLoading,
    CoordinatorUnavailable,
    InvalidRequest,
    NotCoordinator,
    NotLeader,
    PartitionClosed,
    StorageFailure,
)
from millstream.core.ids import Offset
from millstream_testing.clock import ManualClock
from millstream_testing.state_log import MemoryPartition


class Texts:
    def __init__(self, timers: Timers) -> None:
        self.timers = timers
        self.texts: dict[bytes, bytes] = {}
        self.parked: dict[bytes, Deferred[bytes]] = {}
        self.loads = 0
        self.replayed = 0

    def replay(self, record: StateRecord) -> None:
        self.replayed += 1
        if record.key == b"bad":
            raise InvalidRequest("cannot be read")
        if record.key == b"broken":
            raise RuntimeError("a defect")
        if record.value is None:
            self.texts.pop(record.key, None)
        else:
            self.texts[record.key] = record.value

    def loaded(self) -> None:
        self.loads += 1

    def unload(self) -> None:
        for later in self.parked.values():
            later.refuse(NotCoordinator("unloaded"))

    def durable_keys(self) -> list[Hashable]:
        return list(self.texts)

    def durable_record(self, key: Hashable) -> StateRecord | None:
        assert isinstance(key, bytes)
        return StateRecord(key, self.texts[key]) if key in self.texts else None


def put(key: bytes, value: bytes | None) -> Callable[[Texts], Outcome[str]]:
    return lambda state: ([StateRecord(key, value)], "kept")


def get(key: bytes) -> Callable[[Texts], Outcome[bytes | None]]:
    return lambda state: ([], state.texts.get(key))


def park(key: bytes) -> Callable[[Texts], Outcome[bytes]]:
    def operation(state: Texts) -> Outcome[bytes]:
        state.parked[key] = Deferred()
        return [], state.parked[key]

    return operation


def resolve(key: bytes) -> Callable[[Texts], Outcome[str]]:
    def operation(state: Texts) -> Outcome[str]:
        state.parked.pop(key).resolve(state.texts.get(key, b""))
        return [], "completed"

    return operation


async def opened(
    partition: MemoryPartition, clock: ManualClock | None = None, retention: KeepFrom | None = None, **options: int
) -> Shard[Texts]:
    shard = Shard(
        "texts-0",
        partition,
        Texts,
        clock=clock or ManualClock(),
        load_slot=asyncio.Semaphore(1),
        retry_first_s=0.0,
        rewrite_records_min=options.get("rewrite_records_min", 1_000_000),
        retention=retention,
    )
    shard.open()
    await shard.wait_loaded()
    return shard


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_response_is_sent_as_soon_as_the_log_acknowledges() -> None:
    """Turns of a busy loop are long, so a response must not wait for an extra one."""
    partition = MemoryPartition(acknowledges=False)
    shard = await opened(partition)
    write, read = shard.submit(put(b"a", b"1")), shard.submit(get(b"a"))
    assert (write.done(), read.done()) == (False, False)
    partition.acknowledge()
    assert (write.result(), read.result()) == ("kept", b"1")


async def test_an_operation_is_durable_and_gets_a_response() -> None:
    partition = MemoryPartition()
    shard = await opened(partition)

    assert await shard.run(put(b"a", b"1")) == "kept"
    assert await shard.run(get(b"a")) == b"1"

    restarted = await opened(partition.after_crash())
    assert await restarted.run(get(b"a")) == b"1"


async def test_a_response_waits_for_its_append() -> None:
    partition = MemoryPartition(acknowledges=False)
    shard = await opened(partition)
    write = shard.submit(put(b"a", b"1"))
    await settle()
    assert not write.done()

    partition.acknowledge()

    assert await write == "kept"


async def test_a_read_of_an_unacknowledged_write_waits_for_it() -> None:
    partition = MemoryPartition(acknowledges=False)
    shard = await opened(partition)
    before = shard.submit(get(b"a"))
    write = shard.submit(put(b"a", b"1"))
    after = shard.submit(get(b"a"))
    await settle()
    assert before.done()
    assert not write.done()
    assert not after.done()

    partition.acknowledge()

    assert await after == b"1"


async def test_a_refusal_based_on_an_unacknowledged_write_waits_for_it() -> None:
    partition = MemoryPartition(acknowledges=False)
    shard = await opened(partition)
    shard.submit(put(b"a", b"1"))

    def refuse(state: Texts) -> Outcome[None]:
        raise InvalidRequest("there is one already")

    refused = shard.submit(refuse)
    await settle()
    assert not refused.done()

    partition.acknowledge()

    with pytest.raises(InvalidRequest):
        await refused


async def test_responses_are_sent_in_log_order() -> None:
    partition = MemoryPartition(acknowledges=False)
    shard = await opened(partition)
    futures = [shard.submit(put(b"a", str(number).encode())) for number in range(4)]

    partition.acknowledge(2)
    await settle()

    assert [future.done() for future in futures] == [True, True, False, False]


async def test_a_parked_request_is_completed_by_a_later_operation_once_that_is_durable() -> None:
    partition = MemoryPartition(acknowledges=False)
    shard = await opened(partition)
    parked = shard.submit(park(b"a"))
    shard.submit(put(b"a", b"1"))
    shard.submit(resolve(b"a"))
    await settle()
    assert not parked.done()

    partition.acknowledge()

    assert await parked == b"1"


async def test_requests_wait_briefly_while_loading_and_then_must_be_retried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    partition = MemoryPartition()
    first = await opened(partition)
    await first.run(put(b"a", b"1"))
    gate = asyncio.Semaphore(0)
    shard = Shard("texts-0", partition, Texts, clock=ManualClock(), load_slot=gate)
    shard.open()

    monkeypatch.setattr("millstream.broker.coordination.shard.LOAD_WAIT_S", 0.001)
    with pytest.raises(CoordinatorLoading):
        await shard.run(get(b"a"))

    monkeypatch.setattr("millstream.broker.coordination.shard.LOAD_WAIT_S", 60.0)
    asking = asyncio.create_task(shard.run(get(b"a")))
    await asyncio.sleep(0)
    gate.release()
    assert await asking == b"1"


async def test_loading_yields_to_the_loop() -> None:
    partition = MemoryPartition()
    first = await opened(partition)
    for number in range(100):
        await first.run(put(str(number).encode(), b"x" * 3000))
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0)

    ticking = asyncio.create_task(tick())
    shard = await opened(partition)
    ticking.cancel()

    assert ticks > 4  # 300 KB in chunks of 64 KiB.
    assert shard.state is not None
    assert len(shard.state.texts) == 100


async def test_a_failed_acknowledgement_reverts_the_memory_state() -> None:
    partition = MemoryPartition(acknowledges=False)
    shard = await opened(partition)
    write = shard.submit(put(b"a", b"1"))
    partition.acknowledge()
    await write
    lost = shard.submit(put(b"a", b"2"))
    seen = shard.submit(get(b"a"))
    parked = shard.submit(park(b"b"))

    partition.fail(StorageFailure("the disk is gone"))
    await settle()

    for future in (lost, seen, parked):
        with pytest.raises(NotCoordinator):
            await future
    await shard.wait_loaded()
    assert await shard.run(get(b"a")) == b"1"


async def test_a_refused_append_of_a_pure_operation_does_not_reload() -> None:
    partition = MemoryPartition()
    shard = await opened(partition)
    partition.refusal = StorageFailure("the disk is full")
    parked = shard.submit(park(b"b"))

    with pytest.raises(NotCoordinator):
        await shard.run(put(b"a", b"1"), pure=True)

    assert await shard.run(get(b"a")) is None
    assert not parked.done()
    partition.refusal = BatchTooLarge("too large")
    with pytest.raises(BatchTooLarge):
        await shard.run(put(b"a", b"1"), pure=True)


async def test_a_refused_append_of_an_impure_operation_reloads() -> None:
    partition = MemoryPartition()
    shard = await opened(partition)
    await shard.run(put(b"a", b"1"))
    partition.refusal = StorageFailure("the disk is full")
    parked = shard.submit(park(b"b"))

    with pytest.raises(NotCoordinator):
        await shard.run(put(b"a", b"2"))
    with pytest.raises(NotCoordinator):
        await parked
    with pytest.raises(CoordinatorLoading):
        shard.submit(get(b"a"))

    partition.refusal = None
    await shard.wait_loaded()
    assert await shard.run(get(b"a")) == b"1"


async def test_a_reload_waits_for_appends_from_before_the_failure() -> None:
    partition = MemoryPartition(acknowledges=False)
    shard = await opened(partition)
    shard.submit(put(b"a", b"1"))
    partition.refusal = StorageFailure("the disk is full")
    failed = shard.submit(put(b"a", b"2"))
    with pytest.raises(NotCoordinator):
        await failed
    partition.refusal = None
    await settle()
    assert shard.state is None

    partition.acknowledge()
    await shard.wait_loaded()

    assert await shard.run(get(b"a")) == b"1"


async def test_an_exception_in_an_operation_reloads_the_state(caplog: pytest.LogCaptureFixture) -> None:
    shard = await opened(MemoryPartition())

    def broken(state: Texts) -> Outcome[None]:
        state.texts[b"a"] = b"half done"
        raise RuntimeError("a defect")

    with pytest.raises(CoordinatorUnavailable):
        await shard.run(broken)
    await shard.wait_loaded()
    assert "a defect" in caplog.text

    assert await shard.run(get(b"a")) is None


async def test_unreadable_records_are_skipped(caplog: pytest.LogCaptureFixture) -> None:
    partition = MemoryPartition()
    shard = await opened(partition)
    shard.append([StateRecord(b"bad", b"1"), StateRecord(b"good", b"2")])

    restarted = await opened(partition)

    assert await restarted.run(get(b"good")) == b"2"
    assert "skipped" in caplog.text


async def test_timers_are_operations_without_a_response() -> None:
    clock, partition = ManualClock(), MemoryPartition()
    shard = await opened(partition, clock)

    def later(state: Texts) -> Outcome[None]:
        state.timers.schedule("x", 100, lambda: [StateRecord(b"a", b"timer")])
        return [], None

    await shard.run(later)
    clock.advance_ms(100)
    shard.fire_timers()

    assert await shard.run(get(b"a")) == b"timer"
    assert await (await opened(partition.after_crash())).run(get(b"a")) == b"timer"


async def test_a_pure_timer_whose_append_is_refused_affects_nothing_else() -> None:
    clock, partition = ManualClock(), MemoryPartition()
    shard = await opened(partition, clock)
    parked = shard.submit(park(b"b"))

    def later(state: Texts) -> Outcome[None]:
        state.timers.schedule("x", 100, lambda: [StateRecord(b"a", b"timer")], pure=True)
        return [], None

    await shard.run(later)
    partition.refusal = StorageFailure("the disk is full")
    clock.advance_ms(100)
    shard.fire_timers()

    assert await shard.run(get(b"a")) is None
    assert not parked.done()
    await shard.close()


async def test_no_timer_fires_after_closing() -> None:
    clock, partition = ManualClock(), MemoryPartition(acknowledges=False)
    shard = await opened(partition, clock)

    def later(state: Texts) -> Outcome[None]:
        state.timers.schedule("x", 100, lambda: [StateRecord(b"a", b"timer")])
        return [StateRecord(b"b", b"1")], None

    shard.submit(later)
    closing = asyncio.create_task(shard.close())
    await settle()
    clock.advance_ms(100)
    shard.fire_timers()
    partition.acknowledge()
    await closing

    assert partition.end_offset == 1


async def test_a_record_appended_but_not_applied_is_read_back() -> None:
    partition = MemoryPartition()
    shard = await opened(partition)

    with pytest.raises(NotCoordinator):
        await shard.run(lambda _: ([StateRecord(b"a", b"1"), StateRecord(b"bad", b"1")], None), pure=True)
    await shard.wait_loaded()

    assert await shard.run(get(b"a")) == b"1"


async def test_the_loop_fires_timers_by_itself() -> None:
    shard = await opened(MemoryPartition())
    fired = asyncio.Event()

    def later(state: Texts) -> Outcome[None]:
        state.timers.schedule("x", 0, lambda: fired.set() or [])  # type: ignore[func-returns-value]
        return [], None

    await shard.run(later)

    await asyncio.wait_for(fired.wait(), 60)


async def test_an_exception_in_a_timer_reloads_the_state(caplog: pytest.LogCaptureFixture) -> None:
    clock, partition = ManualClock(), MemoryPartition()
    shard = await opened(partition, clock)
    await shard.run(put(b"a", b"1"))

    def later(state: Texts) -> Outcome[None]:
        state.timers.schedule("x", 100, lambda: [StateRecord(b"broken", b"")])
        state.timers.schedule("y", 100, lambda: [StateRecord(b"never", b"")])
        return [], None

    await shard.run(later)
    clock.advance_ms(100)
    shard.fire_timers()
    assert shard.state is None
    await shard.wait_loaded()

    assert await shard.run(get(b"a")) == b"1"
    assert caplog.text.count("a defect") >= 2
    await shard.close()


async def test_closing_refuses_parked_requests_and_waits_for_appends() -> None:
    partition = MemoryPartition(acknowledges=False)
    shard = await opened(partition)
    parked = shard.submit(park(b"b"))
    write = shard.submit(put(b"a", b"1"))
    closing = asyncio.create_task(shard.close())
    await settle()
    assert not closing.done()

    partition.acknowledge()
    await closing

    assert await write == "kept"
    with pytest.raises(NotCoordinator):
        await parked
    with pytest.raises(NotCoordinator):
        await shard.run(get(b"a"))


async def test_closing_while_loading() -> None:
    partition = MemoryPartition()
    first = await opened(partition)
    await first.run(put(b"a", b"1"))
    shard = Shard("texts-0", partition, Texts, clock=ManualClock(), load_slot=asyncio.Semaphore(1))
    shard.open()

    await shard.close()

    assert shard.state is None


async def test_a_disconnected_client_affects_nothing_else() -> None:
    partition = MemoryPartition(acknowledges=False)
    shard = await opened(partition)
    gone = shard.submit(put(b"a", b"1"))
    write = shard.submit(put(b"b", b"2"))
    gone.cancel()

    partition.acknowledge()

    assert await write == "kept"


async def test_loading_a_closed_partition_gives_up() -> None:
    class Closed(MemoryPartition):
        def read(self, offset: object, *, max_bytes: int) -> bytes:
            raise PartitionClosed("stopping")

    partition = Closed()
    shard = await opened(partition)
    await shard.run(put(b"a", b"1"))
    restarted = await opened(partition)

    with pytest.raises(NotCoordinator):
        await restarted.run(get(b"a"))


async def test_a_log_full_of_superseded_records_is_rewritten() -> None:
    partition = MemoryPartition()
    shard = await opened(partition, rewrite_records_min=100)
    await shard.run(put(b"stays", b"1"))
    await shard.run(put(b"goes", b"1"))
    await shard.run(put(b"goes", None))
    for number in range(200):
        await shard.run(put(b"busy", str(number).encode()))
    await settle()

    assert partition.log_start > 90
    restarted = await opened(partition.after_crash())
    assert restarted.state is not None
    assert restarted.state.texts == {b"stays": b"1", b"busy": b"199"}


class KeepFrom:
    """A retention floor that keeps the log from an offset on."""

    def __init__(self, offset: int) -> None:
        self.offset = offset

    def keep_from(self, _state: Texts, _partition: object, rewritten: Offset) -> tuple[Offset, list[StateRecord]]:
        keep_from_offset = min(Offset(self.offset), rewritten)
        return keep_from_offset, [StateRecord(b"noted", b"kept")]


async def test_superseded_records_may_be_kept_but_are_not_loaded() -> None:
    partition = MemoryPartition()
    shard = await opened(partition, rewrite_records_min=100, retention=KeepFrom(5))
    await shard.run(put(b"stays", b"1"))
    for number in range(120):
        await shard.run(put(b"busy", str(number).encode()))
    await settle()

    assert partition.log_start == 5
    await shard.run(put(b"busy", b"last"))
    left = partition.after_crash()
    restarted = await opened(left, rewrite_records_min=100, retention=KeepFrom(60))
    assert restarted.state is not None
    assert restarted.state.texts == {b"stays": b"1", b"busy": b"last", b"noted": b"kept"}
    assert restarted.state.replayed < 40
    for number in range(100):
        await restarted.run(put(b"busy", str(number).encode()))
    await settle()
    assert left.log_start == 60
    # Without the header, as after damage at the end of the log, all remaining records are read.
    plain = await opened(left.after_crash())
    assert plain.state is not None
    assert plain.state.texts[b"busy"] == b"99"
    assert plain.state.replayed > restarted.state.replayed - 100


async def test_a_log_of_live_records_is_not_rewritten() -> None:
    partition = MemoryPartition()
    shard = await opened(partition, rewrite_records_min=100)
    for number in range(300):
        await shard.run(put(str(number).encode(), b"1"))
    await settle()

    assert partition.log_start == 0


async def test_a_failed_rewrite_leaves_the_log_unchanged(caplog: pytest.LogCaptureFixture) -> None:
    partition = MemoryPartition(acknowledges=False)
    shard = await opened(partition, rewrite_records_min=100)
    for number in range(100):
        shard.submit(put(b"busy", str(number).encode()))
    partition.acknowledge()
    partition.refusal = StorageFailure("the disk is full")
    await settle()

    assert partition.log_start == 0
    assert await shard.run(get(b"busy")) == b"99"
    assert "could not be rewritten" in caplog.text
    await shard.close()


async def test_closing_during_a_rewrite() -> None:
    partition = MemoryPartition(acknowledges=False)
    shard = await opened(partition, rewrite_records_min=100)
    for number in range(100):
        shard.submit(put(b"busy", str(number).encode()))
    await settle()
    closing = asyncio.create_task(shard.close())
    await settle()
    partition.acknowledge()
    await closing

    restarted = await opened(partition.after_crash())
    assert restarted.state is not None
    assert restarted.state.texts == {b"busy": b"99"}


async def test_only_a_shard_that_can_still_write_sends_a_final_refusal() -> None:
    def refuse(state: Texts) -> Outcome[str]:
        raise InvalidRequest("over")

    def reject_operation(state: Texts) -> Outcome[str]:
        raise BatchTooLarge("try something smaller")

    partition = MemoryPartition(acknowledges=False)
    shard = Shard(
        "texts-0",
        partition,
        Texts,
        clock=ManualClock(),
        load_slot=asyncio.Semaphore(1),
        retry_first_s=0.0,
        confirmation=Confirmation((InvalidRequest,), StateRecord(b"nobody", None)),
    )
    shard.open()
    await shard.wait_loaded()
    with pytest.raises(BatchTooLarge):
        await shard.run(reject_operation, pure=True)
    refused = shard.submit(refuse, pure=True)
    await settle()
    assert not refused.done()
    partition.acknowledge()
    with pytest.raises(InvalidRequest, match="over"):
        await refused
    replaced = shard.submit(refuse, pure=True)
    partition.fail(NotLeader("another node leads"))
    with pytest.raises(NotCoordinator):
        await replaced
    await shard.close()
