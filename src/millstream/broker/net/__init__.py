"""Connections: frames in, responses out, in order, with backpressure and fair turns between clients.

Memory for clients is bounded by one budget, and no client can take the loop from the others. May import `core`. Start
reading at `connection.py`, then `turns.py` (fairness), `budget.py` (memory) and `listener.py`.
"""
