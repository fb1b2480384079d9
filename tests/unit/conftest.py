"""Fixtures of several folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.broker.catalog.catalog import Catalog


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    opened = Catalog.open_folder(tmp_path)
    yield opened
    opened.close()
