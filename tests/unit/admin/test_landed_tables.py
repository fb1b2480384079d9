"""Locating the tables of pipelines, and the error if their location is unknown."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from millstream.client.admin import pipelines
from millstream.client.admin.pipelines import PipelineStorage, tables_of
from millstream.core.errors import BrokerUnreachable


def reported(kind: str = "land", node: int | None = 2, **overrides: str) -> dict[str, Any]:
    """A pipeline as nodes describe it."""
    report = None if node is None else {"node": node}
    return {
        "pipeline_id": str(uuid.uuid4()),
        "name": "mine",
        "kind": kind,
        "overrides": overrides,
        "rules": [],
        "report": report,
    }


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """The nodes that were asked for storage locations; node 3 does not respond."""
    nodes: list[int | None] = []

    async def storage_of(client: Any, *, node: int | None = None) -> PipelineStorage:
        nodes.append(node)
        if node == 3:
            raise BrokerUnreachable("node 3 cannot be reached")
        return PipelineStorage("/data/lake/", "/data/pipelines", "/data")

    monkeypatch.setattr(pipelines, "storage_of", storage_of)
    return nodes


async def test_tables_are_located_by_the_node_that_runs_the_pipeline(asked: list[int | None]) -> None:
    client: Any = None
    tables = await tables_of(client, reported(topics="a,b", format="parquet"))
    assert [table.location for table in tables.tables] == ["/data/lake/a", "/data/lake/b"]
    assert (tables.tables[0].read, tables.notes) == ("pandas.read_parquet('/data/lake/a')", [])
    (table,) = (await tables_of(client, reported(topics="a", lake="s3://lake/x"))).tables
    assert (table.location, asked) == ("s3://lake/x/a", [2])
    assert await tables_of(client, reported("route")) == ([], [])


async def test_tables_of_one_node_in_a_cluster_have_a_note(asked: list[int | None]) -> None:
    client: Any = None
    tables = await tables_of(client, {**reported(topics="a"), "local_tables": True})
    assert [table.location for table in tables.tables] == ["/data/lake/a"]
    assert "Set pipelines-lake on all nodes" in tables.notes[0]
    (note,) = (await tables_of(client, {**reported("ledger"), "local_tables": True})).notes
    assert note == tables.notes[0]


async def test_the_error_names_the_obstacle(asked: list[int | None]) -> None:
    client: Any = None
    assert await tables_of(client, reported(topics="a", node=3)) == (
        [],
        ["The locations of its tables are unknown: node 3 cannot be reached"],
    )
    (note,) = (await tables_of(client, reported(topics="a", every="soon"))).notes
    assert note.startswith("The locations of its tables are unknown: unknown setting 'every'")
