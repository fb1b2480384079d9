"""What Millstream's private requests between nodes have in common: MessagePack in, MessagePack out.

An answer begins with `error`, Kafka's code (0 when all is well), and a message that says what went wrong.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
from kio.schema.errors import ErrorCode

from millstream.broker.kafka.api import ClientInfo
from millstream.broker.kafka.errors import error_code, error_message
from millstream.broker.net.connection import Answer, Buffers
from millstream.core.errors import MillstreamError
from millstream.protocol.messages.codec import RequestHeader, response_head

RequestT = TypeVar("RequestT")


class PackedApi(ABC, Generic[RequestT]):
    """One private request whose body carries bytes."""

    key: int
    versions = (0, 0)
    asks: ClassVar[Any]
    """The type of the request's body."""
    answers: ClassVar[Any]
    """The type of the answer; its first two fields are the error's code and its message."""
    waits_for_others: ClassVar[bool] = False
    """Whether the answer waits for what other clients do, so that it is given up when the client leaves."""

    @abstractmethod
    async def handle(self, request: RequestT) -> Any:
        """Carry a request out; what is returned is the answer."""

    async def handle_from(self, client: ClientInfo, request: RequestT) -> Any:
        """Carry out the request of a client; whoever is charged for it is known here."""
        return await self.handle(request)

    def handle_frame(self, frame: memoryview, header: RequestHeader, client: ClientInfo) -> Answer:
        """Answer later."""
        return self._answer(bytes(frame[header.body_at :]), header, client)

    async def _answer(self, body: bytes, header: RequestHeader, client: ClientInfo) -> Buffers | None:
        if self.waits_for_others:
            client.presence.give_up_when_left()
        try:
            request: RequestT = msgspec.msgpack.decode(body, type=self.asks)
            response = await self.handle_from(client, request)
        except msgspec.MsgspecError as error:
            response = self.answers(int(ErrorCode.invalid_request), str(error))
        except MillstreamError as error:
            response = self.answers(int(error_code(error)), error_message(error))
        content = msgspec.msgpack.encode(response)
        return [response_head(header.api_key, header.version, header.correlation_id, len(content)), content]
