"""What an error says to people: what Spark raises carries the traces of two languages, and the reason in between."""

from __future__ import annotations

import re
from typing import Final

from millstream.core.errors import LostData, MillstreamError
from millstream.core.pipeline import ON_LOST, SKIP
from millstream.pipelines.jobs.place_error import place_error
from millstream.pipelines.runtime.fault import MARK

LENGTH_MAX: Final = 4000

_LOSS_REMEDY: Final = f"set {ON_LOST}={SKIP} for the pipeline: millstream pipeline update {{}} --set {ON_LOST}={SKIP}"
"""What the owner of a pipeline does about lost messages: the options of its queries are not in reach."""

_TRACEBACK: Final = "Traceback (most recent call last):"
_JVM_TRACE: Final = "\n\tat "
_QUERY: Final = "\n=== Streaming Query ==="
"""What Spark says behind it is how it runs the statement, in many lines."""
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")
"""What tables of Delta put into what they say."""


def reason_of(error: BaseException, *, name: str = "NAME") -> str:
    """The sentences of an error that help the owner of the pipeline of a name, and no more than can be shown."""
    if not isinstance(error, MillstreamError):
        about_place = place_error(f"{type(error).__name__}: {error}")
        if about_place is not None:
            return about_place
    said = _COLOUR.sub("", str(error)).strip()
    if not isinstance(error, MillstreamError):
        said = _without_traces(said)
        if not said.startswith(type(error).__name__):
            said = f"{type(error).__name__}: {said}" if said else type(error).__name__
    said = said.replace(LostData.REMEDY, _LOSS_REMEDY.format(name))
    return said if len(said) <= LENGTH_MAX else f"{said[:LENGTH_MAX]} …"


def _without_traces(said: str) -> str:
    told = MARK.sub("", said.partition(_QUERY)[0].partition(_JVM_TRACE)[0])
    _, found, trace = told.rpartition(_TRACEBACK)
    if not found:
        return told.strip()
    # Lines of a traceback that stand at the margin are the error itself.
    lines = [line for line in trace.splitlines() if line and not line[0].isspace()]
    return "\n".join(lines).strip() or told.strip()
