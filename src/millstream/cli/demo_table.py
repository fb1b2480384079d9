"""The last chapter of `millstream demo`: the orders are a table too, and SQL is asked about them."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millstream.cli.exit_code import CommandFailed
from millstream.client.admin.pipelines import PipelineClient
from millstream.core.pipeline import PipelineKind

if TYPE_CHECKING:
    from millstream.cli.demo_account import Account
    from millstream.protocol.wire.client import Client

PIPELINE: Final = "orders-table"
EVERY_MS: Final = 1000
SETUP_VARIABLE: Final = "DEMO_SPARK_SETUP"
"""The command that installs Spark, for who has only just begun; `make demo` says it."""

_LOOK_S: Final = 0.5
_LANDED_S_MAX: Final = 300.0
_SQL: Final = """
    SELECT city, count(*) AS orders, sum(total) AS total, max(total) AS largest
    FROM orders GROUP BY city ORDER BY orders DESC, city
"""
_PLACES_SQL: Final = (
    'SELECT count(*) AS rows, count(DISTINCT "partition" * 1000000000 + "offset") AS places FROM orders'
)


class OrdersTable:
    """Declares that the orders become a table, waits until they are one, and asks it."""

    def __init__(self, topic: str, data: Path, account: Account) -> None:
        self._topic = topic
        self._path = data / "lake" / topic
        self._account = account

    async def declare(self, client: Client) -> None:
        """From here on the orders are landed; on a machine without Spark, once it is there."""
        settings = {"topics": self._topic, "every.ms": str(EVERY_MS), "decode": "json"}
        await PipelineClient(client).create(PIPELINE, PipelineKind.LAND, settings)
        state = "it runs beside" if _has_spark() else "it waits for Spark, which comes later"
        self._account.tell(f"and a pipeline lands all orders in a table; {state}")

    async def show(self, client: Client, messages: int) -> None:
        """Every message of the log is a row, once; SQL says what they are about."""
        self._account.step("The orders are a table")
        if not await self._is_set_up():
            self._account.tell("Spark is not installed, so this part is left out; `make spark` installs it")
            return
        began = time.monotonic()
        await self._until_landed(client, messages)
        self._account.tell(f"the pipeline has landed everything after {time.monotonic() - began:.1f} s")
        found = self._ask(_PLACES_SQL)[0]
        self._account.check(
            found == {"rows": messages, "places": messages},
            f"table {self._topic!r}: {messages:,} rows, one for each message of the log",
            f"there are {found['rows']} rows of {found['places']} messages",
        )
        self._account.tell("SELECT city, count(*), sum(total), max(total) FROM orders GROUP BY city:")
        for row in self._ask(_SQL):
            self._account.tell(
                f"   {row['city'] or '(no city)':<10} {row['orders']:>6,} orders   {row['total']:>12,} in all"
                f"   {row['largest']:>6,} the largest"
            )

    async def _is_set_up(self) -> bool:
        command = os.environ.get(SETUP_VARIABLE)
        if _has_spark() or not command:
            return _has_spark()
        self._account.tell("Spark is set up now; this downloads about 500 MB, once ...")
        began = time.monotonic()
        setup = await asyncio.create_subprocess_shell(command, stdin=asyncio.subprocess.DEVNULL)
        try:
            code = await setup.wait()
        except asyncio.CancelledError:
            setup.terminate()
            await setup.wait()
            raise
        importlib.invalidate_caches()
        if code or not _has_spark():
            raise CommandFailed(f"setting up Spark failed: {command!r} ended with {code}")
        self._account.tell(f"set up after {time.monotonic() - began:.0f} s")
        return True

    async def _until_landed(self, client: Client, messages: int) -> None:
        pipelines = PipelineClient(client)
        told: dict[str, Any] = {}
        try:
            async with asyncio.timeout(_LANDED_S_MAX):
                while self._landed() < messages:
                    await asyncio.sleep(_LOOK_S)
                    (told,) = await pipelines.describe([PIPELINE])
                    if told["state"] == "parked":
                        raise CommandFailed(f"the demo failed: the pipeline was parked: {told['parked']}")
        except TimeoutError:
            raise CommandFailed(f"the demo failed: the orders were not landed in time: {told}") from None

    def _landed(self) -> int:
        from deltalake import DeltaTable

        if not DeltaTable.is_deltatable(str(self._path)):
            return 0
        return int(self._ask("SELECT count(*) AS rows FROM orders")[0]["rows"])

    def _ask(self, sql: str) -> list[dict[str, Any]]:
        """What a statement finds, answered by the library that reads the tables, without Spark."""
        import pyarrow as pa
        from deltalake import DeltaTable, QueryBuilder

        asked = QueryBuilder().register("orders", DeltaTable(str(self._path)))
        rows: list[dict[str, Any]] = pa.table(asked.execute(sql)).to_pylist()
        return rows


def _has_spark() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("pyspark", "pyarrow", "deltalake"))
