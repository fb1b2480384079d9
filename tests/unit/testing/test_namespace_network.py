"""The nodes of a trial in network namespaces start: on an open network of their own, which must be requested."""

from __future__ import annotations

from millstream.broker.security.listeners import Listeners
from millstream.core.config import Config
from millstream_testing.cluster_network import NamespaceNetwork


def test_nodes_may_listen_on_the_addresses_of_their_namespaces() -> None:
    network = NamespaceNetwork(3)
    network._subnet = "198.18.7"
    with network._thread:
        kafka, http = network.addresses(1)
        stores = {"etcd": "http://198.18.7.254:2379", "catalog": "postgresql://198.18.7.254/nodes"}
        flags = {**network.settings(1), **stores, "kafka": kafka, "http": http, "cluster": "trial", "node-id": 1}
        Listeners(Config.load(flags=flags, environment={})).check()
