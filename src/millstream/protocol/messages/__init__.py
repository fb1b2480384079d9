"""Kafka messages: frames and headers (`codec.py`), encoding, bounds checks and conversion between versions.

May import `core`. Start reading at `codec.py`; `primitives.py` serves hot paths and private requests.
"""
