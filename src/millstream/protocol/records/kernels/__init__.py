"""Kernels compiled by numba: the bulk path of the record codec, called by `decoder.py`, `encoder.py`, `partitioner.py`."""
