"""The Python SDK, and in `admin/` the administrative operations that the CLI and HTTP share.

May import `protocol` and `core`, never `broker`: it talks to brokers over the network only. Start reading at
`connection.py`, then `publisher.py` for sending and `receiver.py` for receiving.
"""
