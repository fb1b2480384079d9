"""Confluent Schema Registry's REST API, under `/registry` and on its own port.

May import `client`, `protocol`, `core` and the rest of `gateway`. Start reading at `app.py`.
"""
