"""Regular expressions from users.

The syntax is RE2's, as in Kafka: without back references and look-around, so that matching takes time linear in the
length of the name. The compiled size is bounded as well.
"""

from __future__ import annotations

from typing import Any, Final

from millstream.core.errors import InvalidRegex

LENGTH_MAX: Final = 2048
COMPILED_BYTES_MAX: Final = 256 * 1024


def compile_regex(expression: str) -> Any:
    """Compile an RE2 expression; raise `InvalidRegex` if it is invalid or too large."""
    # Most groups name their topics, so the library is loaded on first use.
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
