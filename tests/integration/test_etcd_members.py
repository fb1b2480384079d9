"""A cluster on an etcd of three members, which are stopped one after another without client errors."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream_testing.committed_messages import committed_messages
from millstream_testing.etcd_server import EtcdGroup
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.producer_load import ProducerLoad
from millstream_testing.server import ServerGroup

WAIT_S = 60.0


@pytest.mark.trial
def test_stopping_a_member_of_etcd_causes_no_client_errors(tmp_path: Path, postgres: PostgresServer) -> None:
    with EtcdGroup() as etcd, ServerGroup(tmp_path, etcd.url, postgres.new_database()) as cluster:
        admin = AdminClient({"bootstrap.servers": cluster.kafka, "log_level": 0})

        def create(topic: str) -> None:
            admin.create_topics([NewTopic(topic, 3, 3)], operation_timeout=WAIT_S)[topic].result()

        create("orders")
        load = ProducerLoad(cluster.kafka, "orders")
        load.more(100)
        # First the member that all nodes use, then the leader, if that is another one.
        for is_first in (True, False):
            stopped = etcd.members[0] if is_first else etcd.leader()
            stopped.stop()
            load.more(300)
            # Operations that need etcd work too.
            create(f"without-{stopped.name}-{len(load.acknowledged)}")
            load.more(100)
            stopped.start()
            stopped.wait_until_healthy()
        load.finish()
        assert load.errors == []
        assert Counter(committed_messages(cluster.kafka, "orders")) == Counter(load.acknowledged)
