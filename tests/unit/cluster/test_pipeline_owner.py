"""Which node runs the pipelines: one at a time, and another when it dies."""

from __future__ import annotations

from pathlib import Path

from millstream.broker.cluster import keys
from millstream.broker.cluster.store import Put
from millstream.broker.pipelines.owner import PipelineOwner
from millstream_testing.node_group import NodeGroup


def owners(candidates: dict[int, PipelineOwner]) -> list[int]:
    return [number for number, candidate in candidates.items() if candidate.is_this_node]


async def test_one_node_owns_the_pipelines_and_another_takes_over_when_it_dies(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        candidates = {number: node.cluster.pipeline_owner(is_candidate=True) for number, node in group.nodes.items()}
        reported: list[int] = []
        for number, candidate in candidates.items():
            candidate.on_change(lambda number=number: reported.append(number))  # type: ignore[misc]
        await group.until(lambda: len(owners(candidates)) == 1)
        (first,) = owners(candidates)
        others = [candidate for number, candidate in candidates.items() if number != first]
        await group.until(lambda: all(other.is_elsewhere for other in others))
        assert not candidates[first].is_elsewhere
        assert first in reported

        await group[first].kill()
        remaining = {number: candidate for number, candidate in candidates.items() if number != first}
        await group.until(lambda: len(owners(remaining)) == 1)
        (second,) = owners(remaining)
        assert second in reported


async def test_a_node_that_resigns_leaves_the_role_to_another_for_good(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path, nodes=2) as group:
        candidates = {number: node.cluster.pipeline_owner(is_candidate=True) for number, node in group.nodes.items()}
        await group.until(lambda: len(owners(candidates)) == 1)
        (first,) = owners(candidates)
        second = 3 - first
        await candidates[first].resign()
        await group.until(lambda: candidates[second].is_this_node and candidates[first].is_elsewhere)
        await candidates[second].resign()
        await group.until(lambda: not group.service.read(keys.PIPELINES_OWNER).entries)
        assert owners(candidates) == []
        await candidates[first].resign()


async def test_a_claim_left_by_an_earlier_run_is_taken_over(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path, nodes=1) as group:
        await group[1]._store.change([Put(keys.PIPELINES_OWNER, "1")])  # type: ignore[union-attr]
        candidate = group[1].cluster.pipeline_owner(is_candidate=True)
        await group.until(lambda: candidate.is_this_node)
        # The claim was deleted: it is made again, as a new owner.
        await group[1]._store.change([Put(keys.PIPELINES_OWNER, "7")])  # type: ignore[union-attr]
        await group.until(lambda: candidate.is_elsewhere)


async def test_a_node_that_can_run_pipelines_later_becomes_a_candidate_then(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path, nodes=2) as group:
        first, second = (node.cluster.pipeline_owner(is_candidate=False) for node in group.nodes.values())
        second.become_candidate()
        await group.until(lambda: second.is_this_node and first.is_elsewhere)
