"""The demo prints its steps verbatim."""

from __future__ import annotations

import io

from rich.console import Console

from millstream.cli.demo import Commentary


def test_brackets_are_not_markup() -> None:
    reported = io.StringIO()
    account = Commentary(Console(file=reported))
    account.say("pip install 'millstream[spark]'")
    account.check(True, "offsets [0] are there", "")
    assert reported.getvalue() == "   pip install 'millstream[spark]'\n   ✓ offsets [0] are there\n"
