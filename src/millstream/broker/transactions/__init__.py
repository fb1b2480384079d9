"""The transaction coordinator, and the commit of batches that many writers prepare.

Transactions are folds over `__transaction_state`. Decisions are durable before markers are written. May import
`coordination` and everything below the broker. Start at `shard.py` for the rules, `marker_sender.py` for the markers.
"""
