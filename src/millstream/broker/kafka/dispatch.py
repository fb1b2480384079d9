"""Dispatch frames to APIs: read the header, find the API, encode the response.

The APIs are loaded when the broker is up, since their message classes are slow to import; a request that comes before
that waits. An unreadable or unsupported request closes the connection, as in Kafka; only ApiVersions responds to every
version, so that clients can discover what is served.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Iterable
from itertools import count
from typing import Any, Final, Protocol

from millstream.broker.kafka.api import Api, ClientInfo
from millstream.broker.net.connection import Connection, EventualResponse
from millstream.broker.net.response import Buffers, EncodedResponse, Parked, Promise, Started, Stream, start
from millstream.core.errors import ProtocolViolation
from millstream.core.metric import Histogram, Metric, Sample
from millstream.protocol.messages.codec import (
    API_VERSIONS_KEY,
    RequestHeader,
    read_request,
    read_request_header,
    write_response,
)

_logger = logging.getLogger(__name__)

_OF_TRANSACTIONS: Final = frozenset({22, 24, 25, 26, 28})
"""InitProducerId, AddPartitionsToTxn, AddOffsetsToTxn, EndTxn and TxnOffsetCommit."""


class RawApi(Protocol):
    """An API that reads its own frames: the hot paths and Millstream's private requests."""

    key: int
    versions: tuple[int, int]

    def handle_frame(self, frame: memoryview, header: RequestHeader, client: ClientInfo) -> EventualResponse:
        """Respond to a frame; `net.connection.Service` describes the kinds of responses."""


class Dispatch:
    """The service behind every Kafka connection."""

    def __init__(self) -> None:
        self._apis: dict[int, Api[Any, Any] | RawApi] = {}
        self._loaded = asyncio.Event()
        self._connection_ids = count(1)
        self._latencies: dict[int, Histogram] = {}

    def serve(self, apis: Iterable[Api[Any, Any] | RawApi]) -> None:
        self._apis = {api.key: api for api in apis}
        self._latencies = {key: Histogram() for key in self._apis}
        self._loaded.set()

    async def loaded(self) -> None:
        await self._loaded.wait()

    def metrics(self) -> Iterable[Metric]:
        yield Metric(
            "millstream_request_seconds",
            "histogram",
            "Time from a request's arrival to its response, by API.",
            tuple(
                Sample(latency.distribution(), (("api", type(self._apis[key]).__name__),))
                for key, latency in self._latencies.items()
                if latency.observations
            ),
        )

    def handle(self, frame: memoryview, connection: Connection) -> EventualResponse:
        if not self._apis:
            return self._serve_when_loaded(bytearray(frame), connection)
        started = time.perf_counter()
        header = read_request_header(frame)
        client: ClientInfo | None = connection.state
        if client is None or client.client_id != header.client_id:
            client = self._client_info(connection, header)
        api = self._apis.get(header.api_key)
        if api is None or not api.versions[0] <= header.version <= api.versions[1]:
            api = self._check_served(api, header)
        if isinstance(api, Api):
            if api.key in _OF_TRANSACTIONS and client.presence.has_ended:
                # Its transaction may have been ended through another connection since, and the next one begun, to
                # which this request would be taken to belong.
                connection.abort()
                return None
            at_once = api.respond_to_frame(frame, header, client)
            if at_once is None:
                return self._respond(api, header, frame, client, started)
            return self._observe(self._latencies[api.key], at_once, started)
        response = api.handle_frame(frame, header, client)
        latency = self._latencies[header.api_key]
        count = 1 + client.pipelined.served
        if isinstance(response, list):
            latency.observe(time.perf_counter() - started, count)
            return response
        return self._observe(latency, response, started, count)

    async def _serve_when_loaded(self, frame: bytearray, connection: Connection) -> EncodedResponse | None:
        await self._loaded.wait()
        response = self.handle(memoryview(frame), connection)
        if isinstance(response, Started) and response.is_abandoned_with_client:
            connection.presence.cancel_on_disconnect()
        elif isinstance(response, Parked):
            connection.presence.on_leave(response.abandon)
            try:
                return await response
            finally:
                # The task is cancelled when the connection is lost.
                connection.presence.forget_on_leave(response.abandon)
                response.abandon()
        if isinstance(response, Awaitable):
            return await response
        return response

    def _client_info(self, connection: Connection, header: RequestHeader) -> ClientInfo:
        client: ClientInfo | None = connection.state
        if client is None:
            client = ClientInfo(
                connection_id=next(self._connection_ids),
                host=connection.host,
                reached_at=connection.reached_at,
                listener=connection.listener,
                rights=None if connection.session is None else connection.session.rights,
                session=connection.session,
                address=connection.peer,
                mute=connection.mute,
                count_as_follower=connection.count_as_follower,
                presence=connection.presence,
                pipelined=connection.pipelined,
            )
            connection.state = client
        if header.client_id is not None:
            client.client_id = header.client_id
        return client

    def _check_served(self, api: Api[Any, Any] | RawApi | None, header: RequestHeader) -> Api[Any, Any] | RawApi:
        """Refuse an unknown API, or a version of one that is not served."""
        if api is None:
            raise ProtocolViolation(f"API key {header.api_key} is not served")
        if header.api_key != API_VERSIONS_KEY:
            oldest, newest = api.versions
            raise ProtocolViolation(
                f"{type(api).__name__} v{header.version} is not served; versions {oldest} to {newest} are"
            )
        return api

    def _respond(
        self, api: Api[Any, Any], header: RequestHeader, frame: memoryview, client: ClientInfo, started: float
    ) -> EventualResponse:
        version = header.version
        # The frame is no longer valid when the coroutine starts.
        request = read_request(api.key, version, frame, header.body_at)
        response = self._respond_with(api, header, request, client, started)
        return start(response) if api.starts_at_once else response

    async def _respond_with(
        self, api: Api[Any, Any], header: RequestHeader, request: Any, client: ClientInfo, started: float
    ) -> Buffers:
        version = header.version
        if api.waits_for_others:
            client.presence.cancel_on_disconnect()
        response = await api.respond(version, request, client)
        encoded = write_response(api.key, version, header.correlation_id, response)
        self._latencies[api.key].observe(time.perf_counter() - started)
        return [encoded]

    def _observe(
        self, latency: Histogram, response: EventualResponse, started: float, count: int = 1
    ) -> EventualResponse:
        if response is None or isinstance(response, (list, Stream)):
            latency.observe(time.perf_counter() - started, count)
            return response
        if isinstance(response, Promise):
            response.observe(latency, started, count)
            return response
        if isinstance(response, Started):
            response.observe(latency, started)
            return response
        return _observe_response(latency, response, started)


async def _observe_response(
    latency: Histogram, response: Awaitable[EncodedResponse | None], started: float
) -> EncodedResponse | None:
    try:
        return await response
    finally:
        latency.observe(time.perf_counter() - started)
