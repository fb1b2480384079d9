"""The examples of docs/http.md run as they are written, in order, on a new node."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from millstream.testing.server import Server

PAGE = Path(__file__).parents[2] / "docs" / "http.md"
BLOCK = re.compile(r"^```sh example\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DEFAULT = "http://127.0.0.1:8080"
PATIENCE_S = 120.0


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_examples_work(server: Server, tmp_path: Path) -> None:
    script = "\n".join(BLOCK.findall(PAGE.read_text(encoding="utf-8"))).replace(DEFAULT, f"http://{server.http}")
    # A reader listens for longer than is needed here, and newer versions of curl know a short word for JSON.
    script = script.replace("--max-time 5", "--max-time 1")
    script = re.sub(r"--json (\S)", r"-H content-type:application/json -d \1", script).replace("curl ", "\ncurl -f -S ")
    ran = subprocess.run(
        ["bash", "-e", "-c", script], cwd=tmp_path, capture_output=True, timeout=PATIENCE_S, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert '"duplicate":true' in ran.stdout
    assert '"failed":0' in ran.stdout
    assert '"millstream.filter":"payload.total > 1000"' in ran.stdout
    (first, second) = json.loads((tmp_path / "pulled.json").read_text())["messages"]
    assert (first["key"], first["json"]) == ("customer-7", {"order_id": 1, "total": 1500})
    assert second["json"] == {"order_id": 2}
    # How much of a stream comes within a second is not promised.
    assert (tmp_path / "events.txt").exists()
    assert (tmp_path / "leased.txt").exists()
