"""The one-line summary of an error in the list of pipelines."""

from __future__ import annotations

import pytest

from millstream.pipelines.jobs.error_reason import HEADLINE_LENGTH_MAX, headline


@pytest.mark.parametrize(
    ("reason", "reported"),
    [
        ("", ""),
        ("one line", "one line"),
        ("a column is unknown\n  SELECT totl\n         ^", "a column is unknown"),
        ("ParseException:\n\n[SYNTAX]:\n  near 'SELCT'\nmore", "ParseException: [SYNTAX]: near 'SELCT'"),
    ],
)
def test_the_most_specific_reason_is_shown(reason: str, reported: str) -> None:
    assert headline(reason) == reported


def test_a_long_error_is_cut_between_sentences_and_keeps_the_advice_if_it_fits() -> None:
    advice = "set on.lost=skip for the pipeline: millstream pipeline update NAME --set on.lost=skip"
    reason = f"orders-0: offsets 5 to 16 are lost; {advice}"
    assert headline(reason) == reason
    assert headline("x" * 200 + "; " + "y" * 200) == "x" * 200 + " …"
    assert len(headline("x" * 1000)) == HEADLINE_LENGTH_MAX + 2
