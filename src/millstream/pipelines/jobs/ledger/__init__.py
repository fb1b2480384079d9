"""The ledger: the events of deliveries as a table, and the audit that accounts for every message."""
