"""What etcd's JSON door takes and gives: keys and values in base 64, which msgspec turns into bytes by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from millstream.cluster.store import Change, Expect, Put
from millstream.model.errors import CorruptState, StoreUnavailable

M = TypeVar("M")


class Header(msgspec.Struct):
    """Comes with every answer."""

    revision: int = 0


class KeyValue(msgspec.Struct):
    """One key."""

    key: bytes
    value: bytes = b""
    mod_revision: int = 0
    create_revision: int = 0


class RangeAnswer(msgspec.Struct):
    """The keys that a read found."""

    header: Header
    kvs: list[KeyValue] = []
    more: bool = False


class TxnAnswer(msgspec.Struct):
    """Whether the conditions held."""

    header: Header
    succeeded: bool = False


class WatchEvent(msgspec.Struct):
    """One change."""

    kv: KeyValue
    type: str = "PUT"


class WatchResult(msgspec.Struct):
    """What a watch tells at once."""

    header: Header = msgspec.field(default_factory=Header)
    created: bool = False
    canceled: bool = False
    compact_revision: int = 0
    cancel_reason: str = ""
    events: list[WatchEvent] = []


class Failure(msgspec.Struct):
    """An error, with the code that gRPC gives it."""

    message: str = ""
    error: str = ""
    code: int = 0
    grpc_code: int = 0


class WatchLine(msgspec.Struct):
    """One line of a watch's answer, which has no end."""

    result: WatchResult | None = None
    error: Failure | None = None


class Lease(msgspec.Struct, rename={"lease_id": "ID", "ttl_s": "TTL"}):
    """A lease; no time left means that it has ended."""

    lease_id: int = 0
    ttl_s: int = 0


class KeepAliveLine(msgspec.Struct):
    """The answer to a sign of life."""

    result: Lease | None = None
    error: Failure | None = None


class Token(msgspec.Struct):
    """What stands for a user and password."""

    token: str = ""


def decode(content: bytes, kind: type[M]) -> M:
    """Read an answer."""
    try:
        # etcd writes 64-bit numbers as texts, since JavaScript has none so large.
        return msgspec.json.decode(content, type=kind, strict=False)
    except msgspec.MsgspecError as error:
        raise StoreUnavailable(f"etcd's answer cannot be read ({error}): {content[:200]!r}") from error


def encode(message: Any) -> bytes:
    """Write a request."""
    return msgspec.json.encode(message)


def range_end(prefix: bytes) -> bytes:
    """The first key behind all that begin with `prefix`."""
    kept = prefix.rstrip(b"\xff")
    return kept[:-1] + bytes([kept[-1] + 1]) if kept else b"\x00"


def transaction(
    namespace: bytes, changes: Sequence[Change], expect: Sequence[Expect], lease: int | None
) -> dict[str, Any]:
    """The request that carries out changes under conditions."""
    compare = [
        {"key": namespace + key.encode(), "target": "MOD", "result": "EQUAL", "mod_revision": revision}
        for key, revision in expect
    ]
    return {"compare": compare, "success": [_operation(namespace, change, lease) for change in changes]}


def _operation(namespace: bytes, change: Change, lease: int | None) -> dict[str, Any]:
    key = namespace + change.key.encode()
    if not isinstance(change, Put):
        return {"request_delete_range": {"key": key}}
    put = {"key": key, "value": change.value.encode()}
    return {"request_put": put | ({"lease": lease} if change.leased else {})}


def text(content: bytes) -> str:
    """A key or value as text."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CorruptState(f"etcd holds what is no text: {content[:100]!r}") from error
