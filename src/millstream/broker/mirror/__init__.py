"""Mirrors: copies of another cluster's topics with the same offsets, their groups and queues, and the way back.

Start at `service`, which runs a node's part of every mirror; `copier` is the path of a record.
"""
