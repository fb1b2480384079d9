"""What Millstream's private requests about transactions have in common: JSON in, JSON out, errors by Kafka's codes.

The body of a request is one JSON object; what is missing in it or of another type is INVALID_REQUEST. An answer is one
JSON object too: `error` is Kafka's code (0 when all is well) and `message` says what went wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from kio.schema.errors import ErrorCode

from millstream.broker.kafka.api import ClientInfo
from millstream.broker.kafka.errors import error_code, error_message
from millstream.broker.kafka.fenced import log_fenced
from millstream.broker.net.connection import Answer
from millstream.broker.net.promise import Buffers
from millstream.core.errors import MillstreamError
from millstream.protocol.messages.codec import RequestHeader, response_head

RequestT = TypeVar("RequestT")


class PrivateApi(ABC, Generic[RequestT]):
    """One private request."""

    key: int
    versions = (0, 0)
    asks: ClassVar[Any]
    """The type of the request's body."""

    @abstractmethod
    async def handle(self, request: RequestT) -> dict[str, Any]:
        """Carry a request out; what is returned goes into the answer."""

    def handle_frame(self, frame: memoryview, header: RequestHeader, client: ClientInfo) -> Answer:
        """Answer later."""
        return self._answer(bytes(frame[header.body_at :]), header, client)

    async def _answer(self, body: bytes, header: RequestHeader, client: ClientInfo) -> Buffers | None:
        told: dict[str, Any]
        try:
            request: RequestT = msgspec.json.decode(body, type=self.asks)
            told = {"error": 0, "message": None, **await self.handle(request)}
        except msgspec.MsgspecError as error:
            told = {"error": int(ErrorCode.invalid_request), "message": str(error)}
        except MillstreamError as error:
            log_fenced(error_code(error), str(error), client)
            told = {"error": int(error_code(error)), "message": error_message(error)}
        content = msgspec.json.encode(told)
        return [response_head(header.api_key, header.version, header.correlation_id, len(content)), content]
