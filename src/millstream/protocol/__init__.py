"""Bytes on the wire and on disk: Kafka messages, record batches, private requests, the filter language.

Also the asyncio client that the CLI, the gateway, followers, the SDK and Spark share. Everything that arrives is
bounds-checked before it is parsed. May import `core` only. Start reading at `messages/codec.py`, `records/batch.py` and
`wire/client.py`.
"""
