"""The asyncio client of the Kafka protocol: connections, metadata, retries, and one file per request on its hot path.

May import `core` and the rest of `protocol`. Start reading at `client.py`.
"""
