"""The examples of docs/python.md are run, one after the other, as they stand."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.testing.server import Server

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


async def test_every_example_runs(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 10
    async with millstream.connect(server.kafka) as ms:
        names: dict[str, Any] = {"ms": ms, "asyncio": asyncio, "millstream": millstream, "__name__": "page"}
        for number, block in enumerate(blocks):
            text = block.replace("localhost:9092", server.kafka)
            code = compile(text, f"block {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            if "asyncio.run(" in text:
                # A program of its own, with a loop of its own.
                await asyncio.to_thread(exec, code, dict(names))
            elif inspect.iscoroutine(running := eval(code, names)):
                await running
