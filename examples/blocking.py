"""Use the client without an event loop: calls block, and handlers run in threads.

python examples/blocking.py [folder]
"""

import sys

import millstream


def main(folder: str) -> None:
    """Publish a few messages and settle each one explicitly."""
    with millstream.open_sync(folder) as ms:
        ms.publish_many("letters", ["a", "b", "c"])
        for message in ms.subscription("letters", name="reader", start="earliest"):
            print(message.offset, message.text)
            message.ack()
            if message.text == "c":
                break


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "./data")
