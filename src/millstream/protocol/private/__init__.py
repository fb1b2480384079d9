"""Millstream's own requests (API keys from 32000): typed messages, and clients that send them.

May import `core` and the rest of `protocol`. Start reading at `subscription_messages.py` and `subscriptions.py`.
"""
