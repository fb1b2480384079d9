"""A source that sends what it should not harms neither the node nor what it does not mirror."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from millstream.broker.mirror import service
from millstream.broker.mirror.declared_copies import DeclaredCopies
from millstream.broker.mirror.service import MirrorRun
from millstream.core.errors import ProtocolViolation
from millstream.core.mirror import MirrorSettings
from millstream.protocol.private.message import decode
from millstream.protocol.private.mirror_messages import QueueSnapshot, RegistryRequest, RegistryResponse
from millstream.protocol.private.schema_messages import SchemaMessage
from millstream_testing.waiting import until


def test_a_queue_whose_ids_are_none_is_refused() -> None:
    with pytest.raises(ProtocolViolation):
        decode(msgspec.msgpack.encode([[b"short", b"\1" * 16, 0], 1, b""]), QueueSnapshot)


async def test_an_unexpected_failure_is_reported_and_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mirror is a component of the node, which stops if one fails."""

    class BrokenSource:
        def __init__(self, *_: Any, **__: Any) -> None:
            pass

        async def __aenter__(self) -> Any:
            raise ValueError("bytes is not a 16-char string")

        async def __aexit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(service, "Source", BrokenSource)
    mirror: Any = SimpleNamespace(name="paris", mirror_id=1, settings=MirrorSettings())
    run = MirrorRun(mirror, SimpleNamespace())  # type: ignore[arg-type]
    running = asyncio.create_task(run.run())
    await until(lambda: run.error or running.done())
    assert not running.done()
    assert "bytes is not a 16-char string" in run.error
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("count", [0, 1])
async def test_a_registry_that_does_not_end_is_not_read_for_ever(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millstream.broker.mirror.declared_copies.REGISTRY_CHARACTERS_MAX", 100)
    schemas = [SchemaMessage(id=1, guid="", schema_type="AVRO", schema='"int"', subject="orders", version=1)] * count

    async def ask(_node: Any, _request: RegistryRequest, **_: Any) -> RegistryResponse:
        await asyncio.sleep(0)
        return RegistryResponse(last=7, schemas=schemas, has_more=True)

    async def claim_sightings(*_: Any, **__: Any) -> dict[str, Any]:
        return {}

    mirrors = SimpleNamespace(claim_sightings=claim_sightings)
    run: Any = SimpleNamespace(
        service=SimpleNamespace(schemas=None, rules=None, mirrors=mirrors), mirror=SimpleNamespace(), notes={}
    )
    source: Any = SimpleNamespace(cluster_id="paris", ask=ask)
    async with asyncio.timeout(20):
        with pytest.raises(ProtocolViolation, match="does not end"):
            await DeclaredCopies(run, source).sync_schemas()
