"""The notes of `millstream subscription update`: a change that succeeded is reported as such."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from millstream.cli import subscription
from millstream.core.errors import BrokerUnreachable, MillstreamError, NotAuthorized, RequestTimedOut
from millstream.core.subscription import DEAD_LETTER_TOPIC
from millstream.protocol.private import subscriptions


class Changed:
    """A client stand-in whose changes all succeed."""

    def __init__(self, _client: object) -> None:
        pass

    async def describe(self, _names: list[str]) -> list[dict[str, Any]]:
        return [{"settings": {DEAD_LETTER_TOPIC: "dead"}}]

    async def alter(self, *_asked: object, **_settings: object) -> None:
        pass


def updated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: MillstreamError | None
) -> tuple[str, str]:
    async def counted(*_asked: object) -> int:
        if failure is not None:
            raise failure
        return 3

    async def known(_topics: list[str]) -> Any:
        if failure is not None:
            raise failure
        return SimpleNamespace(nodes=[1])

    async def may_not(*_asked: object) -> bool:
        return False

    client: Any = SimpleNamespace(metadata=known)
    monkeypatch.setattr(subscription, "call_broker", lambda _common, question: asyncio.run(question(client)))
    monkeypatch.setattr(subscription, "_may_push", may_not)
    monkeypatch.setattr(subscriptions, "SubscriptionClient", Changed)
    monkeypatch.setattr(subscriptions, "open_letters", counted)
    subscription.update(
        "billing", settings=[f"{DEAD_LETTER_TOPIC}=other", "millstream.push.url=http://127.0.0.1:8080/hook"]
    )
    output = capsys.readouterr()
    return output.out, output.err


def test_every_note_is_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    out, err = updated(monkeypatch, capsys, None)
    assert out == "Changed subscription billing.\n"
    assert ("Topic dead keeps 3 open dead letters" in err, "to which node 1 does not push" in err) == (True, True)


@pytest.mark.parametrize("failure", [BrokerUnreachable("away"), RequestTimedOut("late"), NotAuthorized("not you")])
def test_a_failed_look_up_for_a_note_is_not_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], failure: MillstreamError
) -> None:
    assert updated(monkeypatch, capsys, failure) == ("Changed subscription billing.\n", "")
