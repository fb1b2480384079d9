"""`millstream.table` in a job: the table of a topic, whichever way it is landed."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from millstream.core.errors import NotFound
from millstream.pipelines.jobs.own_job import JobApi
from millstream.pipelines.source import landed_history


class Client:
    async def serves(self, _key: int) -> bool:
        return True


class Pipelines:
    def __init__(self, _client: Client) -> None: ...

    async def describe(self) -> list[dict[str, Any]]:
        upsert = {"topics": "customers", "mode": "upsert", "lake": "/current"}
        both = {"topics": "customers,orders", "mode": "upsert", "lake": "/newest"}
        every = {"topics": "orders", "lake": "/all"}
        return [{"kind": "land", "overrides": overrides} for overrides in (upsert, both, every)]


def test_a_table_with_one_row_per_key_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landed_history, "PipelineClient", Pipelines)
    link: Any = SimpleNamespace(client=Client(), call=asyncio.run)
    around: Any = SimpleNamespace(
        link=link, pin=None, run=1, brokers="", name="job", access=SimpleNamespace(as_options=dict)
    )
    job = JobApi(around)
    assert job._place("customers") == ("/current/customers", "delta")
    assert job._place("orders") == ("/all/orders", "delta")
    with pytest.raises(NotFound, match="no pipeline lands topic 'others'"):
        job._place("others")
    assert [lake for _, lake in landed_history.landings(link)] == ["/all"]
