"""Error messages of pipelines."""

from __future__ import annotations

from millstream.core.errors import ExpectationFailed, LostData
from millstream.pipelines.jobs.error_reason import headline, reason_of


def test_the_error_about_lost_messages_names_the_setting_of_the_pipeline() -> None:
    lost = str(LostData([("orders", 0, 5, 17)]))
    assert lost.endswith("set failOnDataLoss to false")
    reported = reason_of(
        RuntimeError(f"Job aborted\nTraceback (most recent call last):\n  File x\nLostData: {lost}\n\tat java"),
        name="shop",
    )
    assert "orders-0: offsets 5 to 16" in reported
    assert reported.endswith("millstream pipeline update shop --set on.lost=skip")
    assert "failOnDataLoss" not in reported


def test_the_error_about_an_expectation_names_it_the_message_and_the_remedy() -> None:
    failed = ExpectationFailed("orders", 2, 17, "total >= 0")
    reported = reason_of(
        RuntimeError(
            "Job aborted\nTraceback (most recent call last):\n  File x\n"
            f"millstream.core.errors.ExpectationFailed: {failed}\n"
            "[millstream fault: declared, ExpectationFailed]\n\tat java"
        ),
        name="shop",
    )
    located = "the message at offset 17 of topic 'orders', partition 2, violates the expectation 'total >= 0'"
    assert headline(reported).startswith(located)
    assert "millstream pipeline update shop --set on.violation=quarantine;" in reported
    assert "millstream pipeline update shop --set expect=" in reported
