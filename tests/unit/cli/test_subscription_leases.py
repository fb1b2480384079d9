"""`millstream subscription leases` when no lease can be shown."""

from __future__ import annotations

import pytest

from millstream.cli import subscription
from millstream.protocol.private.subscriptions import HeldLeases


@pytest.mark.parametrize(
    ("omitted", "shown"),
    [
        (0, "No worker holds a message.\n"),
        (19, "No worker holds a message here; at the source of this copy, workers hold 19 messages.\n"),
    ],
)
def test_messages_leased_by_workers_of_the_source_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], omitted: int, shown: str
) -> None:
    monkeypatch.setattr(subscription, "_call_subscriptions", lambda *_: HeldLeases([], omitted))
    subscription.leases("workers")
    assert capsys.readouterr().out == shown
