"""Administrative operations that the CLI and the HTTP gateway share, one file per noun.

May import `protocol` and `core`. Start reading at `topics.py`.
"""
