"""Clients that disconnect while a real broker waits on their behalf."""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from contextlib import ExitStack
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from kio.schema.errors import ErrorCode

from millstream.protocol.messages.codec import read_response
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.api_requests import write_request
from millstream_testing.server import Server

POLLS = 40
SOON_S = 60.0
FETCH_V4 = struct.Struct(">hhih")


def waiting(server: Server) -> int:
    """The number of waiting fetches."""
    lines = server.metrics().splitlines()
    return next(int(float(line.split()[1])) for line in lines if line.startswith("millstream_fetch_waiting "))


def until_waiting(server: Server, count: int) -> None:
    deadline = time.monotonic() + SOON_S
    while (found := waiting(server)) != count:
        assert time.monotonic() < deadline, f"{found} fetches wait, not {count}"
        time.sleep(0.02)


def long_poll(topic: bytes, offset: int) -> bytes:
    """A fetch of version 4 that waits five minutes for more bytes than will ever arrive."""
    body = FETCH_V4.pack(1, 4, 7, -1) + struct.pack(">iiiib", -1, 300_000, 1 << 20, 1 << 20, 0)
    body += struct.pack(">ih", 1, len(topic)) + topic + struct.pack(">iiqi", 1, 0, offset, 1 << 20)
    return struct.pack(">i", len(body)) + body


def test_long_polls_end_with_their_clients(tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server, ExitStack() as clients:
        producer = Producer({"bootstrap.servers": server.kafka})
        producer.produce("t", b"little")
        assert producer.flush(SOON_S) == 0
        host, _, port = server.kafka.rpartition(":")
        polling = [clients.enter_context(socket.create_connection((host, int(port)))) for _ in range(POLLS)]
        for number, client in enumerate(polling):
            client.settimeout(SOON_S)
            # Behind some of them so much waits that the broker has stopped reading.
            client.sendall(long_poll(b"t", 0) * (1 if number % 2 else 200))
        until_waiting(server, POLLS)
        for client in polling[:10]:
            client.close()
        until_waiting(server, POLLS - 10)
        # A half-closed client gets what is available, for every request.
        for number, client in enumerate(polling[10:], 10):
            client.shutdown(socket.SHUT_WR)
            received = bytearray()
            while part := client.recv(1 << 16):
                received += part
            assert received.count(b"little") == (1 if number % 2 else 200)
        until_waiting(server, 0)


class Transaction:
    """A transaction of a client that builds its own requests, with the same epoch throughout."""

    def __init__(self, server: Server) -> None:
        self._server = server
        init: Any = import_module("kio.schema.init_producer_id.v4.request")
        made = self.ask(
            init.InitProducerIdRequest(
                transactional_id="tx",
                transaction_timeout=timedelta(seconds=60),
                producer_id=-1,
                producer_epoch=-1,
            )
        )
        assert made.error_code is ErrorCode.none
        self._producer = {"producer_id": made.producer_id, "producer_epoch": made.producer_epoch}

    def connect(self) -> socket.socket:
        host, _, port = self._server.kafka.rpartition(":")
        return socket.create_connection((host, int(port)), timeout=SOON_S)

    def ask(self, request: Any) -> Any:
        with self.connect() as connection:
            return self.send_over(connection, request)

    @staticmethod
    def send_over(connection: socket.socket, request: Any) -> Any:
        connection.sendall(write_request(1, "test", request))
        (size,) = struct.unpack(">i", connection.recv(4, socket.MSG_WAITALL))
        response = connection.recv(size, socket.MSG_WAITALL)
        return read_response(request.__api_key__, request.__version__, response)

    def begin(self) -> None:
        add: Any = import_module("kio.schema.add_partitions_to_txn.v3.request")
        topic = add.AddPartitionsToTxnTopic(name="t", partitions=(0,))
        response = self.ask(
            add.AddPartitionsToTxnRequest(
                v3_and_below_transactional_id="tx",
                v3_and_below_producer_id=self._producer["producer_id"],
                v3_and_below_producer_epoch=self._producer["producer_epoch"],
                v3_and_below_topics=(topic,),
            )
        )
        (result,) = response.results_by_topic_v3_and_below
        assert result.results_by_partition[0].partition_error_code is ErrorCode.none

    def produce(self, value: bytes) -> Any:
        module: Any = import_module("kio.schema.produce.v9.request")
        batch = encode_batch(
            [NewRecord(None, value, (), int(time.time() * 1000))],
            **self._producer,
            base_sequence=0,
            transactional=True,
        )
        data = module.PartitionProduceData(index=0, records=bytes(batch))
        topics = (module.TopicProduceData(name="t", partition_data=(data,)),)
        return module.ProduceRequest(transactional_id="tx", acks=-1, timeout=timedelta(seconds=30), topic_data=topics)

    def end(self, *, commit: bool) -> Any:
        module: Any = import_module("kio.schema.end_txn.v3.request")
        return module.EndTxnRequest(transactional_id="tx", committed=commit, **self._producer)


@pytest.mark.parametrize("kind", ["produce", "end"])
def test_records_sent_before_a_disconnect_do_not_join_the_next_transaction(tmp_path: Path, kind: str) -> None:
    with Server(tmp_path / "data") as server:
        admin = AdminClient({"bootstrap.servers": server.kafka})
        admin.create_topics([NewTopic("t", 1)])["t"].result(SOON_S)
        transaction = Transaction(server)
        stale = transaction.produce(b"stale") if kind == "produce" else transaction.end(commit=False)
        with transaction.connect() as given_up:
            # The broker is so slow that the client drops the connection, aborts, and begins again.
            transaction.begin()
            os.kill(server.pid, signal.SIGSTOP)
            given_up.sendall(write_request(1, "test", stale))
            given_up.shutdown(socket.SHUT_WR)
            os.kill(server.pid, signal.SIGCONT)
            while given_up.recv(1 << 16):
                pass
        with transaction.connect() as connection:
            stored = transaction.send_over(connection, transaction.produce(b"fresh"))
            assert stored.responses[0].partition_responses[0].error_code is ErrorCode.none
            assert transaction.send_over(connection, transaction.end(commit=True)).error_code is ErrorCode.none
        consumer = Consumer({"bootstrap.servers": server.kafka, "group.id": "g", "auto.offset.reset": "earliest"})
        consumer.subscribe(["t"])
        message = None
        while message is None or message.error() is not None:
            message = consumer.poll(1)
        assert message.value() == b"fresh"
        consumer.close()
