"""Examines schemas in child processes, which bound what a hostile one can cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from millstream.broker.schemas.child_pool import ANSWER_S_MAX, IDLE_S, ChildDied, ChildPool, ChildTimedOut
from millstream.broker.schemas.worker import (
    MESSAGE_BYTES_MAX,
    CheckRequest,
    ParseRequest,
    RenderRequest,
    Request,
    WorkerResponse,
)
from millstream.core.errors import SchemaRegistryError
from millstream.core.schema import RegistryCode
from millstream.protocol.schemas.formats import ParsedTexts, SchemaText

MODULE: Final = "millstream.broker.schemas.worker"


def _invalid(reason: str) -> SchemaRegistryError:
    return SchemaRegistryError(reason, code=RegistryCode.INVALID_SCHEMA)


class SchemaExaminer:
    """Parses and compares schemas of all formats."""

    def __init__(self, *, examine_s: float = ANSWER_S_MAX, idle_s: float = IDLE_S) -> None:
        self._children = ChildPool(MODULE, noun="schemas", answer_s=examine_s, idle_s=idle_s)

    async def parse(self, schema: SchemaText) -> ParsedTexts:
        """Return the canonical and the normalized text of a schema; raise `SchemaRegistryError` if it is invalid."""
        canonical, normalized = await self._ask(ParseRequest(schema))
        return ParsedTexts(canonical, normalized)

    async def check(self, schema: SchemaText, earlier: Sequence[SchemaText], level: str) -> Sequence[str]:
        """Return why a schema is incompatible with earlier ones, given newest first."""
        return await self._ask(CheckRequest(schema, earlier, level)) if earlier and level != "NONE" else ()

    async def render(self, schema: SchemaText, wanted: str) -> str:
        """Return a schema in another format."""
        (text,) = await self._ask(RenderRequest(schema, wanted))
        return text

    async def close(self) -> None:
        """End the processes."""
        await self._children.close()

    async def _ask(self, request: Request) -> Sequence[str]:
        body = msgspec.msgpack.encode(request)
        if len(body) > MESSAGE_BYTES_MAX:
            raise _invalid(f"a schema with its references and earlier versions takes over {MESSAGE_BYTES_MAX} bytes")
        try:
            response = msgspec.msgpack.decode(await self._children.ask(body), type=WorkerResponse)
        except ChildTimedOut:
            limit_s = self._children.answer_s
            raise _invalid(f"the schema could not be examined within {limit_s:.0f} s; simplify it") from None
        except ChildDied:
            raise _invalid("the schema takes too much memory to examine; simplify it") from None
        if response.invalid is not None:
            raise _invalid(response.invalid)
        return response.texts
