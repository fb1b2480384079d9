"""The HTTP API under `/v1`: a table of typed routes, validated and served by `dispatch.py`.

The same types generate the OpenAPI document. Start reading at `route.py` and `routes/publishing.py`.
"""
