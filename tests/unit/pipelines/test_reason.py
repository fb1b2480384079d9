"""What errors of pipelines say to people."""

from __future__ import annotations

from millstream.core.errors import LostData
from millstream.pipelines.jobs.error_reason import reason_of


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
