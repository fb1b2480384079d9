"""franz-go, fetched through the Go module proxy. The program is conformance/go."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from functools import cached_property

from conformance.client import BUILT, HERE, Program, Unavailable, run_builder

_FOLDER = HERE / "go"
# How the go command and the network below it speak of a proxy that cannot be reached.
_OFFLINE = ("dial tcp", "no such host", "connection refused", "module lookup disabled", "i/o timeout")
_TOO_OLD = ("requires go >=", "toolchain not available")


class GoClient:
    """The version of franz-go that go.mod names."""

    @cached_property
    def name(self) -> str:
        """The name of the client in the report."""
        match = re.search(r"/franz-go (v\S+)", (_FOLDER / "go.mod").read_text(encoding="utf-8"))
        return f"go franz-go {match[1] if match else ''}"

    def build(self) -> Program:
        """Fetch the client and compile the program with Go."""
        if shutil.which("go") is None:
            raise Unavailable("Go (go) is not on the PATH")
        output = BUILT / "go"
        output.mkdir(parents=True, exist_ok=True)
        program = output / "conformance"
        run_builder(["go", "build", "-o", str(program), "."], folder=_FOLDER, offline_marks=(*_OFFLINE, *_TOO_OLD))
        return Program([str(program)], output / "client.log")

    def arguments(self, address: str, served: str, only: str, registry: str) -> Sequence[str]:
        """The broker, what it serves, and its schema registry."""
        return [address, served, only, registry]
