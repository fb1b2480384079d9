"""Record batches: headers, compression, and the record codec in a plain and a compiled implementation.

May import `core`. Start reading at `batch.py` and `record.py`, which describes the layout of a record; `decoder.py` and
`encoder.py` are the compiled path.
"""
