"""The Kafka protocol of a node: dispatch, the APIs, and the services behind them.

A new API is one file in `apis/` and one line in `served_apis.py`; a private request adds its messages to
`protocol/private`. May import every other package of the broker. Start at `dispatch.py`, then `served_apis.py`.
"""
