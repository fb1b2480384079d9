"""Apply an effect once although the message is delivered twice: the bill and its mark are written in one transaction.

python examples/billed_once.py [folder]
"""

import asyncio
import sys
from pathlib import Path

from sqlalchemy import Connection, create_engine, text

import millstream


def bill(message: millstream.Message, connection: Connection) -> None:
    """Write a bill; when this returns, the bill and the mark are committed together."""
    order = message.json()
    connection.execute(
        text("INSERT INTO bills VALUES (:order, :total)"), {"order": order["id"], "total": order["total"]}
    )


async def main(folder: str) -> None:
    """Publish the same order twice with the same id, as a publisher does that received no response."""
    engine = create_engine(f"sqlite:///{folder}/shop.db")
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE IF NOT EXISTS bills (order_id INTEGER, total INTEGER)"))
    async with (
        millstream.open(f"{folder}/broker") as ms,
        millstream.TransactionalHandler(bill, name="billing", store=engine) as handler,
    ):
        await ms.subscribe("orders", handler, name="billing", start="earliest")
        for _ in range(2):
            receipt = await ms.publish("orders", {"id": 1, "total": 1500}, id="order-1")
            await ms.delivery(receipt, subscription="billing", wait=30)
    with engine.connect() as connection:
        print("bills:", connection.execute(text("SELECT count(*) FROM bills")).scalar())
    engine.dispose()


if __name__ == "__main__":
    chosen = Path(sys.argv[1] if len(sys.argv) > 1 else "./data")
    chosen.mkdir(parents=True, exist_ok=True)
    asyncio.run(main(str(chosen)))
