"""The three who work on the orders of `millstream demo`, and how the story waits for them."""

from __future__ import annotations

import asyncio
import base64
import hmac
import json
import threading
from collections import Counter
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

from sqlalchemy import Connection, Engine, create_engine, text

from millstream.client.idempotent_handler import TransactionalHandler
from millstream.client.message import Message

SECRET = "whsec_" + base64.b64encode(b"a secret of the demo alone").decode()


class Progress:
    """Lets the story wait until something is so; whoever changes something says so, from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()

    def tell(self) -> None:
        """Something has changed; on the loop."""
        self._changed.set()

    def tell_from_thread(self) -> None:
        """Something has changed; from elsewhere."""
        self._loop.call_soon_threadsafe(self._changed.set)

    async def until(self, condition: Callable[[], bool], *, within_s: float) -> None:
        """Wait until it is so; raises `TimeoutError` when that takes too long."""
        async with asyncio.timeout(within_s):
            while not condition():
                await self._changed.wait()
                self._changed.clear()


class Billing:
    """Writes a bill for each order into a database, in one transaction with the mark that it has done so."""

    def __init__(self, folder: Path, progress: Progress) -> None:
        self._engine: Engine = create_engine(f"sqlite:///{folder}/billing.db")
        with self._engine.begin() as connection:
            connection.execute(text("CREATE TABLE bills (order_id INTEGER)"))
        self._handler = TransactionalHandler(_write_bill, name="billing", store=self._engine, threads=1)
        self._progress = progress
        self.orders: set[int] = set()

    async def __call__(self, message: Message) -> None:
        """Handle one message."""
        await self._handler(message)
        self.orders.add(message.json()["order_id"])
        self._progress.tell()

    def bills(self) -> Counter[int]:
        """How many bills each order has."""
        with self._engine.connect() as connection:
            return Counter(connection.execute(text("SELECT order_id FROM bills")).scalars())

    async def close(self) -> None:
        """Let go of the database."""
        await self._handler.close()
        self._engine.dispose()


def _write_bill(message: Message, connection: Connection) -> None:
    connection.execute(text("INSERT INTO bills VALUES (:order_id)"), {"order_id": message.json()["order_id"]})


class Shipping:
    """Sends parcels, the orders of each customer in order; until it is corrected, it cannot do so without a city."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.is_corrected = False
        self.parcels: list[tuple[str, int]] = []
        self.failures: Counter[int] = Counter()

    async def __call__(self, message: Message) -> None:
        """Handle one message."""
        order = message.json()
        try:
            if "city" not in order and not self.is_corrected:
                raise ValueError("the order has no city")
            self.parcels.append((message.key_text or "", order["order_id"]))
        except ValueError:
            self.failures[order["order_id"]] += 1
            raise
        finally:
            self._progress.tell()


class Webhook:
    """An endpoint that orders are pushed to; it trusts only what is signed with its secret."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.orders: Counter[int] = Counter()
        self.refused = 0
        endpoint = self

        class Request(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                self.send_response(204 if endpoint.take(self.headers, body) else 401)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Request)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="webhook", daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}/orders"

    def take(self, headers: Any, body: bytes) -> bool:
        """Look at one request; whether it is genuine."""
        signed = f"{headers['webhook-id']}.{headers['webhook-timestamp']}.".encode() + body
        key = base64.b64decode(SECRET.removeprefix("whsec_"))
        expected = "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
        genuine = hmac.compare_digest(expected, headers["webhook-signature"] or "")
        if genuine:
            self.orders[json.loads(body)["order_id"]] += 1
        else:
            self.refused += 1
        self._progress.tell_from_thread()
        return genuine

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
