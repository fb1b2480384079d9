"""The claim of a pipeline: one runner at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from millstream.client.admin.groups import describe_group
from millstream.client.admin.pipelines import PipelineClient
from millstream.core.errors import GroupNotEmpty, InvalidGroupId, UnknownGroup
from millstream.pipelines.runtime import claim as claim_module
from millstream.pipelines.runtime.claim import DRIVER_INSTANCE, Claim
from millstream.pipelines.source.link import Link
from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

HANG_S = 60.0


@pytest.fixture(scope="module")
def link(server: Server) -> Iterator[Link]:
    made = Link(server.kafka, "the-first", 30.0)
    yield made
    made.close()


@pytest.fixture(scope="module")
def other_link(server: Server) -> Iterator[Link]:
    made = Link(server.kafka, "the-second", 30.0)
    yield made
    made.close()


def test_the_group_shows_the_runner_and_refuses_others(link: Link, other_link: Link, topic: str) -> None:
    claim = Claim(link, topic)
    claim.take()
    assert claim.is_held
    assert claim.is_confirmed
    group = link.call(describe_group(link.client, topic))
    assert [member.client_id for member in group.members] == ["the-first"]
    assert claim.member().member_id == group.members[0].member_id
    assert claim.member().generation >= 1

    with pytest.raises(
        GroupNotEmpty, match=r"'the-first' at 127\.0\.0\.1, .* killed remains its member for up to 10 s"
    ):
        Claim(other_link, topic).take()
    with pytest.raises(GroupNotEmpty, match="the-first"):
        Claim(other_link, topic, instance_id=DRIVER_INSTANCE).take()

    claim.leave()
    second = Claim(other_link, topic, instance_id=DRIVER_INSTANCE)
    second.take()
    with pytest.raises(GroupNotEmpty, match="the-second"):
        claim.take()
    second.leave()


def test_a_restarted_driver_replaces_the_previous_one(
    link: Link, other_link: Link, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_module, "BEAT_S", 0.1)
    lost = threading.Event()
    before = Claim(link, topic, instance_id=DRIVER_INSTANCE, on_lost=lost.set)
    before.take()
    after = Claim(other_link, topic, instance_id=DRIVER_INSTANCE)
    after.take()
    assert lost.wait(HANG_S)
    assert not before.is_held
    before.leave()
    group = link.call(describe_group(link.client, topic))
    assert [member.member_id for member in group.members] == [after.member().member_id]
    after.leave()


def test_of_two_concurrent_claims_one_succeeds(
    link: Link, other_link: Link, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_module, "BEAT_S", 0.1)
    claims = [Claim(link, topic), Claim(other_link, topic)]
    refused: list[GroupNotEmpty] = []

    def take(claim: Claim) -> None:
        try:
            claim.take()
        except GroupNotEmpty as error:
            refused.append(error)

    threads = [threading.Thread(target=take, args=(claim,)) for claim in claims]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert sorted(claim.is_held for claim in claims) == [False, True]
    assert len(refused) == 1
    held = next(claim for claim in claims if claim.is_held)
    group = link.call(describe_group(link.client, topic))
    assert [member.member_id for member in group.members] == [held.member().member_id]
    held.leave()


def test_the_runner_stays_when_another_joins_the_group_directly(
    link: Link, other_link: Link, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_module, "BEAT_S", 0.1)
    claim = Claim(link, topic)
    claim.take()
    generation = claim.member().generation
    intruder = Claim(other_link, topic)
    with pytest.raises(GroupNotEmpty):
        other_link.call(intruder._join_alone())
    # It joins again with its next heartbeat.
    wait_until(lambda: claim.member().generation > generation)
    assert claim.is_held
    claim.leave()


def test_the_group_of_a_running_pipeline_is_deleted_with_its_declaration(link: Link, topic: str) -> None:
    pipelines = PipelineClient(link.client)
    group = f"pipeline-{topic}"
    link.call(pipelines.create(topic, "land", {"topics": topic}, is_enabled=False))
    claim = Claim(link, group, instance_id=DRIVER_INSTANCE)
    claim.take()
    claim.leave()
    # A stopped pipeline keeps its position.
    assert link.call(describe_group(link.client, group)).members == ()
    claim.take()
    link.call(pipelines.delete(topic))
    with pytest.raises(GroupNotEmpty, match="is still running"):
        link.call(pipelines.create(topic, "land", {"topics": topic}))
    claim.leave()
    with pytest.raises(UnknownGroup):
        link.call(describe_group(link.client, group))
    # An undeclared pipeline continues where it ended.
    by_hand = Claim(link, group)
    by_hand.take()
    by_hand.leave()
    assert link.call(describe_group(link.client, group)).protocol_type == "pipeline"


def test_consumers_and_pipelines_do_not_affect_each_others_groups(
    link: Link, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipelines = PipelineClient(link.client)
    monkeypatch.setattr(claim_module, "GROUP_TYPE", "consumer")
    consumer = Claim(link, f"pipeline-{topic}")
    consumer.take()
    consumer.leave()
    with pytest.raises(GroupNotEmpty, match="is used by consumers and has offsets; choose another name"):
        link.call(pipelines.create(topic, "land", {"topics": topic}))
    link.call(pipelines.create(f"{topic}-2", "land", {"topics": topic}, is_enabled=False))
    with pytest.raises(InvalidGroupId):
        Claim(link, f"pipeline-{topic}-2").take()
    link.call(pipelines.delete(f"{topic}-2"))
