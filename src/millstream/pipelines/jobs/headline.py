"""The one line of an error that tells most, for lists of pipelines."""

from __future__ import annotations

from typing import Final

LENGTH_MAX: Final = 240
_ENDS: Final = ("; ", ". ", ", ", " ")
"""Where a line may be cut, the best first."""


def headline(reason: str) -> str:
    """An error in one line: its first sentence, and the next line where the first only announces it."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    if not lines:
        return ""
    text = lines[0]
    for line in lines[1:]:
        # `AnalysisException:` and `Job aborted due to stage failure:` say nothing without what follows.
        if not text.endswith(":"):
            break
        text = f"{text} {line}"
    return text if len(text) <= LENGTH_MAX else _cut(text)


def _cut(text: str) -> str:
    for end in _ENDS:
        at = text.rfind(end, LENGTH_MAX // 2, LENGTH_MAX)
        if at > 0:
            return f"{text[:at]} …"
    return f"{text[:LENGTH_MAX]} …"
