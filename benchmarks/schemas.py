"""`make bench-schemas`: what schema rules cost, in CPU time of the broker and its child processes per million records.

    python -m benchmarks.schemas [--records N] [--rounds N] [--json]

The same batches of Avro records are produced to topics without a rule, with `validate=id` and with `validate=content`,
of 100 bytes and of 1 KiB, uncompressed and with lz4, in turn, over four connections to a real server. What a rule costs
is the difference to the topic without one, from the same run. A topic with `validate=off` shows that a rule that is off
costs nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import fastavro
from benchmarks.machine import facts
from benchmarks.processes import cpu_of

from millstream.client.admin.schemas import SchemaClient
from millstream.client.admin.topics import create_topic
from millstream.core.topic import SCHEMA_VALIDATE, SCHEMA_VALUE
from millstream.protocol.private.schema_messages import RegisterSchemaRequest
from millstream.protocol.records.batch import COMPRESSION_LZ4, COMPRESSION_NONE
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.schemas.framing import prefix
from millstream.protocol.wire.client import Client
from millstream_testing.server import Server

RULES: Final = ("none", "off", "id", "content")
SIZES: Final = (100, 1024)
COMPRESSIONS: Final = {"none": COMPRESSION_NONE, "lz4": COMPRESSION_LZ4}
BATCH_RECORDS: Final = 500
CONNECTIONS: Final = 4
WARM_UP: Final = 3
SCHEMA: Final = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "customer", "type": "string"},
        {"name": "total", "type": "double"},
        {"name": "note", "type": ["null", "string"]},
    ],
}


class Case(NamedTuple):
    """One combination that is measured."""

    rule: str
    size: int
    compression: str

    @property
    def topic(self) -> str:
        return f"bench-{self.rule}-{self.size}-{self.compression}"


class Measured(NamedTuple):
    """Of one round: records per second, and CPU seconds per million records."""

    records_per_s: float
    cpu_s: float


def batch_of(schema_id: int, size: int, compression: int) -> bytes:
    """A batch of records, each of about this many bytes."""
    parsed = fastavro.parse_schema(SCHEMA)
    records = []
    for number in range(BATCH_RECORDS):
        content = io.BytesIO()
        row = {"id": number, "customer": f"customer-{number}", "total": number / 7, "note": None}
        fastavro.schemaless_writer(content, parsed, row)
        filling = max(0, size - len(content.getvalue()) - 7)
        content = io.BytesIO()
        note = "".join(chr(97 + (number * 31 + at * 7) % 26) for at in range(filling))
        fastavro.schemaless_writer(content, parsed, {**row, "note": note})
        records.append(NewRecord(None, prefix(schema_id) + content.getvalue(), (), 1))
    return bytes(encode_batch(records, compression=compression))


async def measure(server: Server, case: Case, batch: bytes, count: int) -> Measured:
    """Produce batches over several connections."""
    clients = [Client.connect(server.kafka, client_id="bench", timeout_s=120) for _ in range(CONNECTIONS)]
    for client in clients:
        await client.__aenter__()
    for _ in range(WARM_UP):
        # Together, so that every child process is started.
        await asyncio.gather(*(client.produce(case.topic, 0, bytearray(batch)) for client in clients))
    before, began = cpu_of(server.pid), time.perf_counter()

    async def send(client: Client) -> None:
        for _ in range(count // CONNECTIONS):
            await client.produce(case.topic, 0, bytearray(batch))

    await asyncio.gather(*(send(client) for client in clients))
    took, after = time.perf_counter() - began, cpu_of(server.pid)
    for client in clients:
        await client.close()
    records = count // CONNECTIONS * CONNECTIONS * BATCH_RECORDS
    used = (after.user_s + after.system_s) - (before.user_s + before.system_s)
    return Measured(records / took, used * 1e6 / records)


async def prepare(server: Server, cases: Sequence[Case]) -> int:
    """Register the schema and create the topics; return the schema's id."""
    async with Client.connect(server.kafka, client_id="bench", timeout_s=60) as client:
        registered = await SchemaClient(client).register(
            RegisterSchemaRequest(subject="bench", schema=json.dumps(SCHEMA))
        )
        for case in cases:
            settings = {"flush": "os"}
            if case.rule != "none":
                settings |= {SCHEMA_VALUE: "bench", SCHEMA_VALIDATE: case.rule}
            await create_topic(client, case.topic, partitions=1, replication=-1, settings=settings)
    return registered.id


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--records", type=int, default=100_000, help="records per case and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cases = [Case(rule, size, name) for size in SIZES for name in COMPRESSIONS for rule in RULES]
    results: dict[Case, list[Measured]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder, Server(Path(folder) / "data") as server:
        schema_id = asyncio.run(prepare(server, cases))
        batches = {
            (size, name): batch_of(schema_id, size, codec) for size in SIZES for name, codec in COMPRESSIONS.items()
        }
        for _round in range(options.rounds):
            for case in cases:
                batch = batches[case.size, case.compression]
                results[case].append(asyncio.run(measure(server, case, batch, options.records // BATCH_RECORDS)))
    rows = [
        {
            **case._asdict(),
            "records_per_s": round(median(result.records_per_s for result in case_results)),
            "cpu_s_per_million": round(median(result.cpu_s for result in case_results), 3),
        }
        for case, case_results in results.items()
    ]
    if options.json:
        print(json.dumps({"machine": facts(), "results": rows}))
        return
    print(f"{'size':>5} {'codec':>6} {'rule':>8} {'records/s':>12} {'CPU s per million':>18} {'of which the rule':>18}")
    for row in rows:
        plain = next(
            base_row
            for base_row in rows
            if (base_row["size"], base_row["compression"], base_row["rule"])
            == (row["size"], row["compression"], "none")
        )
        extra = float(row["cpu_s_per_million"]) - float(plain["cpu_s_per_million"])
        print(
            f"{row['size']:>5} {row['compression']:>6} {row['rule']:>8} {row['records_per_s']:>12,} "
            f"{row['cpu_s_per_million']:>18.2f} {extra:>18.2f}"
        )


if __name__ == "__main__":
    main()
