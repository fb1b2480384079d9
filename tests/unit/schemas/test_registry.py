"""The registry of several nodes on one catalog, without HTTP: integrity, propagation, outages and limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

import pytest

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.catalog.schema_store import SchemaTransaction
from millstream.broker.cluster.declarations import CatalogDeclarations
from millstream.broker.schemas import registry as registry_module
from millstream.broker.schemas.registry import NewSchema, SchemaExaminer, SchemaRegistry
from millstream.core.child_pool import WORKERS_MAX, ChildPool
from millstream.core.errors import CatalogUnavailable, QuotaExceeded, SchemaRegistryError
from millstream.core.schema import (
    AVRO,
    JSON_SCHEMA,
    NUMBER_MAX,
    QualifiedSubject,
    RegistryCode,
    SchemaContent,
    SubjectVersion,
)
from millstream.protocol.schemas.formats import SchemaText

T = TypeVar("T")
NODES = 3
ORDERS = QualifiedSubject.parse("orders-value")


class Declarations(CatalogDeclarations):
    """A catalog that can be made unavailable."""

    is_away = False

    async def run(self, ask: Callable[[Catalog], T]) -> T:
        if self.is_away:
            raise CatalogUnavailable("the catalog is away")
        return await super().run(ask)


class Node:
    """A node's registry, with its own connection to the catalog."""

    def __init__(self, catalog: Catalog, examiner: SchemaExaminer) -> None:
        self.catalog = catalog
        self.declarations = Declarations(catalog)
        self.registry = SchemaRegistry(self.declarations, examiner=examiner)


def new(text: str, schema_type: str = AVRO) -> NewSchema:
    return NewSchema(content=SchemaContent(schema_type=schema_type, text=text))


def record(*fields: str, name: str = "R") -> NewSchema:
    described = ",".join(f'{{"name":"{field}","type":"int","default":0}}' for field in fields)
    return new(f'{{"type":"record","name":"{name}","fields":[{described}]}}')


# Whether SLOW accepts what BEFORE_SLOW accepts takes time exponential in the length of the name.
SLOW = new(
    '{"type":"object","patternProperties":{"^(?=(a+)+$)":{"type":"string"}},"additionalProperties":false}', JSON_SCHEMA
)
BEFORE_SLOW = new(
    f'{{"type":"object","properties":{{"{"a" * 40}b":{{"type":"string"}}}},"additionalProperties":false}}', JSON_SCHEMA
)


@pytest.fixture(params=["sqlite", "postgresql"])
async def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[list[Node]]:
    shared = request.param == "postgresql"
    url = request.getfixturevalue("postgres").new_database() if shared else ""
    examiner = SchemaExaminer()
    opened = [
        Node(Catalog.open_shared(url) if shared else Catalog.open_folder(tmp_path), examiner) for _ in range(NODES)
    ]
    try:
        yield opened
    finally:
        await examiner.close()
        for node in opened:
            node.catalog.close()


async def test_a_context_without_ids_left_refuses_new_schemas(nodes: list[Node]) -> None:
    registry = nodes[0].registry

    def use_up(transaction: SchemaTransaction) -> None:
        transaction.add_schema(".", new('"int"').content, schema_id=NUMBER_MAX - 1)

    await nodes[0].declarations.change(Catalog.change_schemas, 0, use_up, None)
    assert (await registry.register(ORDERS, new('"long"'))).schema_id == NUMBER_MAX
    with pytest.raises(SchemaRegistryError, match="no schema ids left"):
        await registry.register(ORDERS, new('"double"'))
    assert (await registry.register(QualifiedSubject.parse(":.other:orders"), new('"double"'))).schema_id == 1


async def test_concurrent_registrations_share_ids_and_lose_none(nodes: list[Node]) -> None:
    """Fifty clients register through three nodes, one of which is cut off in the middle."""

    async def register(number: int) -> SubjectVersion:
        node = nodes[number % NODES]
        return await node.registry.register(QualifiedSubject.parse(f"s{number % 10}"), record(f"f{number % 25}"))

    registering = [asyncio.ensure_future(register(number)) for number in range(50)]
    await registering[1]
    nodes[1].declarations.is_away = True
    outcomes = await asyncio.gather(*registering, return_exceptions=True)
    done = [outcome for outcome in outcomes if isinstance(outcome, SubjectVersion)]
    assert all(isinstance(outcome, SubjectVersion | CatalogUnavailable | SchemaRegistryError) for outcome in outcomes)
    assert len(done) >= 2 * 50 // NODES
    for node in (nodes[0], nodes[2]):
        await node.registry.load()
        for version in done:
            assert version in list(node.registry.versions(version.subject))
    registry = nodes[0].registry
    stored = [version for subject in registry.subjects() for version in registry.versions(subject)]
    guid_of = {version.schema_id: registry.schema_of(version).guid for version in stored}
    assert len(set(guid_of.values())) == len(guid_of)
    assert all(
        registry.versions(subject)[-1].version == len(registry.versions(subject)) for subject in registry.subjects()
    )


