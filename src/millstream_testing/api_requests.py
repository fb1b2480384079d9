"""Send requests to an API as a client does: every request and response is encoded and decoded."""

from __future__ import annotations

from typing import Any

from millstream.broker.kafka.api import Api, ClientInfo
from millstream.broker.kafka.dispatch import RawApi
from millstream.protocol.messages import codec
from millstream.protocol.messages.shape import reshape


def write_request(correlation_id: int, client_id: str | None, request: Any) -> bytes:
    """Build the frame of a request, including its size."""
    head = codec.request_head(request.__api_key__, request.__version__, correlation_id, client_id)
    body = codec.write_entity(request)
    return (len(head) + len(body)).to_bytes(4, "big") + head + body


def client_info() -> ClientInfo:
    return ClientInfo(connection_id=1, host="127.0.0.1", client_id="test")


async def send_request(api: Api[Any, Any] | RawApi, request: Any, *, client: ClientInfo | None = None) -> Any:
    """Send a request in its own version; the response is of the same version."""
    frame = write_request(9, "test", request)[4:]
    header = codec.read_request_header(frame)
    client = client or client_info()
    pending: Any
    if isinstance(api, Api):
        pending = api.respond_to_frame(memoryview(frame), header, client)
    else:
        pending = api.handle_frame(memoryview(frame), header, client)
    if pending is not None:
        encoded = b"".join(pending if isinstance(pending, list) else await pending)
        decoded = codec.read_response(header.api_key, header.version, encoded[4:])
        if encoded != codec.write_response(header.api_key, header.version, header.correlation_id, decoded):
            raise ValueError(f"{type(api).__name__} v{header.version} lays out its response wrongly: {encoded!r}")
        return decoded
    if not isinstance(api, Api):
        return None
    read = codec.read_request(header.api_key, header.version, frame, header.body_at)
    response = await api.respond(header.version, read, client)
    encoded = codec.write_response(header.api_key, header.version, header.correlation_id, response)
    return codec.read_response(header.api_key, header.version, encoded[4:])


def send_frame(api: RawApi, request: Any, *, client: ClientInfo | None = None) -> Any:
    """Send a request to an API that reads its own frames and responds at once."""
    frame = memoryview(write_request(9, "test", request)[4:])
    encoded = api.handle_frame(frame, codec.read_request_header(frame), client or client_info())
    if not isinstance(encoded, list):
        raise TypeError(f"{type(api).__name__} did not respond at once")
    return codec.read_response(api.key, request.__version__, b"".join(encoded)[4:])


async def send_in_version(api: Api[Any, Any], version: int, request: Any) -> Any:
    """Send a request in another version; the response has the request's own version."""
    versioned = reshape(request, codec.load_request_class(api.key, version))
    encoded = await send_request(api, versioned)
    return reshape(encoded, codec.load_response_class(api.key, request.__version__))
