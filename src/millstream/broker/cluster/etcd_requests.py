"""Requests to etcd and their responses, in the terms of the coordination store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aetcd import rpc

from millstream.broker.cluster.store import Change, Entry, Event, Expect, Put
from millstream.core.errors import CorruptState


def range_end(prefix: bytes) -> bytes:
    """Return the first key behind all that begin with `prefix`."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\x00"


def transaction(namespace: bytes, changes: Sequence[Change], expect: Sequence[Expect], lease: int) -> Any:
    """Build a transaction of changes under conditions."""
    return rpc.TxnRequest(
        compare=[
            rpc.Compare(
                key=namespace + key.encode(),
                target=rpc.Compare.MOD,
                result=rpc.Compare.EQUAL,
                mod_revision=revision,
            )
            for key, revision in expect
        ],
        success=[_operation(namespace, change, lease) for change in changes],
    )


def _operation(namespace: bytes, change: Change, lease: int) -> Any:
    key = namespace + change.key.encode()
    if not isinstance(change, Put):
        return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
    put = rpc.PutRequest(key=key, value=change.value.encode(), lease=lease if change.leased else 0)
    return rpc.RequestOp(request_put=put)


def page(prefix: bytes, *, first: bytes, revision: int, keys_max: int) -> Any:
    """Build a read of the keys below `prefix` from `first` on, as of a revision; 0 means the newest."""
    return rpc.RangeRequest(key=first, range_end=range_end(prefix), revision=revision, limit=keys_max)


def watch(prefix: bytes, *, after: int) -> Any:
    """Build a watch of what changes below `prefix`."""
    create = rpc.WatchCreateRequest(
        key=prefix, range_end=range_end(prefix), start_revision=after + 1, progress_notify=True
    )
    return rpc.WatchRequest(create_request=create)


def entry(namespace: bytes, found: Any) -> Entry:
    """Convert a key of a read."""
    return Entry(_text(found.key[len(namespace) :]), _text(found.value), found.mod_revision, found.create_revision)


def event(namespace: bytes, event: Any) -> Event:
    """Convert a change of a watch."""
    value = None if event.type == rpc.Event.DELETE else _text(event.kv.value)
    return Event(_text(event.kv.key[len(namespace) :]), value, event.kv.mod_revision)


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CorruptState(f"etcd holds a value that is not UTF-8: {content[:100]!r}") from error
