"""The filter language of subscriptions and routes: SQL conditions, compiled to functions over columns.

May import `core` and the rest of `protocol`. Start reading at `filter.py`, then `translation.py` (the language),
`node.py` (the tree) and `code.py` (compilation).
"""
