"""One request to a broker, written as plain values, and its response as plain values."""

from __future__ import annotations

import datetime
import enum
import socket
import struct
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any
from uuid import UUID

from conformance.served import receive

from millstream.protocol.messages.codec import load_request_class, read_response
from millstream.protocol.messages.shape import default_of, is_entity, item_of, unwrapped
from millstream_testing.api_requests import write_request

Values = Mapping[str, Any]
CLOSED = "the connection was closed"
SILENT = "no response came"
_RESPONSE_S_MAX = 15.0
_CLIENT_ID = "compare"
_AT_ONCE = 50
"""How many requests are on their way over one connection."""


class Broker:
    """A broker to ask. Every question gets its own connection, so that none spoils the next."""

    def __init__(self, address: str) -> None:
        self.address = address

    def ask(self, api_key: int, version: int, values: Values) -> Any:
        """Send a request; the response is a dictionary, `CLOSED` or `SILENT`."""
        return self._exchange(api_key, version, frame_of(api_key, version, values))

    def ask_repeatedly(self, api_key: int, version: int, values: Values, times: int) -> Iterator[Any]:
        """Send a request so many times over one connection; a dictionary for each."""
        frame = frame_of(api_key, version, values)
        with self.connected() as connection:
            for begin in range(0, times, _AT_ONCE):
                count = min(_AT_ONCE, times - begin)
                connection.sendall(frame * count)
                for _ in range(count):
                    yield plain(read_response(api_key, version, receive_frame(connection)))

    def connected(self) -> socket.socket:
        host, _, port = self.address.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=_RESPONSE_S_MAX)

    def _exchange(self, api_key: int, version: int, frame: bytes) -> Any:
        return read_plain_response(api_key, version, self.send(frame))

    def send(self, frame: bytes) -> bytes | str:
        """Send a frame and receive another, `CLOSED` or `SILENT`."""
        with self.connected() as connection:
            connection.sendall(frame)
            try:
                return receive_frame(connection)
            except ConnectionError:
                return CLOSED
            except TimeoutError:
                return SILENT


class KeptConnection(Broker):
    """A broker that gets requests over one connection, none of which closes it."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self._kept: socket.socket | None = None

    def send(self, frame: bytes) -> bytes | str:
        """Send a frame and receive another; after `CLOSED` or `SILENT` the next goes over a new connection."""
        if self._kept is None:
            self._kept = self.connected()
        try:
            self._kept.sendall(frame)
            return receive_frame(self._kept)
        except (ConnectionError, TimeoutError) as error:
            self.close()
            return SILENT if isinstance(error, TimeoutError) else CLOSED

    def close(self) -> None:
        """Close the connection, if there is one."""
        if self._kept is not None:
            self._kept.close()
            self._kept = None


def frame_of(api_key: int, version: int, values: Values) -> bytes:
    """A request as it is sent."""
    return bytes(write_request(1, _CLIENT_ID, _build(load_request_class(api_key, version), values)))


def read_plain_response(api_key: int, version: int, response: bytes | str) -> Any:
    return response if isinstance(response, str) else plain(read_response(api_key, version, response))


def receive_frame(connection: socket.socket) -> bytes:
    """Read one response."""
    size: int = struct.unpack(">i", receive(connection, 4))[0]
    return receive(connection, size)


def _build(entity: type[Any], values: Values) -> Any:
    """An entity with these fields; the rest get the defaults of the protocol."""
    known = {field.name: field for field in fields(entity)}
    unknown = set(values) - set(known)
    if unknown:
        raise TypeError(f"{entity.__module__}.{entity.__name__} has no {', '.join(sorted(unknown))}")
    return entity(
        **{
            name: _value(field.type, field.metadata.get("kafka_type"), values[name])
            if name in values
            else default_of(field)
            for name, field in known.items()
        }
    )


def _value(annotation: Any, kafka_type: str | None, value: Any) -> Any:
    kind, _nullable = unwrapped(annotation)
    if value is None:
        return None
    item = item_of(kind)
    if item is not None:
        return tuple(_value(item, kafka_type, item_value) for item_value in value)
    if is_entity(kind):
        return _build(kind, value)
    if kafka_type is not None and kafka_type.startswith("timedelta"):
        return datetime.timedelta(milliseconds=value)
    if kafka_type is not None and kafka_type.startswith("datetime"):
        return datetime.datetime.fromtimestamp(value / 1000, tz=datetime.UTC)
    return value


def plain(value: Any) -> Any:
    """A response as dictionaries, lists and simple values."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, datetime.timedelta):
        return int(value.total_seconds() * 1000)
    if isinstance(value, datetime.datetime):
        return int(value.timestamp() * 1000)
    if isinstance(value, UUID):
        return str(value)
    return value