async def test_a_schema_registered_on_one_node_is_found_by_another_at_once(nodes: list[Node]) -> None:
    made = await nodes[0].registry.register(ORDERS, record("a"))
    assert (await nodes[1].registry.find_schema(made.schema_id, ORDERS)).schema_id == made.schema_id
    assert await nodes[2].registry.lookup(ORDERS, record("a")) == made
    await nodes[2].registry.register(ORDERS, record("a", "b"))
    # A node without it in its cache still checks against it.
    third = await nodes[1].registry.register(ORDERS, record("a", "b", "c"))
    assert third.version == 3


async def test_reads_continue_while_the_catalog_is_unavailable(nodes: list[Node]) -> None:
    node = nodes[0]
    made = await node.registry.register(ORDERS, record("a"))
    node.declarations.is_away = True
    assert (await node.registry.find_schema(made.schema_id, ORDERS)).content.text.startswith("{")
    assert await node.registry.lookup(ORDERS, record("a")) == made
    assert await node.registry.register(ORDERS, record("a")) == made
    with pytest.raises(CatalogUnavailable):
        await node.registry.register(ORDERS, record("a", "b"))
    with pytest.raises(CatalogUnavailable):
        await node.registry.find_schema(99, ORDERS)


async def test_permanent_deletion_reaches_every_node_and_frees_no_id(nodes: list[Node]) -> None:
    first, other = nodes[0].registry, nodes[1].registry
    made = await first.register(ORDERS, record("a"))
    await other.load()
    await first.delete_subject(ORDERS)
    await first.delete_subject(ORDERS, permanent=True)
    again = await first.register(ORDERS, record("a"))
    assert (again.version, again.schema_id > made.schema_id) == (1, True)
    await other.load()
    assert list(other.versions(ORDERS)) == [again]
    with pytest.raises(SchemaRegistryError):
        await other.find_schema(made.schema_id, ORDERS)


async def test_an_alias_of_an_alias_overwrites_no_version(nodes: list[Node]) -> None:
    """Each name refers to the next: a schema registered for the first is a version of the second."""
    registry = nodes[0].registry
    first, second, third = (QualifiedSubject.parse(name) for name in ("first", "second", "third"))
    for fields in ((), ("a",), ("a", "b")):
        await registry.register(second, record(*fields))
    await registry.register(third, record("z"))
    for name, target in ((first, "second"), (second, "third")):
        await registry.configure(name, {"alias": target})
    before = list(registry.exact_versions(second))
    made = await registry.register(first, record("a", "b", "c"))
    assert (made.subject, made.version) == (second, 4)
    assert list(registry.exact_versions(second)) == [*before, made]
    assert [version.version for version in registry.exact_versions(third)] == [1]


async def test_a_version_that_replaces_a_deleted_one_reaches_every_node(nodes: list[Node]) -> None:
    registry, other = nodes[0].registry, nodes[1].registry
    made = await registry.register(ORDERS, record("a"))
    await registry.register(ORDERS, record("a", "b"))
    await registry.delete_version(ORDERS, "1")
    again = await registry.register(ORDERS, record("a"))
    assert (again.version, again.schema_id) == (3, made.schema_id)
    await other.load()
    for schema_registry in (registry, other):
        assert [version.version for version in schema_registry.exact_versions(ORDERS)] == [2, 3]
        assert (await schema_registry.find_schema(made.schema_id, ORDERS)).schema_id == made.schema_id


@pytest.fixture
async def examiner() -> AsyncIterator[SchemaExaminer]:
    made = SchemaExaminer()
    yield made
    await made.close()


