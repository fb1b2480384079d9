"""TLS, authentication and authorization of every listener.

Start at `authorizer.py` (the decision), `gate.py` (from a connection to a principal) and `guards.py` (what each API
needs). Everything fails closed: what is not declared, not loaded or not known is refused.
"""
