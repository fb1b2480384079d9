"""A node: everything between its sockets and its data folder.

An acknowledgement guarantees exactly what the topic's settings promise, and consumers see only acknowledged data. May
import `protocol` and `core`, never `client` or the processes that run beside it. Start reading at `node.py` (start and
stop order), `net/connection.py` (the way in) and `log/log.py` (the way down).
"""

from __future__ import annotations

from millstream.protocol.messages.lean_kio import import_lean_kio

# Before any module of this package imports kio.
import_lean_kio()
