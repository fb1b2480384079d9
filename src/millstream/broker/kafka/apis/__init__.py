"""One file per API, Kafka's and Millstream's private ones. Each docstring states the versions and the behaviour.

`docs/protocol.md` is generated from these files.
"""
