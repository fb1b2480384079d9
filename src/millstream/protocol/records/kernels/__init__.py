"""Kernels compiled by numba: the bulk path of the record codec.

Only `decoder.py`, `encoder.py` and `partitioner.py` call them.
"""
