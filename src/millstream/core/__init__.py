"""The base of every package: ids, errors, settings, metrics, clock, backoff, supervision, child processes.

Imports nothing of Millstream. Start reading at `errors.py` (the one exception tree) and `setting.py` (how a setting is
declared).
"""
