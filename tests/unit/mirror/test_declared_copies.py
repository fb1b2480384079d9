"""What one answer of a source lacks is not deleted: the node that gave it may be behind."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest

from millstream.broker.mirror.declared_copies import ABSENT_TIMES, DeclaredCopies
from millstream.broker.mirror.service import MirrorService
from millstream.core.acl import Acl, AclFilter, Operation, Permission, ResourceType
from millstream.protocol.private.mirror_messages import RegistryRequest, RegistryResponse
from millstream.protocol.private.schema_messages import SchemaMessage


def rule(name: str) -> Acl:
    return Acl(
        resource_type=ResourceType.TOPIC,
        resource_name=name,
        principal="User:ann",
        operation=Operation.READ,
        permission=Permission.DENY,
    )


def page(last: int, *numbers: int, has_more: bool = False) -> RegistryResponse:
    schemas = [
        SchemaMessage(id=number, guid="", schema_type="AVRO", schema='"int"', subject="orders", version=number)
        for number in numbers
    ]
    return RegistryResponse(last=last, schemas=schemas, has_more=has_more)


class Security:
    def __init__(self) -> None:
        self.snapshot = SimpleNamespace(acls=frozenset[Acl]())

    async def add_acls(self, acls: frozenset[Acl]) -> None:
        self.snapshot.acls |= acls

    async def delete_acls(self, selected: AclFilter) -> None:
        self.snapshot.acls = frozenset(acl for acl in self.snapshot.acls if not selected.matches(acl))


class Registry:
    def __init__(self) -> None:
        self.versions: set[tuple[Any, int]] = set()

    async def follow(self, _schemas: Any, versions: Any, _settings: Any, *, seen: Any) -> list[tuple[Any, int]]:
        wanted = {(one.subject, one.version) for one in versions}
        only_here = self.versions - wanted
        self.versions = wanted | (only_here - set(seen))
        return sorted(only_here - set(seen), key=str)

    @property
    def numbers(self) -> set[int]:
        return {number for _, number in self.versions}


class Site:
    """A target, and the answers of its source."""

    def __init__(self) -> None:
        made: Any = MirrorService
        self.security, self.registry = Security(), Registry()
        membership = SimpleNamespace(me=SimpleNamespace(node_id=1), node=lambda _: None)
        service = made(None, membership, None, None, None, self.registry, self.security, None, None)
        self.run: Any = SimpleNamespace(service=service, mirror=SimpleNamespace(mirror_id=UUID(int=1)), notes={})
        self.asked: list[tuple[int, int]] = []
        self.connect()

    def connect(self, cluster_id: str = "paris") -> None:
        source: Any = SimpleNamespace(cluster_id=cluster_id)
        self.source = source
        self.copies = DeclaredCopies(self.run, source)

    def see_acls(self, *answers: set[Acl]) -> frozenset[Acl]:
        left = list(answers)

        async def acls() -> set[Acl]:
            return left.pop(0)

        async def work() -> None:
            for _ in answers:
                await self.copies.sync_acls()

        self.source.acls = acls
        asyncio.run(work())
        found: frozenset[Acl] = self.security.snapshot.acls
        return found

    def see_schemas(self, *answers: RegistryResponse) -> set[int]:
        left = list(answers)

        async def ask(_node: Any, _key: Any, request: RegistryRequest, *_: Any, **__: Any) -> RegistryResponse:
            self.asked.append((request.since, request.offset))
            answer = left.pop(0)
            return RegistryResponse(last=answer.last) if answer.last == request.since else answer

        async def work() -> None:
            while left:
                await self.copies.sync_schemas()

        self.source.ask = ask
        asyncio.run(work())
        return self.registry.numbers


@pytest.fixture
def site() -> Site:
    return Site()


def test_a_rule_is_deleted_when_it_is_missing_several_times_in_a_row(site: Site) -> None:
    old, new = rule("old"), rule("new")
    assert site.see_acls({old, new}, {old}) == {old, new}
    assert site.see_acls({old, new}, *[{old}] * (ABSENT_TIMES - 1)) == {old, new}
    assert site.see_acls({old}) == {old}
    assert not site.run.notes


def test_a_rule_that_is_declared_here_stays(site: Site) -> None:
    site.see_acls({rule("old")})
    site.security.snapshot.acls |= {rule("ours")}
    assert site.see_acls(*[set[Acl]()] * ABSENT_TIMES) == {rule("ours")}
    assert "topic:ours" in site.run.notes["acls"]
    assert "topic:old" not in site.run.notes["acls"]


def test_a_rule_that_is_removed_while_the_line_is_down_is_deleted_afterwards(site: Site) -> None:
    site.see_acls({rule("old")})
    site.connect()
    assert site.see_acls(*[set[Acl]()] * ABSENT_TIMES) == set()


def test_the_rules_of_another_source_are_kept(site: Site) -> None:
    site.see_acls({rule("old")})
    site.connect("another cluster at the same address")
    assert site.see_acls(*[set[Acl]()] * ABSENT_TIMES) == {rule("old")}
    assert "delete by hand" in site.run.notes["acls"]


def test_an_older_registry_is_not_followed(site: Site) -> None:
    assert site.see_schemas(page(18, 1, 2), *[page(17, 1)] * (ABSENT_TIMES + 1)) == {1, 2}
    assert "before 18" in site.run.notes["schemas behind"]
    assert site.see_schemas(page(18)) == {1, 2}
    assert not site.run.notes


def test_a_version_is_deleted_when_it_is_missing_several_times_in_a_row(site: Site) -> None:
    assert site.see_schemas(page(18, 1, 2), *[page(19, 1)] * (ABSENT_TIMES - 1)) == {1, 2}
    assert not site.run.notes
    assert site.see_schemas(page(19, 1)) == {1}
    site.see_schemas(page(19))
    assert site.asked[-1] == (19, 0)


def test_pages_of_two_states_of_the_registry_are_not_combined(site: Site) -> None:
    site.see_schemas(page(18, 1, 2, 3))
    # A deletion of version 1 shifts version 3 to the first page.
    looks = [page(19, 1, 2, has_more=True), page(20), page(20, 2, 3, has_more=True), page(20, 4)]
    assert site.see_schemas(*looks) == {1, 2, 3, 4}
    assert site.asked[1:] == [(18, 0), (18, 2), (18, 0), (18, 2)]
    assert site.see_schemas(*[page(20, 2, 3, 4)] * (ABSENT_TIMES - 1)) == {2, 3, 4}
