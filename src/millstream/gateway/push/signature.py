"""Signatures by which an endpoint can trust a message: those of Standard Webhooks (standardwebhooks.com).

Signed is `id.timestamp.body` with HMAC-SHA256. The id is that of the message, the same each time it is sent; the
timestamp is that of the request, so that an old request cannot be sent again by somebody else.
"""

from __future__ import annotations

import base64
import hmac
from collections.abc import Iterable

ID = b"webhook-id"
TIMESTAMP = b"webhook-timestamp"
SIGNATURE = b"webhook-signature"


def signature(keys: Iterable[bytes], message_id: bytes, timestamp_s: int, body: bytes) -> bytes:
    """The value of the header: one signature for each key."""
    signed = b"%b.%d.%b" % (message_id, timestamp_s, body)
    return b" ".join(b"v1," + base64.b64encode(hmac.digest(key, signed, "sha256")) for key in keys)
