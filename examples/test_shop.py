"""Test a program that uses Millstream with a real broker inside the test process.

pytest examples/test_shop.py
"""

import asyncio

import millstream


async def ship(ms: millstream.Connection, orders: str, parcels: str) -> millstream.Subscriber:
    """Turn every order into a parcel; this is the program under test."""

    async def handle(message: millstream.Message) -> None:
        await ms.publish(parcels, {"parcel_of": message.json()["order_id"]}, key=message.key)

    return await ms.subscribe(orders, handler=handle, name=f"shipping of {orders}", start="earliest")


def test_every_order_becomes_a_parcel(millstream_broker: millstream.Sandbox) -> None:
    """Test with the broker that all tests share, so each test uses its own names."""
    orders, parcels = millstream_broker.unique("orders"), millstream_broker.unique("parcels")

    async def story() -> None:
        async with millstream_broker.connect() as ms:
            await ship(ms, orders, parcels)
            await ms.publish(orders, {"order_id": 1}, key="customer-7")
            async for parcel in ms.subscription(parcels, name=parcels, start="earliest"):
                assert parcel.json() == {"parcel_of": 1}
                assert parcel.key_text == "customer-7"
                await parcel.ack()
                break

    asyncio.run(story())


def test_without_an_event_loop(
    millstream_client: millstream.SyncConnection, millstream_broker: millstream.Sandbox
) -> None:
    """Test with a connection whose calls block."""
    topic = millstream_broker.unique("orders")
    receipt = millstream_client.publish(topic, {"order_id": 1})
    assert receipt.offset == 0


def test_on_a_broker_of_its_own(fresh_millstream_broker: millstream.Sandbox) -> None:
    """Test a program whose topics have fixed names, with a broker for this test alone."""
    with fresh_millstream_broker.connect_sync() as ms:
        assert ms.publish("orders", {"order_id": 1}).offset == 0
