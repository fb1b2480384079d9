"""`tail` and transactions, against a real server process."""

from __future__ import annotations

from confluent_kafka import Producer

from millstream_testing.command import CommandLine
from millstream_testing.waiting import wait_until

WAIT_S = 60.0


def test_tail_shows_only_committed_records_by_default(millstream: CommandLine) -> None:
    millstream("topic", "create", "paid")
    producer = Producer({"bootstrap.servers": millstream.brokers, "transactional.id": "payments", "log_level": 0})
    producer.init_transactions(WAIT_S)
    for number in range(6):
        producer.begin_transaction()
        producer.produce("paid", b"%s %d" % (b"kept" if number % 2 else b"dropped", number))
        producer.flush(WAIT_S)
        if number % 2:
            producer.commit_transaction(WAIT_S)
        else:
            producer.abort_transaction(WAIT_S)
    # A commit is acknowledged when it is decided; its markers, and with them the records, follow.
    wait_until(lambda: millstream("tail", "paid", "--raw").lines == ["kept 1", "kept 3", "kept 5"])
    assert millstream("tail", "paid", "--raw", "-n", 2).lines == ["kept 3", "kept 5"]
    everything = millstream("tail", "paid", "--raw", "--from", "start", "--isolation", "uncommitted").lines
    assert everything == ["dropped 0", "kept 1", "dropped 2", "kept 3", "dropped 4", "kept 5"]

    producer.begin_transaction()
    producer.produce("paid", b"open")
    producer.flush(WAIT_S)
    held = millstream("tail", "paid", "--raw", "-n", 1)
    assert held.lines == ["kept 5"]
    assert "a transaction that is open" in held.err
    assert millstream("tail", "paid", "--raw", "-n", 1, "--isolation", "uncommitted").lines == ["open"]
    producer.commit_transaction(WAIT_S)
    wait_until(lambda: millstream("tail", "paid", "--raw", "-n", 1).lines == ["open"])
    assert millstream("tail", "paid", "--isolation", "never").code == 2
