"""Regular expressions that others give us.

They are of RE2's kind, as in Kafka: no back references and no looking around, and so matched in time that grows with
the length of a name and nothing else. How large one may get once it is compiled is bounded too.
"""

from __future__ import annotations

from typing import Any, Final

from millstream.core.errors import InvalidRegex

LENGTH_MAX: Final = 2048
COMPILED_BYTES_MAX: Final = 256 * 1024


def compile_regex(expression: str) -> Any:
    """A compiled expression of RE2; `InvalidRegex` when it is wrong or too large."""
    # Most groups name their topics, so the library is loaded when it is first needed.
    import re2

    if len(expression) > LENGTH_MAX:
        raise InvalidRegex(f"a regular expression has at most {LENGTH_MAX} characters, not {len(expression)}")
    options = re2.Options()
    options.max_mem = COMPILED_BYTES_MAX
    options.log_errors = False
    options.never_capture = True
    try:
        return re2.compile(expression, options=options)
    except re2.error as error:
        reason = error.args[0] if error.args else error
        reason_text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise InvalidRegex(f"the regular expression {expression!r} cannot be used: {reason_text}") from None
