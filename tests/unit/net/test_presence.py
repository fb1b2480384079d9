"""State that lasts as long as a connection is released when it ends."""

from __future__ import annotations

from functools import partial

from millstream.broker.net.presence import Presence


def test_farewells_are_said_once_and_not_to_what_has_ended_before() -> None:
    presence, said = Presence(), list[str]()
    for name in ("one", "two", "three"):
        presence.on_close(name, partial(said.append, name))
    presence.forget("two")
    presence.forget("nobody")
    # Its client has ended its side; what is under way may still be answered.
    presence.leave()
    assert said == []
    presence.end()
    presence.end()
    assert said == ["one", "three"]


def test_a_farewell_may_forget_others() -> None:
    presence, said = Presence(), list[str]()

    def farewell() -> None:
        presence.forget("one")
        said.append("one")

    presence.on_close("one", farewell)
    presence.end()
    assert said == ["one"]
