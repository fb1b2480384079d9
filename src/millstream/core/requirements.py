"""The packages that the code of jobs and functions needs, as in a requirements.txt."""

from __future__ import annotations

import re
from typing import Final

from millstream.core.errors import InvalidSetting

_OPTIONS: Final = (
    "--index-url",
    "-i",
    "--extra-index-url",
    "--find-links",
    "-f",
    "--no-index",
    "--pre",
    "--prefer-binary",
)
_REFUSED_OPTIONS: Final = {
    "-e": "an editable requirement",
    "--editable": "an editable requirement",
    "-r": "another file, which the nodes do not have",
    "--requirement": "another file, which the nodes do not have",
    "-c": "another file, which the nodes do not have",
    "--constraint": "another file, which the nodes do not have",
}


def check_requirements(text: str) -> list[str]:
    """Return the lines of requirements; raise `InvalidSetting` for those that cannot be locked."""
    joined = re.sub(r"\\\n", " ", text)
    lines = [line.split(" #")[0].strip() for line in joined.splitlines()]
    requirements = [line for line in lines if line and not line.startswith("#")]
    for line in requirements:
        word = re.split(r"[\s=]", line, maxsplit=1)[0]
        if word in _REFUSED_OPTIONS:
            raise InvalidSetting(f"requirements name {_REFUSED_OPTIONS[word]}: {line!r}")
        if word.startswith("-") and word not in _OPTIONS:
            raise InvalidSetting(f"requirements have the option {word}, which jobs do not support")
        if not word.startswith("-") and ("://" in line or " @ " in line or line.startswith((".", "/"))):
            raise InvalidSetting(f"requirements name a location instead of a package: {line!r}; use names and versions")
    return requirements
