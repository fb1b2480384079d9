"""One log. Kafka clients stream it, workers acknowledge it message by message, Spark reads it as a table."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from millstream.client.connection import Connection as Connection
    from millstream.client.connection import connect as connect
    from millstream.client.idempotent_handler import IdempotentHandler as IdempotentHandler
    from millstream.client.idempotent_handler import TransactionalHandler as TransactionalHandler
    from millstream.client.message import Message as Message
    from millstream.client.message import Receipt as Receipt
    from millstream.client.message import Reject as Reject
    from millstream.client.message import RetryLater as RetryLater
    from millstream.client.message_stream import MessageStream as MessageStream
    from millstream.client.payload import NewMessage as NewMessage
    from millstream.client.receipt_book import check_receipts as check_receipts
    from millstream.client.subscriber import Subscriber as Subscriber
    from millstream.client.sync_connection import SyncConnection as SyncConnection
    from millstream.client.sync_connection import SyncMessage as SyncMessage
    from millstream.client.sync_connection import SyncMessageStream as SyncMessageStream
    from millstream.client.sync_connection import SyncSubscriber as SyncSubscriber
    from millstream.client.sync_connection import connect_sync as connect_sync
    from millstream.client.tracing import correlated as correlated
    from millstream.client.tracing import correlation_id as correlation_id
    from millstream.core.errors import MillstreamError as MillstreamError
    from millstream.core.errors import PublishFailed as PublishFailed
    from millstream.embedded import open as open
    from millstream.embedded import open_sync as open_sync
    from millstream.sandbox import Sandbox as Sandbox

__version__ = "0.1.0"

_PLACES = {
    "Connection": "client.connection",
    "IdempotentHandler": "client.idempotent_handler",
    "Message": "client.message",
    "MessageStream": "client.message_stream",
    "MillstreamError": "core.errors",
    "NewMessage": "client.payload",
    "PublishFailed": "core.errors",
    "Receipt": "client.message",
    "Reject": "client.message",
    "RetryLater": "client.message",
    "Sandbox": "sandbox",
    "Subscriber": "client.subscriber",
    "SyncConnection": "client.sync_connection",
    "SyncMessage": "client.sync_connection",
    "SyncMessageStream": "client.sync_connection",
    "SyncSubscriber": "client.sync_connection",
    "TransactionalHandler": "client.idempotent_handler",
    "check_receipts": "client.receipt_book",
    "connect": "client.connection",
    "connect_sync": "client.sync_connection",
    "correlated": "client.tracing",
    "correlation_id": "client.tracing",
    "open": "embedded",
    "open_sync": "embedded",
}
"""The module of each public name, imported on first use."""


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'millstream' has no attribute {name!r}")
    return getattr(import_module(f"millstream.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
