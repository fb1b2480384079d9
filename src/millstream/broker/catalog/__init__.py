"""The catalog: what users declare, in SQLite on a single node and in PostgreSQL for a cluster.

Files and state are removed only because of a deletion record here. May import `core`. Start reading at `catalog.py`;
`tables.py` has the schema, `database.py` the connections and their limits.
"""
