from __future__ import annotations

import asyncio
from collections.abc import Hashable

import pytest

from millstream.broker.coordination.runtime import Runtime, StateTopic
from millstream.broker.coordination.state_machine import Outcome, StateRecord, Timers
from millstream.core.errors import NotCoordinator, NotLeader
from millstream.core.ids import PartitionIndex
from millstream_testing.clock import ManualClock
from millstream_testing.state_log import MemoryTopics


class Names:
    def __init__(self, timers: Timers) -> None:
        self.names: list[bytes] = []

    def replay(self, record: StateRecord) -> None:
        self.names.append(record.key)

    def loaded(self) -> None:
        pass

    def unload(self) -> None:
        pass

    def durable_keys(self) -> list[Hashable]:
        return []

    def durable_record(self, key: Hashable) -> StateRecord | None:
        return None

    def note(self, name: str) -> Outcome[int]:
        return [StateRecord(name.encode(), b"")], len(self.names) + 1


def runtime_on(topics: MemoryTopics) -> Runtime[Names]:
    topic = StateTopic(name="__names", partitions=4, overrides={"cleanup.policy": "compact"})
    return Runtime(topics, topic, Names, clock=ManualClock())


async def test_the_topic_is_created_once_on_first_use() -> None:
    topics = MemoryTopics()
    runtime = runtime_on(topics)
    await runtime.start()
    assert topics.get("__names") is None

    responses = await asyncio.gather(*(runtime.run(f"n{number}", lambda s: s.note("x")) for number in range(20)))

    topic = topics.get("__names")
    assert topic is not None
    assert topic.partitions == 4
    assert topic.overrides == {"cleanup.policy": "compact"}
    assert len(responses) == 20
    await runtime.close()


async def test_the_state_of_a_name_is_found_after_a_restart() -> None:
    topics = MemoryTopics()
    runtime = runtime_on(topics)
    for number in range(20):
        name = f"n{number}"
        await runtime.run(name, lambda state, name=name: state.note(name))  # type: ignore[misc]
    await runtime.close()

    restarted = runtime_on(topics.after_crash())
    await restarted.start()
    await restarted.wait_loaded()

    for number in range(20):
        state = restarted.shard_of(f"n{number}").state
        assert state is not None
        assert f"n{number}".encode() in state.names
    await restarted.close()


async def test_the_partition_count_is_that_of_the_topic_not_the_config() -> None:
    topics = MemoryTopics()
    topics.add("__names", partitions=7)
    runtime = runtime_on(topics)
    await runtime.start()

    assert len(runtime.shards) == 7
    await runtime.close()


async def test_a_resigned_shard_refuses_operations_until_it_leads_again() -> None:
    topics = MemoryTopics()
    runtime = runtime_on(topics)
    await runtime.ensure()
    await runtime.resign(runtime.partition_of("me"))

    with pytest.raises(NotCoordinator):
        await runtime.run("me", lambda state: state.note("me"))

    topic = topics.get("__names")
    assert topic is not None
    index = runtime.partition_of("me")
    runtime.lead(index, topics.partitions_of(topic)[index])
    await runtime.wait_loaded()
    assert await runtime.run("me", lambda state: state.note("me")) == 1
    await runtime.close()


async def test_a_shard_that_lost_its_leadership_is_reopened_when_this_node_leads_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    topics = MemoryTopics()
    topics.add("__names", partitions=4)
    runtime = runtime_on(topics)
    index = PartitionIndex(0)
    partition = topics.partitions_of(topics.all()[0])[index]

    async def not_settled() -> None:
        raise NotLeader("another node leads")

    with monkeypatch.context() as patch:
        patch.setattr(partition, "settled", not_settled)
        await runtime.start()
        await runtime.wait_loaded()
    assert runtime.shard_at(index).is_closed

    runtime.lead(index, partition)
    await runtime.wait_loaded()
    assert runtime.shard_at(index).state is not None
    await runtime.close()


async def test_after_closing_nothing_is_served_or_created() -> None:
    topics = MemoryTopics()
    runtime = runtime_on(topics)
    await runtime.close()

    with pytest.raises(NotCoordinator):
        await runtime.run("me", lambda state: state.note("me"))
    assert topics.get("__names") is None
    runtime.lead(PartitionIndex(0), topics.partitions_of(topics.add("__names", partitions=1))[0])
    assert runtime.shards == []
