"""The defaults page names every setting of nodes, topics and subscriptions with its current value."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millstream.core.config import Config
from millstream.core.subscription import DEAD_LETTER_TOPIC, SubscriptionSettings, settings_of_new
from millstream.core.topic import TopicSettings

PAGE = (Path(__file__).parents[2] / "docs" / "defaults.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def reported(title: str) -> dict[str, str]:
    """The first column of a table: `name=value`, or that `name` is empty."""
    cells = [line.split(" | ")[0] for line in section(title).splitlines() if line.startswith("| `")]
    defaults = {}
    for name, value in re.findall(r"`([\w.-]+)(?:=([^`]*))?`", " ".join(cells)):
        assert name not in defaults, f"{name} is listed twice"
        defaults[name] = value
    return defaults


def text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize(
    ("title", "declared"),
    [
        ("Nodes", {name: text(option.default) for name, (_, option) in Config.declared().items()}),
        ("Topics", {name: text(setting.default) for name, setting in TopicSettings.declared().items()}),
        (
            "Subscriptions",
            {
                **{name: text(setting.default) for name, setting in SubscriptionSettings.declared().items()},
                **settings_of_new({}, ""),
            },
        ),
    ],
)
def test_every_default_is_documented_with_its_value(title: str, declared: dict[str, str]) -> None:
    defaults = reported(title)
    defaults.pop("NAME-dlq", None)
    assert defaults == declared


def test_the_dead_letter_topic_defaults_to_a_separate_one() -> None:
    assert f"`{DEAD_LETTER_TOPIC}` = its own topic" in section("Subscriptions")


def test_each_row_describes_three_outages() -> None:
    rows = [line for line in PAGE.splitlines() if line.startswith("|")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {6}
