"""The schema registry of a node: what is registered, held in memory, and a child process that examines schemas.

The catalog is the source of truth; reads are served from memory. May import `catalog`, `cluster`, `protocol` and
`core`. Start reading at `registry.py`.
"""
