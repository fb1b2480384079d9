"""Run the broker inside the program: publish and handle messages, and find the data again at the next start.

python examples/embedded.py [folder]
"""

import asyncio
import sys

import millstream


async def bill(message: millstream.Message) -> None:
    """Handle an order: returning accepts it, raising redelivers it until it is dead-lettered."""
    order = message.json()
    print(f"order {order['order_id']} of {message.key_text}: {order['total']} billed")


async def main(folder: str) -> None:
    """Publish two orders, one of which is large enough for billing."""
    async with millstream.open(folder) as ms:
        await ms.subscribe("orders", bill, name="billing", filter="payload.total > 1000")
        await ms.publish("orders", {"order_id": 1, "total": 20}, key="customer-7")
        large = await ms.publish("orders", {"order_id": 2, "total": 1500}, key="customer-7")
        delivery = await ms.delivery(large, subscription="billing", wait=30)
        print(f"billing is done with message {large.offset}: {delivery.is_final}")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "./data"))
