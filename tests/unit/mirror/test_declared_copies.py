"""Schemas and access rules of a source, copied through a real catalog: which are deleted here, and which stay."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import event

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.mirror.declared import Mirrors
from millstream.broker.mirror.declared_copies import ABSENT_TIMES, DeclaredCopies
from millstream.broker.schemas.registry import SchemaExaminer, SchemaRegistry
from millstream.broker.security.state import SecurityState
from millstream.core.acl import Acl, AclFilter, Operation, PatternType, Permission, ResourceType
from millstream.core.clock import SystemClock
from millstream.core.errors import NotCoordinator
from millstream.core.schema import QualifiedSubject
from millstream.protocol.private.mirror_messages import RegistryRequest, RegistryResponse, SettingsMessage
from millstream.protocol.private.schema_messages import SchemaMessage

NAME = "paris"


def rule(name: str) -> Acl:
    return Acl(
        resource_type=ResourceType.TOPIC,
        resource_name=name,
        pattern=PatternType.LITERAL,
        principal="User:ann",
        operation=Operation.READ,
        permission=Permission.DENY,
    )


OLD, NEW, OURS = rule("old"), rule("new"), rule("ours")


def page(last: int, *numbers: int, has_more: bool = False) -> RegistryResponse:
    schemas = [
        SchemaMessage(id=number, guid="", schema_type="AVRO", schema='"int"', subject="orders", version=number)
        for number in numbers
    ]
    return RegistryResponse(last=last, schemas=schemas, has_more=has_more)


class Node:
    """A node of the target that is the controller, and the responses of its source."""

    def __init__(self, catalog: Catalog, examiner: SchemaExaminer) -> None:
        declarations = CatalogDeclarations(catalog)
        self.security = SecurityState(declarations, ())
        self.registry = SchemaRegistry(declarations, examiner=examiner)
        self.mirrors = Mirrors(declarations, SystemClock(), new_id=lambda: UUID(int=1))
        self.asked: list[tuple[int, int]] = []

    async def start(self, cluster_id: str = "a cluster in paris") -> None:
        """Load everything as a node does, and connect to the source."""
        await self.security.load()
        await self.mirrors.load()
        mirror = self.mirrors.get(NAME) or await self.mirrors.create(NAME, {"from": "paris:9092", "acls": "true"})
        service = SimpleNamespace(schemas=self.registry, rules=self.security, mirrors=self.mirrors)
        run: Any = SimpleNamespace(service=service, mirror=mirror, notes={})
        source: Any = SimpleNamespace(cluster_id=cluster_id)
        self.run, self.source = run, source
        self.copies = DeclaredCopies(run, source)

    async def see_acls(self, *responses: set[Acl]) -> frozenset[Acl]:
        remaining = list(responses)

        async def acls() -> set[Acl]:
            return remaining.pop(0)

        self.source.acls = acls
        for _ in responses:
            await self.copies.sync_acls()
        return await self.acls()

    async def acls(self) -> frozenset[Acl]:
        await self.security.load()
        return self.security.snapshot.acls

    async def see_schemas(self, *responses: RegistryResponse) -> set[int]:
        remaining = list(responses)

        async def ask(_node: Any, request: RegistryRequest, **_: Any) -> RegistryResponse:
            self.asked.append((request.since, request.offset))
            response = remaining.pop(0)
            return RegistryResponse(last=response.last) if response.last == request.since else response

        self.source.ask = ask
        while remaining:
            await self.copies.sync_schemas()
        return {version.version for subject in self.registry.subjects() for version in self.registry.versions(subject)}


class Target:
    """A cluster: nodes that share a catalog."""

    def __init__(self, folder: Path) -> None:
        self.catalog = Catalog.open_folder(folder)
        self.examiner = SchemaExaminer()

    async def controller(self, cluster_id: str = "a cluster in paris") -> Node:
        """Start another node as the controller, or the same one again: it has nothing in memory."""
        node = Node(self.catalog, self.examiner)
        await node.start(cluster_id)
        return node


@pytest.fixture
async def target(tmp_path: Path) -> AsyncIterator[Target]:
    made = Target(tmp_path)
    yield made
    await made.examiner.close()
    made.catalog.close()


@pytest.fixture
async def node(target: Target) -> Node:
    return await target.controller()


NONE = [set[Acl]()] * ABSENT_TIMES


async def test_a_rule_is_deleted_after_missing_several_times_in_a_row(node: Node) -> None:
    assert await node.see_acls({OLD, NEW}, {OLD}) == {OLD, NEW}
    assert await node.see_acls({OLD, NEW}, *[{OLD}] * (ABSENT_TIMES - 1)) == {OLD, NEW}
    assert await node.see_acls({OLD}) == {OLD}
    assert not node.run.notes


async def test_a_rule_declared_here_is_kept(node: Node) -> None:
    await node.see_acls({OLD})
    await node.security.add_acls([OURS])
    assert await node.see_acls(*NONE) == {OURS}
    assert "topic:ours" in node.run.notes["acls"]
    assert "topic:old" not in node.run.notes["acls"]


async def test_a_rule_revoked_while_the_controller_restarts_is_deleted(target: Target, node: Node) -> None:
    await node.see_acls({OLD, NEW})
    restarted = await target.controller()
    assert await restarted.see_acls(*[{NEW}] * (ABSENT_TIMES - 1)) == {OLD, NEW}
    assert not restarted.run.notes
    assert await restarted.see_acls({NEW}) == {NEW}


async def test_a_former_controller_deletes_no_rule_declared_since(target: Target, node: Node) -> None:
    await node.see_acls({OLD}, *[set[Acl]()] * (ABSENT_TIMES - 1))
    other = await target.controller()
    assert await other.see_acls(*NONE) == set()
    await other.security.add_acls([OLD])
    # The former one has missed the rule often enough to delete it.
    with pytest.raises(NotCoordinator):
        await node.see_acls(set())
    assert await node.acls() == {OLD}
    assert await node.see_acls(*NONE) == {OLD}
    assert "topic:old" in node.run.notes["acls"]
    # It is the controller again; the other one finds that out with its next change.
    with pytest.raises(NotCoordinator):
        await other.see_acls({NEW})


async def test_a_rule_deleted_and_redeclared_here_is_kept_after_a_restart(target: Target, node: Node) -> None:
    assert await node.see_acls({OLD}, *NONE) == set()
    await node.security.add_acls([OLD])
    restarted = await target.controller()
    assert await restarted.see_acls(*NONE) == {OLD}


async def test_the_rules_of_another_source_are_kept(target: Target, node: Node) -> None:
    await node.see_acls({OLD})
    moved = await target.controller("another cluster at the same address")
    assert await moved.see_acls(*NONE) == {OLD}
    assert "delete those that were deleted at the source" in moved.run.notes["acls"]


async def test_a_deleted_mirror_leaves_no_sightings(target: Target, node: Node) -> None:
    await node.see_acls({OLD})
    await node.mirrors.delete(NAME)
    again = await target.controller()
    assert await again.see_acls(*NONE) == {OLD}


async def test_every_change_locks_the_mirror_before_its_sightings(target: Target, node: Node) -> None:
    statements: list[str] = []

    def note(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if "mirror" in statement:
            statements.append(statement)

    async def claim() -> None:
        await node.mirrors.claim_sightings(node.run.mirror, source="another", owner="node-1")

    event.listen(target.catalog._engine, "before_cursor_execute", note)
    for change in (lambda: node.see_acls({OLD}), claim, lambda: node.mirrors.delete(NAME)):
        statements.clear()
        await change()
        locking = [
            statement for statement in statements if "mirror_sightings" in statement or "FROM mirrors" in statement
        ]
        assert locking[0].startswith("SELECT"), statements
        assert "FROM mirrors" in locking[0], statements


async def test_an_older_registry_is_not_followed(node: Node) -> None:
    assert await node.see_schemas(page(18, 1, 2), *[page(17, 1)] * (ABSENT_TIMES + 1)) == {1, 2}
    assert "before 18" in node.run.notes["schemas behind"]
    assert await node.see_schemas(page(18)) == {1, 2}
    assert not node.run.notes


async def test_a_version_is_deleted_after_missing_several_times_in_a_row(node: Node) -> None:
    assert await node.see_schemas(page(18, 1, 2), *[page(19, 1)] * (ABSENT_TIMES - 1)) == {1, 2}
    assert not node.run.notes
    assert await node.see_schemas(page(19, 1)) == {1}
    await node.see_schemas(page(19))
    assert node.asked[-1] == (19, 0)


async def test_a_version_deleted_while_the_controller_restarts_is_deleted_here(target: Target, node: Node) -> None:
    await node.see_schemas(page(18, 1, 2))
    restarted = await target.controller()
    assert await restarted.see_schemas(*[page(19, 1)] * ABSENT_TIMES) == {1}
    assert not restarted.run.notes


async def test_settings_reset_at_the_source_are_reset_here_and_local_ones_stay(node: Node) -> None:
    def registry_response(last: int, *subjects: str) -> RegistryResponse:
        return RegistryResponse(
            last=last, settings=[SettingsMessage(subject=subject, config={}, mode="READONLY") for subject in subjects]
        )

    def held() -> list[str]:
        return [str(setting.subject) for setting in node.registry.all_settings()]

    await node.see_schemas(registry_response(18, "kept", "reset"))
    await node.registry.set_mode(QualifiedSubject.parse("ours"), "IMPORT")
    await node.see_schemas(*[registry_response(19, "kept")] * (ABSENT_TIMES - 1))
    assert held() == ["kept", "ours", "reset"]
    await node.see_schemas(registry_response(19, "kept"))
    assert held() == ["kept", "ours"]


async def test_pages_of_two_states_of_the_registry_are_not_combined(node: Node) -> None:
    await node.see_schemas(page(18, 1, 2, 3))
    # A deletion of version 1 shifts version 3 to the first page.
    looks = [page(19, 1, 2, has_more=True), page(20), page(20, 2, 3, has_more=True), page(20, 4)]
    assert await node.see_schemas(*looks) == {1, 2, 3, 4}
    assert node.asked[1:] == [(18, 0), (18, 2), (18, 0), (18, 2)]
    assert await node.see_schemas(*[page(20, 2, 3, 4)] * (ABSENT_TIMES - 1)) == {2, 3, 4}


async def test_copied_rules_deleted_here_by_hand_are_restored(node: Node) -> None:
    await node.see_acls({OLD})
    await node.security.delete_acls(AclFilter())
    assert await node.see_acls({OLD}) == {OLD}
