"""Builds docs/configuration.md from the declared settings; `make docs` prints it."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from millstream.core.config import ENVIRONMENT_PREFIX, FILE_NAME, Config
from millstream.core.mirror import MirrorSettings
from millstream.core.pipeline import SETTINGS, PipelineSettings
from millstream.core.setting import Setting, settings_of
from millstream.core.subscription import SubscriptionSettings
from millstream.core.topic import MISSING, TopicSettings

_HEAD = f"""# Configuration

This page is generated from the settings' declarations by `make docs`; do not edit it.

## The node

Set a value with a flag of `millstream serve` (`--node-id 2`), with an environment variable
(`{ENVIRONMENT_PREFIX}NODE_ID=2`) or in `{FILE_NAME}` (`node-id = 2`), which is read from the working directory or from
`--config FILE`. A flag takes precedence over the environment, which takes precedence over the file. An unknown name or
a value out of bounds is an error, and the node does not start; only environment variables of the commands, and those
that Kubernetes derives from a service's name, are ignored. Settings are read when the node starts.

"""

_TOPICS = """
## Topics

Set these with `millstream topic create NAME --set SETTING=VALUE`, change them with `millstream topic alter`, or use
any Kafka tool: the names are Kafka's where Kafka has them. A change takes effect at once, without a restart.

"""

_SUBSCRIPTIONS = """
## Subscriptions

Set these with `millstream subscription create NAME --set SETTING=VALUE`, change them with `millstream subscription
update`, or use any Kafka tool: they are the settings of the share group with that name.
[subscriptions.md](subscriptions.md) explains them. A change takes effect at once.

"""

_PIPELINES = """
## Pipelines

Set these with `millstream pipeline create KIND NAME --set SETTING=VALUE`, or change them with `millstream pipeline
update`. [pipelines.md](pipelines.md) explains them. A change takes effect with the next batch.

"""

_MIRRORS = """
## Mirrors

Set these with `millstream mirror create NAME --from HOST:PORT --set SETTING=VALUE`, or change them with `millstream
mirror update`. [mirroring.md](mirroring.md) explains them. A change takes effect at once.

"""

_MISSING = """
Kafka settings that Millstream does not support are refused, with the reason:

| setting | why it is refused |
|---|---|
"""


def reference() -> str:
    node = _table(declared for _, declared in Config.declared().values())
    subscriptions = _SUBSCRIPTIONS + _table(SubscriptionSettings.declared().values())
    mirrors = _MIRRORS + _table(declared for _, declared in settings_of(MirrorSettings))
    missing = "".join(f"| `{name}` | {reason} |\n" for name, reason in sorted(MISSING.items()))
    topics = _TOPICS + _table(TopicSettings.declared().values()) + _MISSING + missing
    return _HEAD + node + topics + subscriptions + _PIPELINES + _pipelines() + mirrors


def _pipelines() -> str:
    shared = [declared for _, declared in settings_of(PipelineSettings)]
    names = {declared.name for declared in shared}
    text = "Every pipeline has:\n\n" + _table(shared)
    for kind, settings in SETTINGS.items():
        own = [declared for _, declared in settings_of(settings) if declared.name not in names]
        text += f"\nA pipeline of kind `{kind}` also has:\n\n{_table(own)}"
    return text


def _table(settings: Iterable[Setting]) -> str:
    rows = "".join(
        f"| `{declared.name}` | {_default(declared)} | {_allowed(declared)} | {_description(declared)} |\n"
        for declared in settings
    )
    return "| setting | default | allowed | meaning |\n|---|---|---|---|\n" + rows


def _default(declared: Setting) -> str:
    if declared.kind is bool:
        return f"`{str(declared.default).lower()}`"
    return f"`{declared.default}`" if declared.default != "" else "empty"


def _allowed(declared: Setting) -> str:
    if declared.is_fixed:
        return f"only {_default(declared)}"
    if declared.kind is bool:
        return "`true`, `false`"
    if declared.length_max is not None:
        return f"text of up to {declared.length_max} characters"
    if declared.choices:
        return ", ".join(f"`{choice}`" for choice in declared.choices)
    least, most = declared.minimum, declared.maximum
    if least is not None and most is not None:
        return f"{least:.0f} to {most:.0f}"
    if least is not None:
        return f"{least:.0f} or more"
    return f"up to {most:.0f}" if most is not None else "text"


def _description(declared: Setting) -> str:
    return declared.description.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
