"""What the tests with real clients share."""

from __future__ import annotations

import warnings

# kafka-python reads its schemas through a function that Python 3.11 and 3.12 warn about, while it is imported.
with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    import kafka  # noqa: F401
