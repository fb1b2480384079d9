"""Shared fixtures of the tests with real clients."""

from __future__ import annotations

import socket
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from benchmarks.peers import kafka as apache_kafka
from benchmarks.subject import PeerUnavailable
from confluent_kafka.schema_registry import SchemaRegistryClient

from millstream_testing.command import CommandLine
from millstream_testing.server import Server

# kafka-python reads its schemas through a function that Python 3.11 and 3.12 warn about, while it is imported.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka  # noqa: F401
from kafka.net.inet import KafkaNetSocket
from kafka.net.selector import NetworkSelector
from kafka.net.transport import KafkaTCPTransport


def close_leaked_kafka_python_sockets() -> None:
    """Close the sockets that kafka-python leaks: of a refused or abandoned connection attempt, and of one closed
    before everything is sent. Otherwise the next test would fail with a ResourceWarning.
    """
    connect, begin, end = KafkaNetSocket.sock_connect, KafkaTCPTransport.__init__, NetworkSelector.close
    opened: dict[Any, list[Any]] = {}

    async def connect_or_close(self: Any, net: Any, sock: socket.socket, *arguments: Any, **named: Any) -> Any:
        try:
            return await connect(self, net, sock, *arguments, **named)
        except BaseException:
            sock.close()
            raise

    def begin_known(self: Any, net: Any, *arguments: Any, **named: Any) -> None:
        begin(self, net, *arguments, **named)
        opened.setdefault(net, []).append(self)

    def end_all(self: Any) -> None:
        transports = opened.pop(self, ())
        end(self)
        for transport in transports:
            if transport._sock is not None:
                transport._sock.close()

    KafkaNetSocket.sock_connect = connect_or_close
    KafkaTCPTransport.__init__ = begin_known
    NetworkSelector.close = end_all


close_leaked_kafka_python_sockets()


@pytest.fixture(scope="module")
def millstream(server: Server) -> CommandLine:
    """The commands, run against the server of the test."""
    return CommandLine(server.kafka)


@pytest.fixture(scope="module")
def registry(server: Server) -> Iterator[Any]:
    """Confluent's client of the server's schema registry."""
    with SchemaRegistryClient({"url": f"http://{server.http}/registry"}) as client:
        yield client


@pytest.fixture(scope="module")
def peer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Apache Kafka, where it is installed."""
    try:
        started = apache_kafka.kafka(tmp_path_factory.mktemp("kafka") / "data", "os", partitions=2)
    except PeerUnavailable as reason:
        pytest.skip(str(reason))
    with started:
        yield started
