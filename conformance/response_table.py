"""Tables of responses: recorded from Apache Kafka, and compared with those of both brokers."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.subject import PeerUnavailable


class ResponseTable(NamedTuple):
    """The requests, the file with Kafka's responses, and the intended differences of Millstream."""

    noun: str
    file: Path
    accepted: Collection[str]

    def recorded(self) -> dict[str, Any]:
        """Kafka's responses, as last recorded."""
        responses: dict[str, Any] = json.loads(self.file.read_text(encoding="utf-8"))
        return responses

    def differences(self, expected: Mapping[str, Any], got: Mapping[str, Any]) -> list[str]:
        """A line for each response that is another one, less those accepted."""
        return [
            f"{name}: kafka {expected.get(name)}, millstream {got.get(name)}"
            for name in sorted(expected.keys() | got.keys())
            if expected.get(name) != got.get(name) and name not in self.accepted
        ]

    def compare(self, theirs: Mapping[str, Any], ours: Mapping[str, Any], *, record: bool) -> int:
        """Show where both or the recorded responses differ; how many do."""
        if record:
            self.file.write_text(json.dumps(theirs, indent=1) + "\n", encoding="utf-8")
        recorded = self.recorded().items()
        lines = [f"{name} is recorded as {response}" for name, response in recorded if theirs.get(name) != response]
        lines += self.differences(theirs, ours)
        for line in lines:
            print(f"  DIFFERENT   {line}")
        print(f"{len(theirs)} {self.noun}, {len(self.accepted)} accepted, {len(lines)} different")
        return len(lines)


def run_comparison(compare: Callable[..., int]) -> int:
    """Run a comparison from the command line."""
    try:
        with tempfile.TemporaryDirectory(prefix="millstream-compare-") as folder:
            return 1 if compare(Path(folder), record="--record" in sys.argv) else 0
    except PeerUnavailable as reason:
        print(f"skipped: {reason}")
        return 0