async def test_a_schema_that_takes_too_long_costs_only_its_process(examiner: SchemaExaminer, tmp_path: Path) -> None:
    catalog = Catalog.open_folder(tmp_path)
    impatient = SchemaExaminer(examine_s=0.5)
    patient, hasty = (
        SchemaRegistry(CatalogDeclarations(catalog), examiner=schema_examiner)
        for schema_examiner in (examiner, impatient)
    )
    try:
        await patient.register(ORDERS, BEFORE_SLOW)
        await hasty.load()
        with pytest.raises(SchemaRegistryError, match="could not be examined within") as refused:
            await hasty.register(ORDERS, SLOW)
        assert refused.value.code == RegistryCode.INVALID_SCHEMA
        assert (await patient.register(QualifiedSubject.parse("other"), record("a"))).version == 1
    finally:
        await impatient.close()
        catalog.close()


async def test_slow_schemas_delay_only_each_other(examiner: SchemaExaminer, tmp_path: Path) -> None:
    catalog = Catalog.open_folder(tmp_path)
    registry = SchemaRegistry(CatalogDeclarations(catalog), examiner=examiner)
    slow: list[asyncio.Task[SubjectVersion]] = []
    try:
        subjects = [QualifiedSubject.parse(f"slow-{number}") for number in range(2 * WORKERS_MAX)]
        for subject in subjects:
            await registry.register(subject, BEFORE_SLOW)
        slow += [asyncio.create_task(registry.register(subject, SLOW)) for subject in subjects]
        await asyncio.sleep(0)
        for number in range(5):
            await registry.register(QualifiedSubject.parse(f"other-{number}"), record("a"))
        # Each of them takes ten seconds, one after the other: the last ones are still queued.
        assert not all(task.done() for task in slow)
    finally:
        for task in slow:
            task.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        catalog.close()


@pytest.mark.parametrize(
    ("program", "problem"), [("slow", "did not start within"), ("broken", "ended while it started")]
)
async def test_a_failed_start_of_the_child_process_is_not_blamed_on_the_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, problem: str
) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)")
    (tmp_path / "broken.py").write_text("raise SystemExit(1)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    pool = ChildPool(program, noun="schemas", start_s=60 if program == "broken" else 0.1)
    try:
        with pytest.raises(QuotaExceeded, match=f"the process that examines schemas {problem}.*retry later"):
            await pool.request(b"")
    finally:
        await pool.close()


async def test_the_child_process_has_none_of_the_brokers_secrets(
    examiner: SchemaExaminer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MILLSTREAM_PASSWORD", "hunter2")
    assert (await examiner.parse(SchemaText(schema_type=AVRO, text='"int"'))).canonical == '"int"'
    worker, _ = await examiner._children._acquire()
    try:
        environment = Path(f"/proc/{worker.process.pid}/environ").read_bytes()
        assert b"PATH=" in environment
        assert b"hunter2" not in environment
    finally:
        examiner._children._discard(worker)


async def test_the_child_process_leaves_nothing_behind_when_the_broker_is_gone(examiner: SchemaExaminer) -> None:
    await examiner.parse(SchemaText(schema_type=AVRO, text='"int"'))
    worker, _ = await examiner._children._acquire()
    assert worker.process.stdin is not None
    assert Path(worker.folder).is_dir()
    worker.process.stdin.close()
    assert await worker.process.wait() == 0
    assert not Path(worker.folder).exists()


@pytest.mark.parametrize("kind", ["mode", "configuration"])
async def test_subjects_without_a_version_count_with_their_settings(
    nodes: list[Node], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    registry = nodes[0].registry
    monkeypatch.setattr(registry_module, "REGISTERED_BYTES_MAX", 1000)

    async def declare(name: str) -> None:
        subject = QualifiedSubject.parse(name)
        if kind == "mode":
            await registry.set_mode(subject, "IMPORT")
        else:
            await registry.configure(subject, {"compatibilityLevel": "FULL"})

    for number in range(4):
        await declare(f"{'s' * 200}{number}")
    for _ in range(2):
        with pytest.raises(SchemaRegistryError, match="its maximum"):
            await declare("s" * 200)
    # A subject without settings is not counted: a reset makes room for another, on every node.
    assert (await registry.set_mode(QualifiedSubject.parse("t" * 200), None)).mode is None
    await nodes[1].registry.load()
    for number in range(4):
        subject = QualifiedSubject.parse(f"{'s' * 200}{number}")
        await registry.set_mode(subject, None)
        await registry.configure(subject, None)
    for node in nodes:
        await node.registry.load()
        assert (node.registry.all_settings(), node.registry._held_bytes) == ([], 0)
    for number in range(4):
        await declare(f"{'u' * 200}{number}")
