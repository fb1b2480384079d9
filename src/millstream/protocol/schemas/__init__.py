"""The three schema formats as pure functions: parse, print in canonical form, decide compatibility.

May import `core`. Schemas may be hostile, so this code runs in child processes with limits
(`core/child_pool.py`). Start reading at `formats.py`.
"""
