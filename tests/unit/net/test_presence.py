"""State bound to a connection is released when the connection ends."""

from __future__ import annotations

from functools import partial

import pytest

from millstream.broker.net.presence import Presence


def test_callbacks_are_called_once_and_not_if_removed_before() -> None:
    presence, output = Presence(), list[str]()
    for name in ("one", "two", "three"):
        presence.on_close(name, partial(output.append, name))
    presence.forget("two")
    presence.forget("unknown")
    # The client has shut down its side; requests in flight may still get a response.
    presence.leave()
    assert output == []
    presence.end()
    presence.end()
    assert output == ["one", "three"]


def test_a_completed_request_does_not_remove_the_callback_of_the_next() -> None:
    presence, called = Presence(), list[str]()
    first, second = partial(called.append, "first"), partial(called.append, "second")
    presence.on_leave(first)
    presence.on_leave(second)
    presence.forget_on_leave(first)
    presence.leave()
    assert called == ["second"]
    presence = Presence()
    presence.on_leave(first)
    presence.forget_on_leave(first)
    presence.leave()
    assert called == ["second"]


def test_a_callback_may_remove_others() -> None:
    presence, output = Presence(), list[str]()

    def callback() -> None:
        presence.forget("one")
        output.append("one")

    presence.on_close("one", callback)
    presence.end()
    assert output == ["one"]


def test_a_failing_callback_does_not_prevent_others(caplog: pytest.LogCaptureFixture) -> None:
    presence, called = Presence(), list[str]()

    def fail() -> None:
        raise ValueError("spoilt")

    presence.on_undelivered(fail)
    presence.on_close("one", fail)
    presence.on_close("two", partial(called.append, "two"))
    presence.end()
    assert called == ["two"]
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
