"""Random numbers that the code under test takes from the operating system, taken from the seed instead."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def seeded_entropy(seed: int) -> Iterator[None]:
    """Make `uuid`, `secrets` and the module `random` use a seed, and restore them afterwards."""
    source = random.Random(seed)
    state = random.getstate()
    random.seed(seed)
    try:
        with (
            mock.patch.object(os, "urandom", source.randbytes),
            mock.patch.object(random, "_urandom", source.randbytes),
        ):
            yield
    finally:
        random.setstate(state)
