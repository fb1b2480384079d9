"""Extracts a readable reason from a pipeline's error: Spark wraps it in the stack traces of two languages."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from millstream.core.errors import ExpectationFailed, LostData, MillstreamError
from millstream.core.pipeline import ON_LOST, SKIP
from millstream.pipelines.runtime.fault import MARK

_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*m")

_STORE: Final = re.compile(r"Generic \w+ error")

_REQUEST: Final = re.compile(r"Error performing \w+ (https?://\S+)")

_CODE: Final = re.compile(r"<Code>(.*?)</Code>(?:.*?<Message>(.*?)</Message>)?", re.DOTALL)

_STEP: Final = "↳"

_CREDENTIALS_HOSTS: Final = ("169.254.169.254", "169.254.170.2", "metadata.google.internal")
"""Metadata services from which cloud machines obtain credentials."""

_DISK: Final = re.compile(
    r"(?:FileNotFoundError|PermissionError|NotADirectoryError|FileExistsError|OSError): \[Errno \d+\] (.+?): '(.+?)'"
)


def place_error(text: str) -> str | None:
    """Explain an error about the location of tables in a sentence; None for any other error."""
    plain = _COLOUR.sub("", text)
    stores = list(_STORE.finditer(plain))
    if stores:
        return _explain_store_error(plain[stores[-1].start() :])
    disk = _DISK.search(plain)
    if disk is None:
        return None
    reason, path = disk.groups()
    return f"folder {path!r} cannot be written or read: {reason}; set another one with `lake` or `pipelines-lake`"


def _explain_store_error(text: str) -> str | None:
    request = _REQUEST.search(text)
    if request is None:
        return None
    url = urlsplit(request[1])
    if url.hostname in _CREDENTIALS_HOSTS:
        return (
            "there are no credentials for the object store: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY where the "
            "node, or the manual run, is started"
        )
    bucket = url.path.strip("/").partition("/")[0]
    about = f"bucket {bucket!r} at {url.scheme}://{url.netloc}" if bucket else f"{url.scheme}://{url.netloc}"
    return f"the object store, {about}: {_store_reason(text)}"


def _store_reason(text: str) -> str:
    code = _CODE.search(text)
    if code is not None:
        return f"{code[1]} ({code[2]})" if code[2] else code[1]
    steps = [step.strip() for step in text.split(_STEP)]
    # The last step is the cause.
    return steps[-1].partition("\n")[0].strip()


LENGTH_MAX: Final = 4000

_REMEDIES: Final = {
    # The owner of a pipeline cannot set the options of its queries.
    LostData.REMEDY: f"set {ON_LOST}={SKIP} for the pipeline: millstream pipeline update {{}} --set {ON_LOST}={SKIP}",
    ExpectationFailed.REMEDY: (
        "put such messages into the quarantine: millstream pipeline update {0} --set on.violation=quarantine; or land "
        "them: on.violation=count; or correct the expectations: millstream pipeline update {0} --set expect=…"
    ),
}
"""Advice for the owner of a pipeline, by a part of the error's text; the pipeline's name replaces the braces."""

_TRACEBACK: Final = "Traceback (most recent call last):"

_OWN: Final = re.compile(r"millstream\.core\.errors\.\w+: ")

_JVM_TRACE: Final = "\n\tat "

_QUERY: Final = "\n=== Streaming Query ==="
"""Spark appends its plan of the statement, in many lines."""

"""The mark that Delta tables put into their messages."""


def reason_of(error: BaseException, *, name: str = "NAME") -> str:
    """Return the sentences of an error that help the owner of a pipeline, within a length limit."""
    if not isinstance(error, MillstreamError):
        about_place = place_error(f"{type(error).__name__}: {error}")
        if about_place is not None:
            return about_place
    text = _COLOUR.sub("", str(error)).strip()
    if not isinstance(error, MillstreamError):
        text = _without_traces(text)
        if _OWN.match(text):
            # What a task has raised reads as if it had been raised here.
            text = _OWN.sub("", text, count=1)
        elif not text.startswith(type(error).__name__):
            text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    for general, command in _REMEDIES.items():
        text = text.replace(general, command.format(name))
    return text if len(text) <= LENGTH_MAX else f"{text[:LENGTH_MAX]} …"


def _without_traces(text: str) -> str:
    message = MARK.sub("", text.partition(_QUERY)[0].partition(_JVM_TRACE)[0])
    _, separator, trace = message.rpartition(_TRACEBACK)
    if not separator:
        return message.strip()
    # Unindented lines of a traceback are the error itself.
    lines = [line for line in trace.splitlines() if line and not line[0].isspace()]
    return "\n".join(lines).strip() or message.strip()


HEADLINE_LENGTH_MAX: Final = 240
_ENDS: Final = ("; ", ". ", ", ", " ")
"""Separators at which a line may be cut, best first."""


def headline(reason: str) -> str:
    """Return an error in one line: its first sentence, joined with the next line if the first only announces it."""
    lines = [line.strip() for line in reason.splitlines() if line.strip()]
    if not lines:
        return ""
    text = lines[0]
    for line in lines[1:]:
        # `AnalysisException:` and `Job aborted due to stage failure:` mean nothing without what follows.
        if not text.endswith(":"):
            break
        text = f"{text} {line}"
    return text if len(text) <= HEADLINE_LENGTH_MAX else _shorten(text)


def _shorten(text: str) -> str:
    for end in _ENDS:
        at = text.rfind(end, HEADLINE_LENGTH_MAX // 2, HEADLINE_LENGTH_MAX)
        if at > 0:
            return f"{text[:at]} …"
    return f"{text[:HEADLINE_LENGTH_MAX]} …"
